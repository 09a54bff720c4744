#!/bin/bash
# limit: 600
# examples/copy leaves what nbdcopy leaves, sends what it sends, and fails when it fails.
#
# Different on purpose, so not compared or compared with what is written here:
#   - Zeroing is asked to be fast first: the flag FAST_ZERO is not compared.
#   - nbdcopy takes what is not a whole request of holes as data.  Holes end here at whole
#     requests, so that both see the same.
#   - With --synchronous nbdcopy looks for no zeroes, so it is compared with -S 0.
#   - --allocated allocates the holes of a new file too; nbdcopy leaves them.
#   - Where runs of data and of zeroes are cut is not compared.
#   - One connection flushes for all, since a server that offers several says that it may.
#   - Files are copied to files too; nbdcopy refuses some of them.
#   - A pipe that ends in zeroes leaves a file with them; nbdcopy 1.14 fails or cuts them off.
#   - A copy that fails leaves its file empty; nbdcopy leaves it at its full size.
#   - 16 requests are in flight on a connection, not 64: see -R.
#   - Numbers end at their last digit: nbdcopy takes "4x" as 4.
#   - What is said on stderr, --help and --version.
# shellcheck disable=SC2016
. tests/lib.sh
. tests/servers.sh

copy=build/examples/copy
mib=1048576

for program in nbdcopy nbdkit qemu-nbd nbd-server python3; do
    has $program && continue
    skip 'copies as nbdcopy does' "$program is not installed"
    exit
done

serve_nbdkit() {
    start nbdkit -f -U "$socket" -t 16 "$@"
}

# serve_log PLUGIN ARGUMENTS...: nbdkit that writes down what arrives, in $tmp/log.
serve_log() {
    rm -f "$tmp/log"
    serve_nbdkit --filter=log "$@" logfile="$tmp/log"
}

# Prints what arrived, $1 of it (Read|Write...): kind, offset, end, and for zeroing whether
# a hole may be made; neighbours of one kind are joined.
runs() {
    python3 - "$tmp/log" "$1" <<'END'
import re, sys
found = set()
for line in open(sys.argv[1]):
    m = re.search(r"connection=\d+ (%s) id=\d+(?: offset=(\w+) count=(\w+))?( trim=\d)?" % sys.argv[2], line)
    if m:
        at = int(m[2] or "0", 16)
        found.add((at, at + int(m[3] or "0", 16), m[1] + (m[4] or "")))
joined = []
for at, end, kind in sorted(found):
    if joined and joined[-1][1] == at and joined[-1][2] == kind:
        joined[-1][1] = end
    else:
        joined.append([at, end, kind])
for at, end, kind in joined:
    print(kind, at, end)
END
}

# The numbers of connections and of bytes of the largest request $1 in the log.
connections() {
    grep -c ' Connect ' "$tmp/log"
}

