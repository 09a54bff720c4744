#!/bin/bash
# limit: 300
# tests/deadlock.c with the servers that people run.  nbdkit with its noparallel filter does
# not read while it answers, so a client that does not read while it sends hangs there.
. tests/lib.sh
. tests/servers.sh

port=$((20000 + $$ % 10000))

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

# The kernel's list tells who listens (0A) on the port.
port_listens() {
    grep -q "$(printf ':%04X 00000000:0000 0A ' "$port")" /proc/net/tcp
}

serve_tcp() {
    stop
    while port_listens; do
        port=$((port + 1))
    done
    uri=nbd://127.0.0.1:$port/
    nbdkit -f -i 127.0.0.1 -p "$port" --filter=noparallel memory 16M >"$tmp/server.log" 2>&1 \
        </dev/null &
    server_pid=$!
    local deadline=$((SECONDS + 60))
    until port_listens; do
        [ $SECONDS -lt $deadline ] && kill -0 "$server_pid" 2>/dev/null || return 1
    done
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
