#!/bin/bash
# limit: 1800
# examples/copy, info and hello against our server and those that people run.
#
# INTEROP_MIB is the size of the large image, 1024 if not set.
. tests/lib.sh
. tests/servers.sh

copy=build/examples/copy
flush=--flush

# Each serves file $1 for reading and writing; further arguments are its own.
serve_ours() {
    start build/tests/server -U "$socket" --file "$@"
}

serve_nbdkit() {
    start nbdkit -f -U "$socket" -t 16 "${@:2}" file "$1"
}

serve_delayed() {
    start nbdkit -f -U "$socket" -t 16 --filter=delay \
        file "$1" delay-read=5ms delay-write=5ms
}

serve_qemu_raw() {
    start qemu-nbd -t -e 8 -k "$socket" -f raw "$1"
}

serve_qemu_qcow2() {
    start qemu-nbd -t -e 8 -k "$socket" -f qcow2 "$1"
}

# copies COMMAND-ARGUMENTS...: copy with its counters left in $tmp/counters.
copies() {
    timeout 300 $copy -v "$@" 2>"$tmp/counters" || {
        cat "$tmp/counters"
        return 1
    }
}

# reached DEPTH ROLE: the most requests that were in flight on that side.
reached() {
    local most
    most=$(sed -n "s/^copy: $2: in_flight_max=\([0-9]*\) .*/\1/p" "$tmp/counters")
    [ "$most" = "$1" ] || {
        echo "error: $2 had ${most:-none} requests in flight, not $1"
        return 1
    }
}

download() {
    rm -f "$tmp/out"
    copies --requests="$2" "$uri" "$tmp/out" && cmp "$1" "$tmp/out" && reached "$2" source
}

# Nothing is flushed: the server's file is looked at, not the disk below it.
upload() {
    copies --requests="$2" "$1" "$uri" && reached "$2" destination
}

new_raw() {
    rm -f "$tmp/target"
    truncate -s "$(stat -c %s "$1")" "$tmp/target"
}

new_qcow2() {
    rm -f "$tmp/target"
    qemu-img create -q -f qcow2 "$tmp/target" "$(stat -c %s "$1")"
}

same_raw() {
    cmp "$1" "$tmp/target"
}

same_qcow2() {
    qemu-img compare -q -f raw -F qcow2 "$1" "$tmp/target"
}

# both_ways NAME IMAGE FORMAT SERVE: uploads the image into an empty target, looks at
# the target, downloads it again, at each depth.
both_ways() {
    local depth
    for depth in 1 16 64; do
        "new_$3" "$2" >"$tmp/output"
        if ! "$4" "$tmp/target" >"$tmp/output"; then
            fail "$1: starts" "$(cat "$tmp/output")"
            return
        fi
        check "$1: upload, $depth requests in flight" upload "$2" $depth
        check "$1: download, $depth requests in flight" download "$2" $depth
        stop
        check "$1: the server's file is the image, $depth requests in flight" "same_$3" "$2"
    done
    rm -f "$tmp/target" "$tmp/out"
}

# with COMMAND NAME CALL...: the call if the command is installed, else a skip.
with() {
    if has "$1"; then
        "${@:3}"
    else
        skip "$2" "$1 is not installed"
    fi
}

all_servers() {
    with nbdkit "$1, nbdkit file" both_ways "$1, nbdkit file" "$2" raw serve_nbdkit
    with qemu-nbd "$1, qemu-nbd raw" both_ways "$1, qemu-nbd raw" "$2" raw serve_qemu_raw
    with qemu-nbd "$1, qemu-nbd qcow2" both_ways "$1, qemu-nbd qcow2" "$2" qcow2 serve_qemu_qcow2
    with nbd-server "$1, nbd-server" both_ways "$1, nbd-server" "$2" raw serve_nbd_server
}

# Files of this machine in a file system that is mostly holes.
make_ext4() {
    truncate -s 256M "$1" && mke2fs -q -t ext4 -d /usr/include "$1"
}

random_file() {
    head -c "$2" /dev/urandom >"$1"
}

# one_way NAME SERVE IMAGE ARGUMENTS...: a server with some options, both directions.
one_way() {
    local name=$1 serve=$2 image=$3
    shift 3
    new_raw "$image"
    check "$name: starts" "$serve" "$tmp/target" "$@"
    # shellcheck disable=SC2086
    check "$name: upload" copies $flush "$image" "$uri"
    check "$name: the server's file is the image" same_raw "$image"
    rm -f "$tmp/out"
    check "$name: download" copies "$uri" "$tmp/out"
    check "$name: the download is the image" cmp "$image" "$tmp/out"
    stop
}

pipe_from() {
    $copy "$uri" - | cmp - "$1"
}

pipe_to() {
    cat "$1" | $copy --flush - "$uri" && same_raw "$1"
}

pipes() {
    new_raw "$2"
    check "$1: starts" "$3" "$tmp/target"
    check "$1: upload from a pipe" pipe_to "$2"
    check "$1: download into a pipe" pipe_from "$2"
    stop
}

sizes() {
    local size
    for size in 0 1 511 513 1000003; do
        random_file "$tmp/odd" $size
        one_way "$1, $size bytes" "$2" "$tmp/odd"
    done
}

# A server of which the even blocks are answered only after their odd neighbours have
# begun to be: a FIFO for each pair, which opens when both sides are there.
serve_swapped() {
    cat >"$tmp/pread" <<'END'
block=$(($4 / 65536))
fifo=$tmpdir/$((block / 2))
mkfifo "$fifo" 2>/dev/null
if [ $((block % 2)) = 0 ]; then
    cat "$fifo"
else
    exec 3>"$fifo"
fi
dd if="$IMAGE" bs=65536 skip=$block count=1 status=none
END
    IMAGE=$1 start nbdkit -f -U "$socket" -t 16 eval \
        thread_model='echo parallel' get_size="stat -c %s $1" pread="$(cat "$tmp/pread")"
}