largest() {
    sed -n "s/.* $1 id=.* count=0x\([0-9a-f]*\).*/\1/p" "$tmp/log" | while read -r n; do
        echo $((16#$n))
    done | sort -n | tail -n 1
}

# equal WHAT THEIRS OURS
equal() {
    [ "$2" = "$3" ] && return 0
    echo "error: $1: nbdcopy: $(echo "$2" | head -n 4), copy: $(echo "$3" | head -n 4)"
    return 1
}

timed() {
    timeout 60 $copy "$@"
}

nonzero() {
    "$@"
    local status=$?
    [ $status -gt 0 ] && [ $status -lt 124 ]
}

random_file() {
    head -c "$2" /dev/urandom >"$1"
}

### Options ###

# Data at 0, 12K, 40K and 2M; between them zeroes that are written and, from 256K on, holes.
make_image() {
    head -c 262144 /dev/zero >"$1"
    for at in 0 3 10; do
        head -c 4096 /dev/urandom | dd of="$1" bs=4096 seek=$at conv=notrunc status=none
    done
    head -c 524288 /dev/urandom | dd of="$1" bs=$mib seek=2 conv=notrunc status=none
    truncate -s 4M "$1"
}

# upload PROGRAM OPTIONS...: to a server of a new file; it must be the image then.
upload() {
    rm -f "$tmp/target"
    truncate -s 4M "$tmp/target"
    serve_log file "$tmp/target" || return 1
    timeout 60 "$@" "$tmp/image" "$uri" || return 1
    stop
    cmp "$tmp/image" "$tmp/target"
}

uploads_alike() {
    local theirs
    upload nbdcopy "$@" || return 1
    theirs=$(runs 'Write|Zero|Trim|Flush')
    upload $copy "$@" || return 1
    equal "what arrives" "$theirs" "$(runs 'Write|Zero|Trim|Flush')"
}

downloads_alike() {
    local theirs blocks
    rm -f "$tmp/out"
    serve_log file "$tmp/image" && nbdcopy "$@" "$uri" "$tmp/out" || return 1
    theirs=$(runs Read)
    blocks=$(stat -c %b "$tmp/out")
    rm -f "$tmp/out"
    serve_log file "$tmp/image" && timed "$@" "$uri" "$tmp/out" || return 1
    stop
    cmp "$tmp/image" "$tmp/out" && equal 'what is read' "$theirs" "$(runs Read)" &&
        equal 'blocks of the file' "$blocks" "$(stat -c %b "$tmp/out")"
}

# allocated OPTIONS...: 4 MiB are 8192 blocks of 512 bytes.
allocated() {
    rm -f "$tmp/out"
    timed "$@" -- [ nbdkit file "$tmp/image" ] "$tmp/out" && cmp "$tmp/image" "$tmp/out" &&
        [ "$(stat -c %b "$tmp/out")" -ge 8192 ]
}

options() {
    local each
    make_image "$tmp/image"
    for each in '' --allocated --destination-is-zero --target-is-zero \
        '--destination-is-zero --allocated' --flush --no-extents '--no-extents --allocated' \
        '--no-extents -S 0' '--no-extents --sparse=65536' '-S 512' '-S 1048576' \
        '--synchronous -S 0' --request-size=8192 --queue-size=65536 '-R 1' --requests=64 '-T 1' \
        '--threads=0' '-C 1' --connections=2 -v --; do
        # shellcheck disable=SC2086
        check "upload with ${each:-no option}: what arrives is what nbdcopy sends" \
            uploads_alike $each
    done
    for each in '' --no-extents '--no-extents -S 0' '--no-extents -S 65536' \
        '--synchronous -S 0' --flush '-R 1'; do
        # shellcheck disable=SC2086
        check "download with ${each:-no option}: what is read, and the file, as with nbdcopy" \
            downloads_alike $each
    done
    check 'download with --allocated: the file has no holes' allocated --allocated
    check 'download with --allocated --no-extents: the file has no holes' \
        allocated --allocated --no-extents
}

# same_number OPTIONS...: $count of the log, with both programs; null: is the target.
same_number() {
    local theirs
    serve_log "${served[@]}" && nbdcopy "$@" "$uri" null: || return 1
    theirs=$($counted)
    serve_log "${served[@]}" && timed "$@" "$uri" null: || return 1
    equal "$counted" "$theirs" "$($counted)"
}

counts() {
    local each served
    counted=connections
    served=(memory 8M)
    for each in '' '-C 1' '-C 2 -T 2' '-C 4 -T 1' '-C 8 -T 8' '-T 3' --synchronous; do
        # shellcheck disable=SC2086
        check "connections with ${each:-no option} are as many as nbdcopy's" same_number $each
    done
    served=(--filter=multi-conn memory 8M multi-conn-mode=disable)
    check 'connections to a server without multi-conn: 1, as with nbdcopy' \
        same_number -C 4 -T 4
    counted='largest Read'
    served=(memory 8M)
    for each in '' --request-size=4096 --request-size=1048576 '--request-size=8388608'; do
        # shellcheck disable=SC2086
        check "largest request with ${each:-no option} is nbdcopy's" \
            same_number --no-extents $each
    done
    stop
}

# depth WANTED OPTIONS...: the most requests that were in flight.
depth() {
    serve_nbdkit --filter=delay memory 8M rdelay=20ms || return 1
    timed -v --no-extents "${@:2}" "$uri" null: 2>"$tmp/counters" || return 1
    equal 'requests in flight' "$1" \
        "$(sed -n 's/.*source: in_flight_max=\([0-9]*\) .*/\1/p' "$tmp/counters")"
}

depths() {
    check '-R: so many requests in flight' depth 5 -C 1 -R 5
    check '--queue-size: no more bytes in flight' depth 4 -C 1 --queue-size=1048576
    check '--queue-size below a request: one in flight' depth 1 -C 1 --queue-size=0
    check '--synchronous: one request in flight' depth 1 --synchronous
    stop
}

# statuses_alike OPTIONS...: both refuse, or neither does.
statuses_alike() {
    local theirs ours
    timeout 20 nbdcopy "$@" >"$tmp/theirs" 2>&1 </dev/null
    theirs=$?
    timeout 20 $copy "$@" >"$tmp/ours" 2>&1 </dev/null
    ours=$?
    equal 'exit status' $theirs $ours
}

command_line() {
    local each
    for each in -C0 -R0 -T0 -S0 -S3 -S1 -S256 -S512 -Cx -C100 -R1000000 --request-size=1 \
        --request-size=5000 --request-size=4096 --request-size=67108864 --queue-size=0 \
        --queue-size=1 --progress=x --no-such-option; do
        check "$each: accepted or refused as by nbdcopy" \
            statuses_alike "$each" -- [ nbdkit memory 1M ] null:
    done
    check 'no side: refused' statuses_alike
    check 'one side: refused' statuses_alike "$tmp/image"
    check 'three sides: refused' statuses_alike "$tmp/image" null: null:
    check 'null: as source: refused' statuses_alike null: "$tmp/x"
    check 'no ]: refused' statuses_alike -- [ nbdkit memory 1M
    check 'an empty command: refused' statuses_alike -- [ ] null:
    check '--help: success' statuses_alike --help
    check '-V: success' statuses_alike -V
    check '--version: success' statuses_alike --version
    check '--help: on stdout' grep -q 'usage: copy' <($copy --help)
    for each in allocated connections destination-is-zero target-is-zero flush no-extents \
        progress queue-size request-size requests sparse synchronous threads verbose version; do
        check "--help tells --$each" grep -q -e "--$each" <($copy --help)
    done
    check '-v: counters on stderr' grep -q '^copy: source: .* bytes=4194304 ' \
        <($copy -v --no-extents -S 0 "$tmp/image" null: 2>&1)
}

progress_lines() {
    "$@" --progress=3 -- [ nbdkit --filter=delay memory 16M rdelay=10ms ] null: 3>"$tmp/lines" &&
        [ "$(head -n 1 "$tmp/lines")" = 0/100 ] && [ "$(tail -n 1 "$tmp/lines")" = 100/100 ] &&
        ! grep -v -q -x '[0-9]*/100' "$tmp/lines" && sort -n -c "$tmp/lines"
}

# On a terminal, which script(1) makes.
bar() {
    script -q -e -c "$copy -p -R 1 -C 1 --no-extents -- \
        [ nbdkit --filter=delay memory 8M rdelay=30ms ] null:" /dev/null >"$tmp/bar" </dev/null &&
        grep -a -q '#.*] *[0-9]*%  [0-9]*:[0-9][0-9] left  [0-9.]* MiB  [0-9.]* MiB/s' "$tmp/bar"
}

progress() {
    check '--progress=FD: lines N/100 from 0 to 100, from nbdcopy too' progress_lines nbdcopy
    check '--progress=FD: lines N/100 from 0 to 100' progress_lines $copy
    check '-p: not on a terminal a summary' grep -q '4194304 bytes in' \
        <($copy -p "$tmp/image" null: 2>&1)
    if has script; then
        check '-p: a bar with rate and time left on a terminal' bar
    else
        skip '-p: a bar with rate and time left on a terminal' 'script(1) is not installed'
    fi
}

### Sides ###

# from SIDE PROGRAM DESTINATION...: the copy from a source of that kind.
from() {
    case "$1" in
    file) "$2" -- "$tmp/image" "${@:3}" ;;
    pipe) "$2" -- - "${@:3}" <"$tmp/image" ;;
    uri) "$2" -- "$uri" "${@:3}" ;;
    nbdkit) "$2" -- [ nbdkit file "$tmp/image" ] "${@:3}" ;;
    qemu-nbd) "$2" -- [ qemu-nbd -r -f raw "$tmp/image" ] "${@:3}" ;;
    qcow2) "$2" -- [ qemu-nbd -r -f qcow2 "$tmp/qcow2" ] "${@:3}" ;;
    esac
}

