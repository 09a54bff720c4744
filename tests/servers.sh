# shellcheck shell=bash disable=SC2034,SC2154
# What the test scripts share that start servers; read in behind tests/lib.sh.  One server
# runs at a time, on $socket or, on 127.0.0.1, on $port; $uri is how to reach it.

socket=$tmp/socket
port=$((20000 + $$ % 10000))
uri=
server_pid=

# A daemon is no child of this shell: it is waited for by looking.
stop() {
    [ -n "$server_pid" ] || return 0
    kill "$server_pid" 2>/dev/null
    wait "$server_pid" 2>/dev/null
    while kill -0 "$server_pid" 2>/dev/null; do :; done
    server_pid=
    rm -f "$socket" "$tmp/pid"
}

stop_all() {
    stop
}

# The kernel's lists of sockets tell who listens (0A, 0x10000).
port_taken() {
    grep -q "$(printf ':%04X 00000000:0000 0A ' "$port")" /proc/net/tcp
}

listens() {
    case $uri in
    nbd://*) port_taken ;;
    *) grep -q " 00010000 .* $socket\$" /proc/net/unix ;;
    esac
}

# No server, and a $port that is free for the next one.
fresh_port() {
    stop
    while port_taken; do
        port=$((port + 1))
    done
    uri=nbd://127.0.0.1:$port/
}

ready() {
    local deadline=$((SECONDS + 60))
    until listens; do
        if ! kill -0 "$server_pid" 2>/dev/null || [ $SECONDS -gt $deadline ]; then
            echo "error: server did not start: $(cat "$tmp/server.log")"
            return 1
        fi
    done
}

# launch COMMAND...: starts a server, and waits until it listens.
launch() {
    "$@" >"$tmp/server.log" 2>&1 </dev/null &
    server_pid=$!
    ready
}

# start COMMAND...: starts a server that listens on $socket.
start() {
    stop
    uri="nbd+unix:///?socket=$socket"
    launch "$@"
}

# With -d it would serve one client only, so it is a daemon; its file of the pid comes
# before it listens.  $2 is more for the section of the disk, $3 for the one of the server.
serve_nbd_server() {
    stop
    uri="nbd+unix:///disk?socket=$socket"
    printf '[generic]\nunixsock = %s\nallowlist = true\n%s\n[disk]\nexportname = %s\n%s\n' \
        "$socket" "${3-}" "$1" "${2-}" >"$tmp/nbd-server.conf"
    nbd-server -C "$tmp/nbd-server.conf" -p "$tmp/pid" >"$tmp/server.log" 2>&1 || return 1
    until [ -s "$tmp/pid" ]; do :; done
    server_pid=$(cat "$tmp/pid")
    ready
}

# The programs of Debian 13 that tests/trixie.sh has unpacked.
tree=${NBD_TRIXIE:-/var/cache/nbd.h-trixie}
newer=$tmp/newer # wrappers of them

# They run with the loader and the libraries of their own tree.
wrap_newer() {
    local program
    mkdir "$newer"
    for program in "$@"; do
        printf '#!/bin/sh\nexec %s --library-path %s --argv0 %s %s "$@"\n' \
            "$tree/usr/lib64/ld-linux-x86-64.so.2" "$tree/usr/lib/x86_64-linux-gnu" \
            "$program" "$tree/usr/bin/$program" >"$newer/$program"
        chmod +x "$newer/$program"
    done
}

# Waits until process $1 is over, for a minute at most.  A process of nobody that has ended
# may stay as a zombie.
ended() {
    local deadline=$((SECONDS + 60))
    while grep -q '^State:.[^Z]' "/proc/$1/status" 2>/dev/null; do
        if [ $SECONDS -gt $deadline ]; then
            kill "$1"
            return 1
        fi
    done
}

# leaves_no_server COMMAND...: a tool whose [ server ] is over when it is.
leaves_no_server() {
    rm -f "$tmp/started"
    timeout 60 "$@" -- [ sh -c "echo \$\$ >$tmp/started; exec nbdkit -f memory 1M" ] &&
        ! kill -0 "$(cat "$tmp/started")"
}

# signal_ends_the_server COMMAND...: the same for one that never says anything, and would
# stay for ever.
signal_ends_the_server() {
    local pid
    rm -f "$tmp/started"
    mkfifo "$tmp/started" "$tmp/never"
    "$@" -- [ sh -c "echo \$\$ >$tmp/started; read -r line <$tmp/never" ] &
    read -r pid <"$tmp/started"
    kill -TERM $!
    wait $!
    [ $? = 143 ] && ended "$pid"
}