swapped() {
    random_file "$tmp/swapped" 4194304
    check 'replies out of order: starts' serve_swapped "$tmp/swapped"
    rm -f "$tmp/out"
    check 'replies out of order: download' \
        copies --requests=16 --request-size=65536 "$uri" "$tmp/out"
    check 'replies out of order: the download is the image' cmp "$tmp/swapped" "$tmp/out"
    check 'replies out of order: 16 requests in flight' reached 16 source
    stop
}

delayed() {
    random_file "$tmp/odd" 3000001
    one_way 'nbdkit delay filter' serve_delayed "$tmp/odd"
}

# A server whose blocks at 3 MiB and behind can be neither read nor written.
serve_bad_block() {
    local broken="if [ \$4 -ge 3145728 ]; then echo EIO bad block >&2; exit 1; fi"
    start nbdkit -f -U "$socket" eval get_size='echo 4194304' \
        can_write='exit 0' pread="$broken; head -c \$3 /dev/zero" pwrite="$broken; cat >/dev/null"
}

# A server of which every call $1 fails.
serve_failing() {
    start nbdkit -f -U "$socket" --filter=error memory 4M "error-$1=EIO" "error-$1-rate=100%"
}

errors() {
    random_file "$tmp/whole" 4194304
    check 'errors: nbdkit error filter on reads starts' serve_failing pread
    refuse 'a failed read names its offset' 'read at offset 0:' \
        $copy --no-extents --requests=1 "$uri" "$tmp/out"
    check 'errors: nbdkit error filter on writes starts' serve_failing pwrite
    refuse 'a failed write names its offset' 'write at offset 0:' \
        $copy --requests=1 "$tmp/whole" "$uri"
    check 'errors: server with a bad block starts' serve_bad_block
    refuse 'a read of a bad block names its offset' 'read at offset 3145728:' \
        $copy --request-size=1048576 "$uri" "$tmp/out"
    refuse 'a write of a bad block names its offset' 'write at offset 3145728:' \
        $copy --request-size=1048576 "$tmp/whole" "$uri"
    refuse 'a failed read into a pipe names its offset' 'read at offset 3145728:' \
        $copy --request-size=1048576 "$uri" -
    stop
    refuse 'no server: not a success' 'cannot connect' $copy "$uri" "$tmp/out"
}

nbdkit_variants() {
    local variant
    random_file "$tmp/image" 3000001
    # nbdkit 1.32 offers flushing to an oldstyle client and then refuses it.
    flush=
    one_way 'nbdkit -o (oldstyle)' serve_nbdkit "$tmp/image" -o
    flush=--flush
    for variant in --mask-handshake=0 --mask-handshake=1 --mask-handshake=2 --no-sr; do
        one_way "nbdkit $variant" serve_nbdkit "$tmp/image" $variant
    done
    pipes 'nbdkit' "$tmp/image" serve_nbdkit
    sizes 'nbdkit' serve_nbdkit
    swapped
    delayed
    errors
}

our_variants() {
    local variant
    random_file "$tmp/image" 3000001
    for variant in --oldstyle --no-fixed --no-go --no-structured --no-zeroes=off --chunk=1000 \
        --shuffle=1 '--shuffle=2 --chunk=4096' '--shuffle=3 --no-structured'; do
        # shellcheck disable=SC2086
        one_way "our server $variant" serve_ours "$tmp/image" $variant
    done
    random_file "$tmp/image" 3000320
    one_way 'our server, blocks of 64 to 65536 bytes' serve_ours "$tmp/image" \
        --block-size=64:4096:65536
    pipes 'our server' "$tmp/image" serve_ours
    sizes 'our server' serve_ours
}

first_sector() {
    build/examples/hello "$uri" | cmp - <(head -c 512 "$1")
}

says_size() {
    [ "$(build/examples/info --size "$uri")" = "$(stat -c %s "$1")" ]
}

small_tools() {
    check "$1: starts" "$2" "$3"
    check "$1: hello prints the first sector" first_sector "$3"
    check "$1: info --size is the image's" says_size "$3"
    check "$1: info" build/examples/info "$uri"
    check "$1: info --json" build/examples/info --json "$uri"
    stop
}

random_file "$tmp/random" 16777216
both_ways 'our server' "$tmp/random" raw serve_ours
our_variants
small_tools 'our server' serve_ours "$tmp/random"
with nbdkit 'small tools, nbdkit' small_tools 'nbdkit' serve_nbdkit "$tmp/random"
with qemu-nbd 'small tools, qemu-nbd' small_tools 'qemu-nbd' serve_qemu_raw "$tmp/random"
with nbd-server 'small tools, nbd-server' small_tools 'nbd-server' serve_nbd_server "$tmp/random"
with nbdkit 'variants of nbdkit' nbdkit_variants

if has nbdkit || has qemu-nbd || has nbd-server; then
    random_file "$tmp/random" $((${INTEROP_MIB:-1024} * 1048576))
fi
all_servers 'random data' "$tmp/random"
rm -f "$tmp/random"
if ! has mke2fs; then
    skip 'ext4 image' 'mke2fs is not installed'
    exit
fi
check 'ext4 image: made' make_ext4 "$tmp/ext4"
all_servers 'ext4 image' "$tmp/ext4"