# pair PROGRAM SOURCE DESTINATION: leaves the copy in $tmp/out.
pair() {
    rm -f "$tmp/out"
    case "$3" in
    file) from "$2" "$1" "$tmp/out" ;;
    pipe) from "$2" "$1" - >"$tmp/out" ;;
    null) from "$2" "$1" null: && cp "$tmp/image" "$tmp/out" ;;
    nbdkit)
        truncate -s 4M "$tmp/out"
        from "$2" "$1" [ nbdkit file "$tmp/out" ]
        ;;
    qcow2)
        qemu-img create -q -f qcow2 "$tmp/out" 4M
        from "$2" "$1" [ qemu-nbd --discard=unmap --detect-zeroes=unmap -f qcow2 "$tmp/out" ] &&
            qemu-img convert -O raw "$tmp/out" "$tmp/raw" && mv "$tmp/raw" "$tmp/out"
        ;;
    esac
}

pairs() {
    local source target
    qemu-img convert -O qcow2 "$tmp/image" "$tmp/qcow2"
    serve_nbd_server "$tmp/image" 'readonly = true' >"$tmp/output" || fail 'nbd-server' 'starts'
    for source in file pipe uri nbdkit qemu-nbd qcow2; do
        for target in file pipe null nbdkit qcow2; do
            check "from $source to $target" pair timed $source $target
            check "from $source to $target: it is the image" cmp "$tmp/image" "$tmp/out"
        done
    done
    for source in uri qcow2; do
        check "from $source to file: nbdcopy leaves the same" pair nbdcopy $source file
        check "from $source to file: nbdcopy's is the image" cmp "$tmp/image" "$tmp/out"
    done
    stop
}

