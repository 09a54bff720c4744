#!/bin/sh
# limit: 300
# One process uses libnbd.so and nbd.h; both copy an image right.
. tests/lib.sh

server_pid=
flags="-std=c99 -D_POSIX_C_SOURCE=200112L $WARN -O2 -I. -Itests"

stop_all() {
    [ -n "$server_pid" ] && kill "$server_pid" && wait "$server_pid"
}

# The server's line goes through a FIFO, so that reading it is waiting for it.
start_server() {
    mkfifo "$tmp/ready"
    build/tests/server --demo 3000001 --save "$tmp/image" -U "$tmp/socket" >"$tmp/ready" &
    server_pid=$!
    read -r line <"$tmp/ready"
    echo "$line"
    [ -S "$tmp/socket" ]
}

# program NAME HOST-OPTIONS OURS-OPTIONS: both halves in one program.
# The words of the options are separate arguments.
# shellcheck disable=SC2086
program() {
    $CC $flags $2 -c -o "$tmp/host.o" tests/both_libnbd.c &&
        $CC $flags $3 -c -o "$tmp/ours.o" tests/both_ours.c &&
        $CC -o "$tmp/$1" "$tmp/host.o" "$tmp/ours.o" -lnbd -ldl
}

# shellcheck disable=SC2086
library() {
    $CC $flags -fPIC -shared -o "$tmp/ours.so" tests/both_ours.c &&
        $CC $flags -DLOADED -DPOLLS -o "$tmp/loaded" tests/both_libnbd.c -lnbd -ldl
}

# copies_right NAME PROGRAM [LIBRARY]
copies_right() {
    how=$1
    program=$2
    shift 2
    check "runs: $how" timeout 100 "$program" "$tmp/socket" "$tmp/peer" "$tmp/ours" "$@"
    check "libnbd copies right: $how" cmp "$tmp/image" "$tmp/peer"
    check "nbd.h copies right: $how" cmp "$tmp/image" "$tmp/ours"
    rm -f "$tmp/peer" "$tmp/ours"
}

if ! echo '#include <libnbd.h>' | $CC -E -x c - >"$tmp/output" 2>&1; then
    skip 'libnbd and nbd.h in one process' '<libnbd.h> is not installed'
    exit
fi
check 'the server starts' start_server
check 'compiles: nbd.h linked into the program' program linked '' ''
copies_right 'nbd.h linked into the program' "$tmp/linked"
check 'compiles: nbd.h static, libnbd driven with nbd_poll' program static -DPOLLS -DNBD_STATIC
copies_right 'nbd.h static, libnbd driven with nbd_poll' "$tmp/static"
check 'compiles: nbd.h in a library' library
copies_right 'nbd.h in a library that is loaded, libnbd driven with nbd_poll' \
    "$tmp/loaded" "$tmp/ours.so"
