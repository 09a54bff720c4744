#!/bin/bash
# limit: 600
# examples/dump prints what nbddump prints, and exits as it does.
#
# Different on purpose, so not compared or compared with what is written here:
#   - --length takes decimal digits only.  nbddump takes the number in front of anything else
#     (1K is 1), and numbers above 64 bits or below 0.
#   - --length on a server of large blocks: whole blocks are read.  nbddump asks for less and
#     fails.
#   - --offset is not in nbddump of Debian 12; that of Debian 13 takes a first line of zeroes
#     for a repeated one.
#   - An error ends both with 1, but how much was printed before is how much each reads at once.
#   - What is said on stderr, --help and --version.
# shellcheck disable=SC2016
. tests/lib.sh
. tests/servers.sh

dump=build/examples/dump

# Runs both programs; what they print is in ours, theirs.
both() {
    timeout 60 $dump "$@" >"$tmp/ours" 2>"$tmp/ours.err"
    our_status=$?
    timeout 60 nbddump "$@" >"$tmp/theirs" 2>/dev/null
    their_status=$?
}

# same_status STATUS ARGUMENTS...: both exit with it.
same_status() {
    local status=$1
    shift
    both "$@"
    [ "$our_status $their_status" = "$status $status" ] || {
        echo "error: exit with $our_status and $their_status: $(head -n 1 "$tmp/ours.err")"
        return 1
    }
}

# equal ARGUMENTS...: both succeed and print the same.
equal() {
    same_status 0 "$@" && cmp "$tmp/ours" "$tmp/theirs"
}

# both_fail ARGUMENTS...: both exit with 1, and ours says why in one line.
both_fail() {
    same_status 1 "$@" && grep -q '^dump: ' "$tmp/ours.err"
}

# fails TEXT ARGUMENTS...: status 1, and TEXT on stderr.
fails() {
    local text=$1
    shift
    timeout 60 $dump "$@" >"$tmp/ours" 2>"$tmp/ours.err"
    [ $? = 1 ] && grep -q "^dump: .*$text" "$tmp/ours.err"
}

# prints TEXT ARGUMENTS...: success, and exactly this.
prints() {
    local text=$1
    shift
    timeout 60 $dump "$@" >"$tmp/ours" || return 1
    [ "$(cat "$tmp/ours")" = "$text" ] || {
        echo "error: not \"$text\" but $(head -n 5 "$tmp/ours")"
        return 1
    }
}

# dumps NAME SERVER...: an URI, or a command in brackets, with each option.
dumps() {
    local name=$1 form
    shift
    for form in '' --color --colour --no-color --no-colour '-n 0' '-n 1' '-n 8' '-n 20' \
        '--length=48' '--length 100000' '--color -n 37' '-n 9223372036854775807'; do
        # shellcheck disable=SC2086
        check "$name: $form" equal $form -- "$@"
    done
}

# has_lines LINES: the dump just compared is not a trivial one.
has_lines() {
    [ "$(wc -l <"$tmp/ours")" -ge "$1" ]
}

# data NAME DATA SIZE: a disk by its bytes.
data() {
    dumps "nbdkit data, $1" [ nbdkit data data="$2" size="$3" ]
}

nbdkit_disks() {
    local size
    data 'every byte' "$(echo {0..255})" 256
    data 'lines that repeat' '7*64 8*15 7*33 (1 2 3 4)*20 0*100 9' 300
    data 'holes that are no whole lines' '1 @5000 2 @100003 3*40 @200001 4' 300007
    data 'a hole at the end' '1 2 3' 70000
    data 'zeroes, then a hole' '0*20 @65536 0*7 1' 140000
    for size in 0 1 15 16 17 31 32 33 47 48 49; do
        check "nbdkit memory $size" equal [ nbdkit memory $size ]
        check "nbdkit memory $size, all but a byte" equal -n $((size ? size - 1 : 0)) -- [ nbdkit \
            memory $size ]
    done
    check 'nbdkit data, 5 GiB' equal -- [ nbdkit data data='1 @0xfffffff8 "hello"*9' size=5G ]
    check 'nbdkit sparse-random' equal -- [ nbdkit sparse-random 4M seed=7 runlength=4096 \
        random-content=true ]
    check 'nbdkit sparse-random has 1000 lines' has_lines 1000
    check 'nbdkit pattern' equal -- [ nbdkit pattern 3000001 ]
    check 'nbdkit noextents' equal -- [ nbdkit --filter=noextents data data='1 @0x100001 2' ]
    check 'nbdkit --no-sr' equal -- [ nbdkit --no-sr data data='1 @0x100001 2' ]
    check 'nbdkit block sizes' equal -- [ nbdkit --filter=blocksize-policy data \
        data='1 @0x10001 2*100000 @0x100000 3' size=4M blocksize-error-policy=error \
        blocksize-minimum=64K blocksize-preferred=64K blocksize-maximum=32M ]
}