servers() {
    local image=$tmp/image
    for each in qemu-nbd nbd-server; do
        rm -f "$tmp/target"
        truncate -s 4M "$tmp/target"
        case $each in
        qemu-nbd) start qemu-nbd -t -e 8 -k "$socket" -f raw "$tmp/target" ;;
        nbd-server) serve_nbd_server "$tmp/target" ;;
        esac >"$tmp/output" || fail "$each" 'starts'
        check "$each: upload" timed --flush "$image" "$uri"
        check "$each: what it has is the image" cmp "$image" "$tmp/target"
        check "$each: download" timed "$uri" "$tmp/out"
        check "$each: the download is the image" cmp "$image" "$tmp/out"
        stop
    done
}

# A server that tells its number, so that it can be looked for afterwards.
ends() {
    timed -- "$@" || return 1
    ! kill -0 "$(cat "$tmp/pid")" 2>/dev/null
}

ends_source() {
    ends [ sh -c "echo \$\$ >'$tmp/pid'; exec nbdkit memory 4M" ] null:
}

ends_destination() {
    ends "$tmp/image" [ sh -c "echo \$\$ >'$tmp/pid'; exec nbdkit memory 4M" ]
}

no_remains() {
    ! ls -d /tmp/nbd-copy-?????? 2>/dev/null
}

pipe_of_zeroes() {
    head -c 1000003 /dev/zero | timed - "$tmp/zeroes" && head -c 1000003 /dev/zero |
        cmp - "$tmp/zeroes"
}

commands() {
    check '[ CMD ]: the source is stopped at the end' ends_source
    check '[ CMD ]: the destination is stopped at the end' ends_destination
    refuse '[ CMD ] that does not exist: says so' 'No such file' timed -- [ "$tmp/none" ] null:
    refuse '[ CMD ] that ends at once: no hang' 'false' timed -- [ false ] null:
    refuse '[ CMD ] that ends at once as destination: no hang' 'false' \
        timed -- "$tmp/image" [ false ]
    refuse '[ CMD ] that crashes at its end: no success' 'ended by signal' timed -- "$tmp/image" \
        [ nbdkit eval get_size='echo 4194304' pwrite='cat >/dev/null' unload='kill -SEGV $PPID' ]
    check '[ CMD ]: its socket does not remain' no_remains
    check 'a pipe that ends in zeroes: the file has them' pipe_of_zeroes
    refuse 'the source itself as destination: refused' 'source itself' \
        timed "$tmp/image" "$tmp/image"
    check 'the source itself as destination: unharmed' test "$(stat -c %s "$tmp/image")" = 4194304
}

# loop COMMAND: the call with a block device of 4 MiB that is $tmp/disk.
loop() {
    local device status
    head -c 4M /dev/urandom >"$tmp/disk"
    device=$(losetup -f) && losetup "$device" "$tmp/disk" || return 1
    "$1" "$device"
    status=$?
    losetup -d "$device"
    return $status
}

