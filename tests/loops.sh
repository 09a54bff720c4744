#!/bin/bash
# limit: 1800
# The loops that people copy: each is short, builds with the command that stands in its first
# comment, copies an image byte by byte, also under ASan, and never passes over an error.
. tests/lib.sh
. tests/servers.sh

image=$tmp/ext4
target=$tmp/target
source_socket=$tmp/source
source_uri="nbd+unix:///?socket=$source_socket"
source_pid=

stop_source() {
    [ -n "$source_pid" ] || return 0
    kill "$source_pid" 2>/dev/null
    wait "$source_pid" 2>/dev/null
    source_pid=
    rm -f "$source_socket"
}

stop_all() {
    stop_source
    stop
}

# start_source COMMAND...: a second server, which listens on $source_socket.
start_source() {
    local socket=$source_socket server_pid='' started
    stop_source
    launch "$@"
    started=$?
    source_pid=$server_pid
    return $started
}

serve_image() {
    start_source nbdkit -f -U "$source_socket" "$@"
}

# The target is empty and $1 bytes long.
serve_target() {
    rm -f "$target"
    truncate -s "$1" "$target"
    start qemu-nbd -t -e 4 -k "$socket" -f raw "$target"
}

serve_both() {
    serve_image file "$image" && serve_target "$(stat -c %s "$image")"
}

# The command of the first comment of examples/$1.c, with more arguments behind the compiler.
build() {
    local name=$1 command
    shift
    command=$(sed -n 's,^// .*&& gcc ,,p' "examples/$name.c" | head -n 1)
    [ -n "$command" ] || {
        echo "error: no command in examples/$name.c"
        return 1
    }
    # shellcheck disable=SC2086
    $CC "$@" ${command% -o *} -o "$tmp/$name"
}

short() {
    [ "$(wc -l <"examples/$1.c")" -le 150 ]
}

# Each NBD_NO_INIT in the code has the word "safe" in a comment beside it, or above.
says_why_it_is_safe() {
    awk '
        { comment = index($0, "//") ? substr($0, index($0, "//")) : "" }
        $0 ~ /^[^\/]*NBD_NO_INIT/ { n++; if ((comment above) !~ /safe/) missing = 1 }
        { above = comment ? comment : above != "" && $0 ~ /NBD_NO_INIT/ ? above : "" }
        END { exit n == 0 || missing }
    ' "examples/$1.c"
}

# copies NAME ARGUMENTS...: within a minute.
copies() {
    timeout 60 "$tmp/$1" "${@:2}"
}

same_image() {
    cmp "$image" "$target"
}

untouched() {
    cmp -n "$(stat -c %s "$target")" "$target" /dev/zero
}

# server_to_server RULE ARGUMENTS...: nbdkit to qemu-nbd.
server_to_server() {
    check "$1: servers start" serve_both
    check "$1: copies" copies "${@:2}" "$source_uri" "$uri"
    check "$1: the target is the image" same_image
}

files() {
    check "$1: servers start" serve_both
    rm -f "$tmp/file"
    check "$1: downloads" copies "$2" "$source_uri" "$tmp/file"
    check "$1: the file is the image" cmp "$image" "$tmp/file"
    check "$1: uploads" copies "$2" "$image" "$uri"
    check "$1: the target is the image" same_image
    refuse "$1: a file that is not there is an error" ': No such file' copies "$2" "$tmp/none" "$uri"
    refuse "$1: a device that is too small is an error" '^simple_copy: /dev/full: smaller' \
        copies "$2" "$source_uri" /dev/full
    refuse "$1: a file that cannot grow is an error that says why" ': File too large' \
        sh -c "trap '' XFSZ; ulimit -f 1; exec timeout 60 '$tmp/$2' '$source_uri' '$tmp/file'"
}