# A disk of its own for each seed: short and long pieces of few different bytes.
random_disk() {
    local at=0 i text=
    RANDOM=$1
    for ((i = RANDOM % 9; i > 0; i--)); do
        text+=" @$at ($((RANDOM % 3)) $((RANDOM % 2)))*$((RANDOM % 60 + 1))"
        at=$((at + 130 + RANDOM % 40 * (RANDOM % 3 ? 1 : 4096)))
    done
    equal -n $((RANDOM * (RANDOM % 3 ? 7 : 3000))) -- [ nbdkit data data="$text" \
        size=$((at + RANDOM % 100)) ]
}

random_disks() {
    local seed
    for seed in {1..40}; do
        check "random disk $seed" random_disk "$seed"
    done
}

# As nbdkit eval records it: nothing is read where the server says that all is zero.
reads_no_hole() {
    : >"$tmp/reads"
    prints $'0000000000: 00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00 |................|\n*
00000ffff0: 00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00 |................|' -- [ nbdkit eval \
        get_size='echo 1M' can_extents='exit 0' extents='echo 0 1M hole,zero' \
        pread="echo \$4 >>$tmp/reads; head -c \$3 /dev/zero" ] && ! [ -s "$tmp/reads" ]
}

# A hole that is not said to be zero may hold anything, so it is read.
reads_what_may_be_data() {
    equal -- [ nbdkit eval get_size='echo 64K' can_extents='exit 0' extents='echo 0 64K hole' \
        pread='printf "%*s" $3 ""' ] && grep -q '20 20 20' "$tmp/ours"
}

# A disk that nbddump would need minutes for, and a place of more than ten digits.
skips_holes_of_terabytes() {
    prints $'0000000000: 01 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00 |................|
0000000010: 00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00 |................|\n*
fffffffff0: 00 00 00 00 00 00 00 00  68 65 6c 6c 6f 2c 20 77 |........hello, w|
10000000000: 6f 72 6c 64 00 00 00 00  00 00 00 00 00 00 00 00 |orld............|
10000000010: 00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00 |................|\n*
3fffffffff0: 00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00 |................|' -- [ nbdkit data \
        data='1 @0xfffffffff8 "hello, world"' size=4T ]
}

# With --length what lies behind is neither asked about nor read.
reads_no_more_than_asked() {
    : >"$tmp/reads"
    timeout 60 $dump -n 100 -- [ nbdkit eval get_size='echo 1G' can_extents='exit 0' \
        extents="echo \$3 >>$tmp/reads; echo 0 1G" \
        pread="echo \$3 >>$tmp/reads; head -c \$3 /dev/zero" ] || return 1
    [ "$(cat "$tmp/reads")" = $'100\n100' ]
}

# on_terminal COMMAND...: what it prints there.
on_terminal() {
    timeout 60 script -qec "$*" /dev/null </dev/null
}

same_on_terminal() {
    on_terminal $dump "$@" >"$tmp/ours" && on_terminal nbddump "$@" >"$tmp/theirs" &&
        cmp "$tmp/ours" "$tmp/theirs"
}

coloured_on_terminal() {
    same_on_terminal "$uri" && grep -q $'\033' "$tmp/ours"
}

terminal() {
    check 'a terminal: server starts' start nbdkit -f -U "$socket" data data='"a b" @100 1 2'
    check 'a terminal has colours' coloured_on_terminal
    check 'a terminal, --no-color' same_on_terminal --no-color "$uri"
    stop
}