from_device() {
    timed "$1" - | cmp - "$tmp/disk"
}

# Its old bytes are random: where the image is zero it has to be made so.
to_device() {
    timed --flush "$tmp/image" "$1" && cmp -n 4194304 "$tmp/image" "$1"
}

direct_to_device() {
    timed --direct --flush "$tmp/image" "$1" && cmp -n 4194304 "$tmp/image" "$1"
}

devices() {
    local name='block device as source and as destination'
    if loop true >"$tmp/output" 2>&1; then
        check 'block device as source' loop from_device
        check 'block device as destination: zeroes are written' loop to_device
        check 'block device as destination, --direct' loop direct_to_device
    else
        skip "$name" 'losetup does not work here'
    fi
}

# The size is no multiple of what direct input and output need.
direct_file() {
    random_file "$tmp/odd" 1000003
    timed --direct "$tmp/odd" "$tmp/out" && cmp "$tmp/odd" "$tmp/out"
}

direct() {
    if dd if="$tmp/image" of="$tmp/out" bs=4096 count=1 oflag=direct 2>"$tmp/output"; then
        check '--direct: file to file, with an end within a block' direct_file
    else
        skip '--direct' 'this file system cannot'
    fi
}

### Zeroes and extents ###

# zeroed WANTED REFUSAL: a server of random bytes that refuses to zero, in the order that
# $tmp/ways tells at the end.
zeroed() {
    rm -f "$tmp/ways"
    random_file "$tmp/target" 4194304
    serve_nbdkit eval get_size='echo 4194304' can_write='exit 0' can_zero='echo native' \
        can_trim='exit 0' trim="echo trim >>'$tmp/ways'" can_fast_zero="$2" \
        pread="dd if='$tmp/target' iflag=skip_bytes,count_bytes skip=\$4 count=\$3 status=none" \
        pwrite="dd of='$tmp/target' oflag=seek_bytes seek=\$4 conv=notrunc status=none" \
        zero="case \$5 in *fast*) way=fast;; *) way=slow;; esac; echo \$way >>'$tmp/ways'; $3" ||
        return 1
    timed -C 1 -R 1 "$tmp/image" "$uri" || return 1
    stop
    cmp "$tmp/image" "$tmp/target" && equal 'ways to zero' "$1" "$(uniq "$tmp/ways" | xargs)"
}

ways_to_zero() {
    local do='head -c $3 /dev/zero | dd of='$tmp/target' oflag=seek_bytes seek=$4 conv=notrunc status=none'
    check 'zeroing: fast if the server can' zeroed fast 'exit 0' "$do"
    check 'zeroing: not fast if the server cannot' zeroed slow 'exit 3' "$do"
    check 'zeroing: refused as fast, it is asked for as slow' zeroed 'fast slow' 'exit 0' \
        "[ \$way = slow ] || { echo ENOTSUP >&2; exit 1; }; $do"
    check 'zeroing: refused as slow too, zeroes are written' zeroed 'fast slow' 'exit 0' \
        'echo EINVAL >&2; exit 1'
    check 'zeroing: refused by a server without fast zeroing, zeroes are written' zeroed slow \
        'exit 3' 'echo EINVAL >&2; exit 1'
}

