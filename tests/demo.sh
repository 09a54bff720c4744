#!/bin/sh
# "make demo": serves an image of data and holes with our small server, copies it with
# examples/copy, and compares.  Everything it starts it also stops.
. tests/lib.sh

SIZE=${DEMO_SIZE:-268435456}
server_pid=

stop_all() {
    [ -n "$server_pid" ] && kill "$server_pid" && wait "$server_pid"
}

# Checksum and size of a file.
sum_of() {
    cksum <"$1"
}

die() {
    echo "demo: $*" >&2
    exit 1
}

now() {
    date +%s.%N
}

# The server's line goes through a FIFO, so that reading it is waiting for it.
mkfifo "$tmp/ready"
build/tests/server --demo "$SIZE" --save "$tmp/image" -U "$tmp/socket" >"$tmp/ready" &
server_pid=$!
read -r line <"$tmp/ready" || die 'the server did not start'
echo "server: $line"

echo "copy -p nbd+unix:///?socket=$tmp/socket $tmp/copy"
started=$(now)
build/examples/copy -p "nbd+unix:///?socket=$tmp/socket" "$tmp/copy" || die 'the copy failed'
ended=$(now)

image=$(sum_of "$tmp/image")
copied=$(sum_of "$tmp/copy")
cmp "$tmp/image" "$tmp/copy" || die 'the copy differs'
echo "bytes:             $(stat -c %s "$tmp/copy")"
echo "seconds:           $(echo "$ended $started" | awk '{ printf "%.3f", $1 - $2 }')"
echo "cksum of the image ${image%% *}"
echo "cksum of the copy  ${copied%% *}"