offsets() {
    local numbers='1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20'
    local line='0000000003: 04 05 06 07 08 09 0a 0b  0c 0d 0e 0f 10 11 12 13 |................|'
    check 'offsets: server starts' start nbdkit -f -U "$socket" data data="$numbers 65*80"
    check '--offset: lines start there' prints "$line" -o 3 -n 16 "$uri"
    check '--offset at the end prints nothing' prints '' --offset=100 "$uri"
    check '--offset behind the end' fails 'is behind the end' --offset=101 "$uri"
    check '--offset: a first line like the one before is printed' prints \
        '0000000024: 41 41 41 41                                      |AAAA            |' \
        -o 36 -n 4 "$uri"
    check '--offset that is no number' fails 'not a number' --offset=1x "$uri"
    stop
}

# Only what was read before the error is printed.
prints_what_was_read() {
    fails 'read at offset .*input/output error' "$@" && [ "$(wc -l <"$tmp/ours")" = 2 ]
}

output_is_full() {
    timeout 60 $dump "$uri" >/dev/full 2>"$tmp/ours.err"
    [ $? = 1 ] && grep -q '^dump: standard output: ' "$tmp/ours.err"
}

errors() {
    local memory='nbdkit memory 1M'
    check 'errors: server starts' start nbdkit -f -U "$socket" memory 1M
    check 'an option that does not exist' both_fail --bogus "$uri"
    check 'no server named' both_fail
    check 'two servers named' both_fail "$uri" "$uri"
    check '--length that is no number' both_fail --length=x "$uri"
    check '--length that is empty' both_fail -n '' "$uri"
    check '--length with a unit' fails 'not a number' -n 1K "$uri"
    check '--length below 0' fails 'not a number' -n -1 "$uri"
    check '--length above 64 bits' fails 'not a number' -n 18446744073709551616 "$uri"
    check 'options behind the URI' equal "$uri" -n 5
    check 'no server' both_fail "nbd+unix:///?socket=$tmp/none"
    check 'no URI' both_fail nbd:nothing
    check 'TLS without a name to verify, or not built in' fails 'TLS' "nbds+unix:///?socket=$socket"
    check 'standard output is full' output_is_full
    stop
    # shellcheck disable=SC2086
    check '[ command without its end' both_fail [ $memory
    check '[ ]' both_fail [ ]
    # shellcheck disable=SC2086
    check '[ command ] and a name' both_fail [ $memory ] name
    check '[ no such command ]' both_fail [ /no/such/command ]
    check '[ a command that ends ]' both_fail [ true ]
    check '[ a server that dies ]' both_fail -- [ nbdkit eval get_size='echo 1M' \
        pread='kill -9 $PPID' ]
    check 'an unknown export' both_fail -- [ nbdkit file dir=tests ]
    check 'a read that fails' both_fail -- [ nbdkit --filter=error data data='1 @0x1000000 2' \
        error-pread-rate=100% ]
    check 'a read that fails later' prints_what_was_read -- [ nbdkit eval get_size='echo 4M' \
        pread='[ $4 = 0 ] || { echo EIO no >&2; exit 1; }; head -c $3 /dev/zero' ]
    check 'block status that fails' both_fail -- [ nbdkit --filter=error data \
        data='1 @0x1000000 2' error-extents-rate=100% ]
}

# The reader of a pipe goes away in the middle of the dump; -t is to wait for more clients.
closed_pipe_ends_the_server() {
    head -c 1M /dev/urandom >"$tmp/base" || return 1
    rm -f "$tmp/started"
    $dump -- [ sh -c "echo \$\$ >$tmp/started; exec qemu-nbd -t -r -f raw $tmp/base" ] | head -n 1
    [ "${PIPESTATUS[0]}" = 141 ] && ended "$(cat "$tmp/started")"
}

subprocesses() {
    check '[ command ] leaves no server' leaves_no_server $dump -n 1
    check '[ command ]: a signal ends the server too' signal_ends_the_server $dump
    check '[ command ] without --' equal [ nbdkit memory 100 ]
    check '[ command ] with options behind' equal [ nbdkit memory 100 ] -n 17
    check '[ command ] short options need --' both_fail [ nbdkit -r memory 100 ]
}

large_blocks() {
    check '--length on a server of large blocks' prints \
        '0000000000: 01 02 03                                         |...             |' \
        -n 3 -- [ nbdkit --filter=blocksize-policy data data='1 2 3' size=1M \
        blocksize-error-policy=error blocksize-minimum=64K blocksize-preferred=64K \
        blocksize-maximum=1M ]
}

make_images() {
    head -c 100003 build/examples/dump >"$tmp/raw" &&
        qemu-img create -q -f qcow2 "$tmp/base" 8M && qemu-img create -q -f qcow2 \
        -b "$tmp/base" -F qcow2 "$tmp/top" && qemu-img bitmap --add "$tmp/top" changes &&
        qemu-io -f qcow2 -c 'write -P 7 1M 1000' "$tmp/base" &&
        qemu-io -f qcow2 -c 'write -P 8 3000001 70000' "$tmp/top"
}

# qemu-nbd repeats the name in its refusal.
says_nothing_harmful() {
    fails 'server: ".*x1b' "nbd+unix:///%1b[2J?socket=$socket" && ! grep -q $'\033' "$tmp/ours.err"
}

qemu_disks() {
    check '[ command ]: a closed pipe ends the server too' closed_pipe_ends_the_server
    check 'qemu-nbd: images made' make_images
    dumps 'qemu-nbd raw' [ qemu-nbd -r -f raw "$tmp/raw" ]
    dumps 'qemu-nbd qcow2 with a bitmap' [ qemu-nbd -r -A -B changes -f qcow2 "$tmp/top" ]
    check 'qemu-nbd with a name: starts' start qemu-nbd -t -k "$socket" -f raw -x name "$tmp/raw"
    check 'qemu-nbd with a name' equal "nbd+unix:///name?socket=$socket"
    check 'qemu-nbd: an unknown export' both_fail "nbd+unix:///other?socket=$socket"
    check 'qemu-nbd: its words are made harmless' says_nothing_harmful
    stop
}

nbd_server() {
    head -c 102400 build/examples/dump >"$tmp/disk"
    check 'nbd-server: starts' serve_nbd_server "$tmp/disk" 'readonly = true'
    dumps 'nbd-server' "$uri"
    stop
}

ext4_image() {
    truncate -s 64M "$tmp/ext4" && mke2fs -q -t ext4 -d tests "$tmp/ext4"
}

ext4_disk() {
    check 'ext4 image: made' ext4_image
    check 'ext4 image, nbdkit file' equal -- [ nbdkit -r file "$tmp/ext4" ]
    check 'ext4 image has 1000 lines' has_lines 1000
    rm "$tmp/ext4"
}

# Every option of nbddump(1) stands in the help.
helps() {
    local option
    timeout 60 $dump --help >"$tmp/ours" || return 1
    for option in --color --no-color --help --length -n -V --version '\[ COMMAND'; do
        grep -q -e "$option" "$tmp/ours" || return 1
    done
}

tells_version() {
    [ "$($dump --version)" = "$($dump -V)" ] &&
        [[ $($dump -V) =~ ^dump\ \(nbd.h\)\ [0-9]+\.[0-9]+\.[0-9]+$ ]]
}

check '--help names every option' helps
check '--version and -V tell the version' tells_version
if ! has nbddump || ! has nbdkit; then
    skip 'dump against nbddump' 'nbddump or nbdkit is not installed'
    exit
fi
nbdkit_disks
random_disks
check 'holes are not read' reads_no_hole
check 'what is not said to be zero is read' reads_what_may_be_data
check 'holes of terabytes are skipped' skips_holes_of_terabytes
check '--length reads no more than that' reads_no_more_than_asked
large_blocks
offsets
errors
subprocesses
if has script; then
    terminal
else
    skip 'a terminal' 'script is not installed'
fi
if has qemu-nbd && has qemu-img && has qemu-io; then
    qemu_disks
else
    skip 'qemu-nbd' 'qemu-nbd, qemu-img or qemu-io is not installed'
fi
if has nbd-server; then
    nbd_server
else
    skip 'nbd-server' 'nbd-server is not installed'
fi
if has mke2fs; then
    ext4_disk
else
    skip 'ext4 image' 'mke2fs is not installed'
fi