# Answers that end anywhere, for a destination in blocks of 512.
ragged() {
    random_file "$tmp/odd" 65536
    dd if=/dev/zero of="$tmp/odd" bs=1 seek=10000 count=10000 conv=notrunc status=none
    rm -f "$tmp/target"
    truncate -s 65536 "$tmp/target"
    timed -- [ nbdkit eval get_size='echo 65536' can_extents='exit 0' \
        pread="dd if='$tmp/odd' iflag=skip_bytes,count_bytes skip=\$4 count=\$3 status=none" \
        extents='if [ $4 -ge 10000 ] && [ $4 -lt 20000 ]; then echo $4 $((20000 - $4)) hole,zero
            else echo $4 777; fi' ] \
        [ nbdkit --filter=blocksize-policy file "$tmp/target" blocksize-minimum=512 \
        blocksize-preferred=512 blocksize-maximum=65536 blocksize-error-policy=error ] &&
        cmp "$tmp/odd" "$tmp/target"
}

extents() {
    check 'extents that end within a block: all is copied' ragged
}

### Failures ###

# no_success ARGUMENTS...: into $tmp/out, which must not pass for the image.
no_success() {
    rm -f "$tmp/out"
    nonzero timed "$@" "$tmp/out" 2>"$tmp/said" || {
        echo 'error: success, or no end'
        return 1
    }
    [ ! -s "$tmp/out" ] || {
        echo "error: $(stat -c %s "$tmp/out") bytes remain"
        return 1
    }
}

# lucky_or_failed ARGUMENTS...: success only if all is there.
lucky_or_failed() {
    if timed "$@" 2>"$tmp/said"; then
        stop
        cmp "$tmp/random" "$tmp/out"
    else
        [ "${*: -1}" != "$tmp/out" ] || [ ! -s "$tmp/out" ]
    fi
}

says() {
    grep -q -e "$1" "$tmp/said" || {
        echo "error: no \"$1\" in: $(cat "$tmp/said")"
        return 1
    }
}

injected() {
    local rate call
    random_file "$tmp/random" 4194304
    for rate in 1% 10% 100%; do
        for call in pread extents; do
            rm -f "$tmp/out"
            check "errors on $rate of $call: starts" serve_nbdkit --filter=error \
                file "$tmp/random" error-$call=EIO error-$call-rate=$rate
            check "errors on $rate of $call: no copy that is not whole passes" \
                lucky_or_failed --request-size=4096 "$uri" "$tmp/out"
        done
        for call in pwrite zero; do
            # Zeroes that the source tells and those that are found.
            rm -f "$tmp/out"
            truncate -s 4M "$tmp/out"
            cp "$tmp/image" "$tmp/random"
            check "errors on $rate of $call: starts" serve_nbdkit --filter=error \
                file "$tmp/out" error-$call=EIO error-$call-rate=$rate
            check "errors on $rate of $call: no copy that is not whole passes" \
                lucky_or_failed --request-size=4096 "$tmp/image" "$uri"
        done
        random_file "$tmp/random" 4194304
    done
    stop
}

messages() {
    check 'a server that fails with words: starts' serve_nbdkit eval get_size='echo 4194304' \
        pread='if [ $4 -ge 2097152 ]; then echo EIO worn out >&2; exit 1; fi; head -c $3 /dev/zero' \
        pwrite='if [ $4 -ge 2097152 ]; then cat >/dev/null; echo ENOSPC no room >&2; exit 1; fi
            cat >/dev/null'
    check 'a failed read: no success, no file' no_success -R 1 -C 1 -S 0 "$uri"
    check 'a failed read: its offset' says 'read at offset 2097152: input/output error'
    check 'a failed write: no success' nonzero timed -R 1 -C 1 -S 0 "$tmp/random" "$uri"
    refuse 'a failed write: its offset' 'write at offset 2097152: no space' \
        timed -R 1 -C 1 -S 0 "$tmp/random" "$uri"
    stop
    qemu-img create -q -f qcow2 "$tmp/qcow2" 4M
    check 'qemu-nbd whose disk fails: starts' start qemu-nbd -t -e 8 -k "$socket" --image-opts \
        "driver=qcow2,file.driver=blkdebug,file.image.driver=file,$(
        )file.image.filename=$tmp/qcow2,$(
        )file.inject-error.0.event=write_aio,file.inject-error.0.errno=5"
    refuse 'qemu-nbd whose disk fails: its own words' '(server: "writing to file failed' \
        timed "$tmp/random" "$uri"
    stop
}

# In a mount of its own, which ends with it.  $tmp/size is what the file is left with.
full_system() {
    unshare -m sh -c "mount -t tmpfs -o size=1M tmpfs '$tmp/small' || exit 0
        $copy '$tmp/random' '$tmp/small/out'; status=\$?
        stat -c %s '$tmp/small/out' >'$tmp/size'; exit \$status"
}

