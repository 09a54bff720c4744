#!/bin/bash
# limit: 300
# tests/deadlock.c with the servers that people run.  nbdkit with its noparallel filter does
# not read while it answers, so a client that does not read while it sends hangs there.
. tests/lib.sh
. tests/servers.sh

serve_noparallel() {
    start nbdkit -f -U "$socket" --filter=noparallel memory 16M serialize="$1"
}

serve_qemu() {
    truncate -s 16M "$tmp/disk"
    start qemu-nbd -t -e 8 -k "$socket" -f raw "$tmp/disk"
}

serve_file() {
    truncate -s 16M "$tmp/disk"
    serve_nbd_server "$tmp/disk"
}

serve_tcp() {
    fresh_port
    launch nbdkit -f -i 127.0.0.1 -p "$port" --filter=noparallel memory 16M
}

# comes_to_an_end NAME COMMAND SERVE...
comes_to_an_end() {
    if ! has "$2"; then
        skip "$1" "$2 is not installed"
    elif "${@:3}" >"$tmp/output" 2>&1; then
        check "$1" timeout 60 build/tests/deadlock "$uri"
        sed -n "s/^# [a-z_]*: polls/# $1: polls/p" "$tmp/output"
        stop
    else
        fail "$1" "the server does not start: $(tail -n 1 "$tmp/output" "$tmp/server.log")"
    fi
}

comes_to_an_end 'nbdkit noparallel, requests' nbdkit serve_noparallel requests
comes_to_an_end 'nbdkit noparallel, all requests' nbdkit serve_noparallel all-requests
comes_to_an_end 'nbdkit noparallel, TCP' nbdkit serve_tcp
comes_to_an_end 'qemu-nbd' qemu-nbd serve_qemu
comes_to_an_end 'nbd-server' nbd-server serve_file