# Each gets servers of its own: nbdkit 1.32 may abort when a client leaves in the middle.
errors() {
    check "$1: source with errors starts" \
        serve_image --filter=error memory 4M error-pread=EIO error-pread-rate=100%
    check "$1: target for it starts" serve_target 4194304
    refuse "$1: a failed read ends it and names the offset" 'read at offset [0-9]*: input/output error' \
        copies "$2" "$source_uri" "$uri"
    check "$1: source for it starts" serve_image memory 4M
    check "$1: target with errors starts" start nbdkit -f -U "$socket" --filter=error \
        memory 4M error-pwrite=ENOSPC error-pwrite-rate=100%
    refuse "$1: a failed write ends it and names the offset" 'write at offset [0-9]*: no space left' \
        copies "$2" "$source_uri" "$uri"
    check "$1: source for a read-only target starts" serve_image memory 4M
    check "$1: read-only target starts" start nbdkit -f -r -U "$socket" memory 4M
    refuse "$1: a read-only target is refused" 'write at offset [0-9]*: export is read-only' \
        copies "$2" "$source_uri" "$uri"
    check "$1: source without a target starts" serve_image memory 4M
    stop
    refuse "$1: no target is an error" "^$2: nbd[^ ]*: cannot connect\$" \
        copies "$2" "$source_uri" "$uri"
    refuse "$1: a target that is no URI is an error" "^$2: nbd://a b: not a valid NBD URI\$" \
        copies "$2" "$source_uri" 'nbd://a b'
}

# One request of ten fails, on either side.
some_errors() {
    check "$1: source with some errors starts" \
        serve_image --filter=error memory 4M error-pread=EIO error-pread-rate=10%
    check "$1: target for it starts" serve_target 4194304
    refuse "$1: one failed read of ten ends it" 'read at offset [0-9]*: input/output error' \
        copies "$2" -s 4096 "$source_uri" "$uri"
    check "$1: source for it starts" serve_image memory 4M
    check "$1: target with some errors starts" start nbdkit -f -U "$socket" --filter=error \
        memory 4M error-pwrite=ENOSPC error-pwrite-rate=10%
    refuse "$1: one failed write of ten ends it" 'write at offset [0-9]*: no space left' \
        copies "$2" -s 4096 "$source_uri" "$uri"
}

# A server that dies as soon as the block at 2 MiB is asked for.
serve_dying() {
    start_source nbdkit -f -U "$source_socket" eval get_size='echo 4194304' \
        pread="[ \$4 -lt 2097152 ] || kill -9 \$PPID; head -c \$3 /dev/zero"
}

# The same for a target; what was written before reads as zeroes.
target_dying() {
    start nbdkit -f -U "$socket" eval get_size='echo 4194304' can_write='exit 0' \
        pread="head -c \$3 /dev/zero" pwrite="[ \$4 -lt 2097152 ] || kill -9 \$PPID; cat >/dev/null"
}

death() {
    check "$1: source that dies starts" serve_dying
    check "$1: target for it starts" serve_target 4194304
    refuse "$1: a server that dies ends it and names the offset" 'read at offset [0-9]' \
        copies "$2" -s 1048576 "$source_uri" "$uri"
    check "$1: source that lives starts" serve_image memory 4M
    check "$1: target that dies starts" target_dying
    refuse "$1: a target that dies ends it and names the offset" '\(read\|write\) at offset [0-9]' \
        copies "$2" -s 1048576 "$source_uri" "$uri"
}

too_small() {
    check "$1: larger source starts" serve_image pattern 4M
    check "$1: smaller target starts" serve_target 4193792
    refuse "$1: a target that is too small is refused" "^$2: nbd[^ ]*: smaller than the source\$" \
        copies "$2" "$source_uri" "$uri"
    check "$1: before anything is written" untouched
}

# Sizes that are no whole number of requests, and less than one.
odd_sizes() {
    local size
    image=$tmp/odd
    for size in 512 1000448; do
        head -c "$size" /dev/urandom >"$image"
        server_to_server "$1, $size bytes" "$2" -s 65536
    done
    image=$tmp/ext4
}