full() {
    refuse '/dev/full: no success' 'write at offset 0: No space left' timed "$tmp/random" /dev/full
    refuse 'stdout that is full: no success' 'No space left' \
        sh -c "$copy '$tmp/random' - >/dev/full"
    refuse 'stdout that is closed early: no success' 'write at offset' \
        sh -c "{ $copy '$tmp/random' - || echo failed; } | head -c 1 >/dev/null; exit 1"
    refuse 'limit on the size of files: no success' 'File too large' \
        sh -c "ulimit -f 1000; $copy '$tmp/random' '$tmp/limited'"
    check 'limit on the size of files: no file' test ! -s "$tmp/limited"
    mkdir "$tmp/small"
    if unshare -m mount -t tmpfs -o size=1M tmpfs "$tmp/small" 2>"$tmp/output"; then
        refuse 'full file system: no success' 'write at offset [0-9]*: No space left' full_system
        check 'full file system: no file' test "$(cat "$tmp/size")" = 0
    else
        skip 'full file system' 'mount does not work here'
    fi
    refuse 'target too small: refused before anything is written' \
        'size 1048576 is smaller than the source.s 4194304' timed -- "$tmp/random" \
        [ nbdkit memory 1M ]
    head -c 4M /dev/zero >"$tmp/old"
    refuse 'a source that cannot be had: refused' 'cannot connect' \
        timed "nbd+unix:///?socket=$tmp/none" "$tmp/old"
    check 'a source that cannot be had: the old file is unharmed' \
        test "$(stat -c %s "$tmp/old")" = 4194304
    refuse 'a destination that is read-only: refused' 'read-only' \
        timed -- "$tmp/random" [ nbdkit -r memory 4M ]
}

# in_mid_copy ACTION ARGUMENTS...: does it when the progress shows bytes; the copy must
# fail.  "$!" is the copy.
in_mid_copy() {
    local line
    rm -f "$tmp/fifo" "$tmp/out"
    mkfifo "$tmp/fifo"
    $copy --progress=3 --no-extents -S 0 -R 1 -C 1 "${@:2}" 3>"$tmp/fifo" 2>"$tmp/said" &
    copier=$!
    exec 4<"$tmp/fifo"
    while read -r line <&4; do
        [ "${line%/100}" -lt 2 ] || break
    done
    "$1"
    cat <&4 >"$tmp/output"
    exec 4<&-
    wait "$copier" && {
        echo 'error: success'
        return 1
    }
    [ ! -s "$tmp/out" ]
}

kill_server() {
    kill -KILL "$server_pid"
}

interrupt() {
    kill -INT "$copier"
}

terminate() {
    kill -TERM "$copier"
}

hang_up() {
    kill -HUP "$copier"
}

slow() {
    serve_nbdkit --filter=delay memory 64M delay-read=20ms delay-write=20ms
}

mid_copy() {
    local action
    truncate -s 64M "$tmp/sparse"
    for action in kill_server interrupt terminate hang_up; do
        check "$action in a download: slow server starts" slow
        check "$action in a download: no success, no file" in_mid_copy $action "$uri" "$tmp/out"
        check "$action in an upload: slow server starts" slow
        check "$action in an upload: no success" in_mid_copy $action "$tmp/sparse" "$uri"
        check "$action in an upload: says so" says \
            "$([ $action = kill_server ] && echo 'server closed\|transport' || echo interrupted)"
    done
    stop
    check 'interrupt: our servers are stopped' in_mid_copy interrupt -- \
        [ sh -c "echo \$\$ >'$tmp/pid'; exec nbdkit --filter=delay memory 64M rdelay=20ms" ] null:
    check 'interrupt: our server is stopped' nonzero kill -0 "$(cat "$tmp/pid")"
}

### Holes ###

# moved ROLE: bytes on that side, as -v tells.
moved() {
    sed -n "s/^copy: $1: .* bytes=\([0-9]*\) .*/\1/p" "$tmp/counters"
}

# Chance decides how many there are.
about_100_mib() {
    if [ "${1:-0}" -lt $((50 * mib)) ] || [ "$1" -gt $((200 * mib)) ]; then
        echo "error: ${1:-no} bytes moved"
        return 1
    fi
}

sparse_copy() {
    timed -v "$@" 2>"$tmp/counters" || {
        cat "$tmp/counters"
        return 1
    }
    about_100_mib "$(moved source)"
}

stats_agree() {
    local mibs
    mibs=$(sed -n 's/^read: .* \([0-9]*\)[0-9.]* MiB, .*/\1/p' "$tmp/stats")
    about_100_mib $((${mibs:-0} * mib))
}

