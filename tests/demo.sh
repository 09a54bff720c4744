#!/bin/sh
# "make demo": serves an image of data and holes with our small server, copies it with
# examples/copy, and compares.  Everything it starts it also stops.
. tests/lib.sh

SIZE=${DEMO_SIZE:-268435456}
server_pid=

stop_all() {
    [ -n "$server_pid" ] && kill "$server_pid" && wait "$server_pid"
}

sum_of() {
    cksum <"$1" | cut -d ' ' -f 1
}

die() {
    echo "demo: $*" >&2
    exit 1
}

# The server's line goes through a FIFO, so that reading it is waiting for it.
mkfifo "$tmp/ready"
build/tests/server --demo "$SIZE" --save "$tmp/image" -U "$tmp/socket" >"$tmp/ready" &
server_pid=$!
read -r line <"$tmp/ready" || die 'the server did not start'
echo "server: $line"

echo "copy -p nbd+unix:///?socket=$tmp/socket $tmp/copy"
build/examples/copy -p "nbd+unix:///?socket=$tmp/socket" "$tmp/copy" || die 'the copy failed'

echo "cksum of the image: $(sum_of "$tmp/image")"
echo "cksum of the copy:  $(sum_of "$tmp/copy")"
cmp "$tmp/image" "$tmp/copy" || die 'the copy differs'
echo 'the copy is identical'