depths() {
    local depth
    for depth in 1 64; do
        server_to_server "$1, $depth in flight" "$2" -r $depth -s 131072
    done
    refuse "$1: more requests than it has are refused" usage copies "$2" -r 65 "$source_uri" "$uri"
}

# A target that forgets: every write succeeds, and reads give zeroes.
forgetful_target() {
    check "$1: source for a target that forgets starts" serve_image pattern 4M
    check "$1: target that forgets starts" start nbdkit -f -U "$socket" null 4M
    refuse "$1: what does not read back as it was written is an error" 'verify at offset [0-9]*: not' \
        copies "$2" "$source_uri" "$uri"
}

# No two threads meet in memory without the mutex.
no_race() {
    if ! has clang || ! echo 'int main(void) { return 0; }' |
        clang -fsanitize=thread -x c -o "$tmp/none" - >/dev/null 2>&1; then
        skip "$1: no data race" 'clang cannot build for ThreadSanitizer'
        return
    fi
    CC=clang check "$1: builds with TSan" build "$1" -g -O1 -fsanitize=thread
    server_to_server "$1, TSan" "$1" -t 3 -s 1048576
}

# has_library NAME: whether the library that this example is for is there, and the kernel
# lets it work.
has_library() {
    case "$1" in
    libev_copy) echo '#include <ev.h>' | $CC -E - ;;
    uring_copy)
        printf '%s\n' '#include <liburing.h>' 'static struct io_uring ring;' \
            'int main(void) { return io_uring_queue_init(4, &ring, 0) != 0; }' |
            $CC -D_GNU_SOURCE -x c -o "$tmp/has_uring" - -luring && "$tmp/has_uring"
        ;;
    esac >/dev/null 2>&1
}

# The last line of what a wrong option makes it print is the command of the first comment.
usage_is_the_comment() {
    "$tmp/$1" -x 2>"$tmp/usage"
    [ $? = 2 ] && [ "$(sed -n '$s,^usage: ,//     build/,p' "$tmp/usage")" = "$(sed -n 4p "examples/$1.c")" ]
}

number_is_whole() {
    "$tmp/$1" -s "$2" nbd://none nbd://none >"$tmp/usage" 2>&1
    [ $? = 2 ] && grep -q "^$1: not a whole number: $2\$" "$tmp/usage"
}

one_example() {
    local name=$1
    if ! has_library "$name"; then
        skip "$name" 'its library is not installed, or the kernel refuses it'
        return
    fi
    check "$name: has at most 150 lines" short "$name"
    check "$name: says why NBD_NO_INIT is safe there" says_why_it_is_safe "$name"
    # shellcheck disable=SC2086
    check "$name: builds with its own command, without a warning" build "$name" $WARN
    check "$name: a wrong option shows the usage of the first comment" usage_is_the_comment "$name"
    check "$name: a number with a letter behind it is refused" number_is_whole "$name" 1M
    server_to_server "$name" "$name"
    errors "$name" "$name"
    some_errors "$name" "$name"
    death "$name" "$name"
    too_small "$name" "$name"
    [ "$name" != simple_copy ] || files "$name" "$name"
    [ "$name" = simple_copy ] || depths "$name" "$name"
    [ "$name" != threads ] || forgetful_target "$name" "$name"
    check "$name: builds with ASan and UBSan" \
        build "$name" -g -fsanitize=address,undefined -fno-sanitize-recover=all
    server_to_server "$name, ASan" "$name"
    odd_sizes "$name, ASan" "$name"
    errors "$name, ASan" "$name"
    death "$name, ASan" "$name"
    [ "$name" != threads ] || no_race "$name"
}

for program in nbdkit qemu-nbd mke2fs; do
    if ! has $program; then
        skip 'loops' "$program is not installed"
        exit
    fi
done
truncate -s 64M "$image"
check 'image: made' mke2fs -q -t ext4 -d examples "$image"
for example in simple_copy poll_copy libev_copy epoll_copy uring_copy threads; do
    one_example $example
done