tebibyte() {
    local sparse=(nbdkit --filter=stats sparse-random size=1T percent=0.01 seed=1
        "statsfile=$tmp/stats")
    check '1 TiB with 100 MiB of data to null: moves 100 MiB' \
        sparse_copy -- [ "${sparse[@]}" ] null:
    check '1 TiB: the server says the same' stats_agree
    check '1 TiB to nbdkit memory' sparse_copy -- [ "${sparse[@]}" ] [ nbdkit memory 1T ]
    check '1 TiB to nbdkit memory: as much is written' about_100_mib "$(moved destination)"
    if truncate -s 1T "$tmp/huge" 2>/dev/null; then
        check '1 TiB to a file' sparse_copy -- [ "${sparse[@]}" ] "$tmp/huge"
        check '1 TiB to a file: it is as long' test "$(stat -c %s "$tmp/huge")" = 1099511627776
        check '1 TiB to a file: it is sparse' about_100_mib $(($(stat -c %b "$tmp/huge") * 512))
        check '1 TiB from a file' sparse_copy -- "$tmp/huge" [ "${sparse[@]}" ]
        rm -f "$tmp/huge"
    else
        skip '1 TiB to a file' 'this file system cannot'
    fi
}

### Blocks ###

# blocks FILE MINIMUM PREFERRED MAXIMUM: refuses what breaks its rule.
blocks() {
    echo --filter=blocksize-policy file "$1" blocksize-minimum="$2" blocksize-preferred="$3" \
        blocksize-maximum="$4" blocksize-error-policy=error
}

# unaligned SIZE FROM-BLOCK TO-BLOCK BYTES: between servers; the source's size must be whole
# blocks, the destination has a block more, of which nothing may change behind the end.
unaligned() {
    local room=$((($1 / $3 + 1) * $3))
    head -c "$1" "$4" >"$tmp/even"
    cp --sparse=always "$tmp/even" "$tmp/odd"
    head -c $room /dev/zero | tr '\0' x >"$tmp/target"
    { cat "$tmp/odd" && tail -c +$(($1 + 1)) "$tmp/target"; } >"$tmp/wanted"
    # shellcheck disable=SC2046
    timed -- [ nbdkit $(blocks "$tmp/odd" "$2" 4096 65536) ] \
        [ nbdkit $(blocks "$tmp/target" "$3" 8192 32768) ] && cmp "$tmp/wanted" "$tmp/target"
}

block_sizes() {
    local size from to
    for size in 0 1 511 513 1000003; do
        for from in 1 512; do
            for to in 1 512 4096; do
                if [ $((size % from)) = 0 ]; then
                    check "$size bytes from blocks of $from to blocks of $to" \
                        unaligned $size $from $to /dev/urandom
                    check "$size zeroes from blocks of $from to blocks of $to" \
                        unaligned $size $from $to /dev/zero
                fi
            done
        done
    done
    for from in 512 4096; do
        for to in 1 512 4096; do
            check "1003520 bytes from blocks of $from to blocks of $to" \
                unaligned 1003520 $from $to /dev/urandom
        done
    done
    random_file "$tmp/odd" 1000003
    # shellcheck disable=SC2046
    refuse 'a source that ends within a block of its own: refused' 'no multiple' \
        timed -- [ nbdkit $(blocks "$tmp/odd" 4096 4096 65536) ] null:
}

# Holes begin and end at 4 KiB; what is asked for is whole preferred blocks.
preferred_obeyed() {
    # shellcheck disable=SC2046
    serve_log --filter=blocksize-policy file "$tmp/target" blocksize-minimum=512 \
        blocksize-preferred=65536 blocksize-maximum=131072 blocksize-error-policy=error ||
        return 1
    timed "$tmp/holes" "$uri" || return 1
    stop
    cmp "$tmp/holes" "$tmp/target" || return 1
    [ "$(largest Write)" -le 131072 ] || return 1
    runs 'Write|Zero' | while read -r _ _ at end; do
        [ $((${at:-0} % 65536)) = 0 ] && [ $((${end:-0} % 65536)) = 0 ] || return 1
    done
}

preferred() {
    truncate -s 4M "$tmp/holes"
    for at in 3 50 51 300; do
        head -c 4096 /dev/urandom | dd of="$tmp/holes" bs=4096 seek=$at conv=notrunc status=none
    done
    rm "$tmp/target"
    truncate -s 4M "$tmp/target"
    check 'preferred and maximum block sizes are obeyed' preferred_obeyed
}

options
counts
depths
command_line
progress
pairs
servers
commands
devices
direct
ways_to_zero
extents
injected
messages
full
mid_copy
tebibyte
block_sizes
preferred
