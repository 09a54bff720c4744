# shellcheck shell=bash disable=SC2034,SC2154
# What the test scripts share that start servers; read in behind tests/lib.sh.  One server
# runs at a time, on $socket; $uri is how to reach it.

socket=$tmp/socket
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

# Waits until the server listens; the kernel's list of sockets tells (0x10000).
ready() {
    local deadline=$((SECONDS + 60))
    until grep -q " 00010000 .* $socket\$" /proc/net/unix; do
        if ! kill -0 "$server_pid" 2>/dev/null || [ $SECONDS -gt $deadline ]; then
            echo "error: server did not start: $(cat "$tmp/server.log")"
            return 1
        fi
    done
}

# start COMMAND...: starts a server that listens on $socket.
start() {
    stop
    uri="nbd+unix:///?socket=$socket"
    "$@" >"$tmp/server.log" 2>&1 </dev/null &
    server_pid=$!
    ready
}

# With -d it would serve one client only, so it is a daemon; its file of the pid comes
# before it listens.  $2 is more for the section of the disk.
serve_nbd_server() {
    stop
    uri="nbd+unix:///disk?socket=$socket"
    printf '[generic]\nunixsock = %s\nallowlist = true\n[disk]\nexportname = %s\n%s\n' \
        "$socket" "$1" "${2-}" >"$tmp/nbd-server.conf"
    nbd-server -C "$tmp/nbd-server.conf" -p "$tmp/pid" >"$tmp/server.log" 2>&1 || return 1
    until [ -s "$tmp/pid" ]; do :; done
    server_pid=$(cat "$tmp/pid")
    ready
}
