#!/bin/bash
# limit: 900
# Every option, command and flag that a server offers, with the servers of this machine and
# the newer ones of Debian 13 that tests/trixie.sh unpacks; and extended headers, which only
# the newer qemu-nbd has.
. tests/lib.sh
. tests/servers.sh

every=build/tests/every
copy=build/examples/copy
capture_pid=
known=

stop_capture() {
    [ -n "$capture_pid" ] || return 0
    kill "$capture_pid" 2>/dev/null
    wait "$capture_pid" 2>/dev/null
    capture_pid=
}

stop_all() {
    stop_capture
    stop
}

# soon WHAT COMMAND...: tries until the command succeeds, for a minute at most.
soon() {
    local deadline=$((SECONDS + 60))
    until "${@:2}"; do
        if [ $SECONDS -gt $deadline ]; then
            echo "error: $1. $(tail -n 1 "$tmp/server.log")"
            return 1
        fi
    done
}

fresh() {
    fresh_port
    rm -f "$tmp/disk"
}

# Each starts a server of 4 MiB on $port; $1 is the directory of the program, with a slash,
# or empty for this machine's.
serve_qemu() {
    fresh
    "$1qemu-img" create -q -f qcow2 "$tmp/disk" 4M &&
        "$1qemu-img" bitmap --add "$tmp/disk" b0 &&
        launch "$1qemu-nbd" -f qcow2 -t -e 8 -b 127.0.0.1 -p "$port" -A -B b0 --discard=unmap \
            "$tmp/disk"
}

# A plugin of the tree has to be named with its path, or this machine's is loaded.
plugin() {
    if [ -n "$1" ]; then
        echo "$tree/usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-$2-plugin.so"
    else
        echo "$2"
    fi
}

serve_nbdkit_file() {
    fresh
    truncate -s 4M "$tmp/disk"
    launch "$1nbdkit" -f -i 127.0.0.1 -p "$port" "$(plugin "$1" file)" "$tmp/disk"
}

serve_nbdkit_memory() {
    fresh
    launch "$1nbdkit" -f -i 127.0.0.1 -p "$port" "$(plugin "$1" memory)" 4M
}

# With -d it would serve one client only, so it is a daemon.
serve_nbd_server() {
    fresh
    uri=${uri}disk
    truncate -s 4M "$tmp/disk"
    printf '%s\n' '[generic]' 'listenaddr = 127.0.0.1' "port = $port" 'allowlist = true' \
        '[disk]' "exportname = $tmp/disk" 'flush = true' 'fua = true' 'trim = true' \
        >"$tmp/nbd-server.conf"
    "$1nbd-server" -C "$tmp/nbd-server.conf" -p "$tmp/pid" >"$tmp/server.log" 2>&1 \
        </dev/null || return 1
    soon 'no file of the pid' [ -s "$tmp/pid" ]
    server_pid=$(cat "$tmp/pid")
    ready
}

# tshark writes the head of its file when it has begun to listen.
capture() {
    rm -f "$tmp/capture"
    tshark -q -i lo -B 64 -f "tcp port $port" -w "$tmp/capture" >"$tmp/server.log" 2>&1 \
        </dev/null &
    capture_pid=$!
    soon 'tshark does not start' [ -s "$tmp/capture" ]
}

# is_captured NUMBER MODE RULE: whether the capture holds of that connection what the client
# counted; the verdict is left in $verdict.
is_captured() {
    tshark -q -r "$tmp/capture" -z "follow,tcp,raw,$1" 2>/dev/null >"$tmp/stream"
    build/tests/judge ${3:+"$3"} <"$tmp/stream" >"$tmp/judged" 2>&1
    verdict=$?
    grep '^# bytes' "$tmp/judged" | cmp -s - <(grep '^# bytes' "$tmp/$2.lines")
}

judged_clean() {
    soon 'the capture is not whole' is_captured "$@" || return
    sed 's/^# client/error: &/' "$tmp/judged"
    return "$verdict"
}

# session NAME MODE QUERY...: prints the lines of every.c, each with the name of the server.
# What it offers and then is known to refuse as invalid is in $known, a pattern.
session() {
    timeout 120 $every "$2" "$uri" "${@:3}" >"$tmp/$2.lines" 2>&1
    local status=$?
    [ -n "$known" ] && sed -i "s/^FAIL \($known.*\): \(invalid argument\).*/ok \1: \2/" \
        "$tmp/$2.lines"
    sed -n "s/^\(ok\|FAIL\) /\1 $1: $2: /p" "$tmp/$2.lines"
    if grep -q '^FAIL' "$tmp/$2.lines"; then
        failed=1
    elif [ $status != 0 ] && [ -z "$known" ]; then
        fail "$1: $2" "exit status $status: $(tail -n 1 "$tmp/$2.lines")"
    fi
}

# What the session used, in the words of nbdinfo.
used() {
    sed -n -e 's/^ok CACHE$/can_cache/p' -e 's/^ok READ DF\(:.*\)*$/can_df/p' \
        -e 's/^ok WRITE_ZEROES FAST_ZERO$/can_fast_zero/p' -e 's/^ok FLUSH$/can_flush/p' \
        -e 's/^ok WRITE FUA$/can_fua/p' -e 's/^ok TRIM$/can_trim/p' \
        -e 's/^ok WRITE_ZEROES$/can_zero/p' "$tmp/go.lines" | sort
}

uses_what_nbdinfo_sees() {
    timeout 60 nbdinfo "$uri" >"$tmp/nbdinfo" || return 1
    sed -n 's/^\t\(can_.*\): true$/\1/p' "$tmp/nbdinfo" | grep -v can_multi_conn | sort |
        diff - <(used) | sed 's/^/error: /' >"$tmp/difference"
    cat "$tmp/difference"
    [ ! -s "$tmp/difference" ]
}

refuses() {
    sed -n 's/^# refused: //p' "$tmp/go.lines" | uniq | paste -s -d ' ' >"$tmp/refused"
    [ "$(cat "$tmp/refused")" = "$1" ] || {
        echo "error: refused were: $(cat "$tmp/refused")"
        return 1
    }
}

breaks() {
    cat "$tmp"/*.lines | sed -n 's/^# server: \(.*\) at .*/\1/p' | sort -u | paste -s -d ' ' \
        >"$tmp/broken"
    [ "$(cat "$tmp/broken")" = "$1" ] || {
        echo "error: the server broke: $(cat "$tmp/broken")"
        return 1
    }
}

# everything NAME SERVE DIRECTORY REFUSED BROKEN QUERY...: all sessions with one server; which
# options it refuses, and which rules of the specification it breaks, is known.
everything() {
    local name=$1 mode number=0 rule
    if ! "$2" "$3" >"$tmp/output" 2>&1; then
        fail "$name: starts" "$(tail -n 1 "$tmp/output") $(tail -n 1 "$tmp/server.log")"
        return
    fi
    has tshark && check "$name: tshark starts" capture
    session "$name" go "${@:6}"
    for mode in name abort past; do
        session "$name" $mode
    done
    if has tshark; then
        for mode in go name abort past; do
            rule=
            [ $mode = name ] && rule=go_preferred
            [ $mode = past ] && rule=out_of_bounds
            check "$name: $mode: captured and judged" judged_clean $number $mode $rule
            number=$((number + 1))
        done
        stop_capture
    else
        skip "$name: captured and judged" 'tshark is not installed'
    fi
    check "$name: refuses no other options" refuses "$4"
    check "$name: breaks no other rules" breaks "$5"
    if has nbdinfo; then
        check "$name: everything is used that nbdinfo sees" uses_what_nbdinfo_sees
    else
        skip "$name: everything is used that nbdinfo sees" 'nbdinfo is not installed'
    fi
    stop
    rm -f "$tmp"/*.lines
}

# all_of WHERE DIRECTORY EXTENDED-REFUSED NBD-SERVER-REFUSED NBD-SERVER-BREAKS
all_of() {
    local no_extended='STARTTLS EXTENDED_HEADERS'
    everything "qemu-nbd $1" serve_qemu "$2" "$3" '' \
        base:allocation qemu:allocation-depth qemu:dirty-bitmap:b0
    everything "nbdkit file $1" serve_nbdkit_file "$2" "$no_extended" '' base:allocation
    everything "nbdkit memory $1" serve_nbdkit_memory "$2" "$no_extended" '' base:allocation
    known='READ DF' # nbd-server 3.26 offers DF, and refuses it
    everything "nbd-server $1" serve_nbd_server "$2" "$4" "$5"
    known=
}

### Extended headers ###

serve_unix() {
    start "$newer/qemu-nbd" -t -e 8 -k "$socket" "$@"
}

# copies DEPTH FROM TO: with extended headers.
copies() {
    if timeout 120 $copy -v --requests="$1" "$2" "$3" 2>"$tmp/counters"; then
        grep -q "in_flight_max=$1 .*protocol=extended" "$tmp/counters" && return
    fi
    sed 's/^/error: /' "$tmp/counters"
    return 1
}

extended_copies() {
    local depth
    head -c 16777216 /dev/urandom >"$tmp/image"
    for depth in 1 16 64; do
        rm -f "$tmp/disk" "$tmp/out"
        truncate -s 16M "$tmp/disk"
        check "extended headers: starts, $depth" serve_unix -f raw "$tmp/disk"
        check "extended headers: upload, $depth requests in flight" \
            copies $depth "$tmp/image" "$uri"
        check "extended headers: download, $depth requests in flight" \
            copies $depth "$uri" "$tmp/out"
        stop
        check "extended headers: upload is equal, $depth" cmp "$tmp/image" "$tmp/disk"
        check "extended headers: download is equal, $depth" cmp "$tmp/image" "$tmp/out"
    done
    rm -f "$tmp/image" "$tmp/disk" "$tmp/out"
}

# Of lines "START SIZE FLAGS" joins neighbours with the same flags.
joined() {
    awk 'NR > 1 && $3 == flags { size += $2; next }
        NR > 1 { print start, size, flags }
        { start = $1; size = $2; flags = $3 }
        END { print start, size, flags }'
}

# extents MODE HOW CONTEXT: what that session was told of it, together or alone.
extents() {
    sed -n "s/^# $2 $3 //p" "$tmp/$1.lines" | joined
}

# The maps that other programs make of the same export, in the same shape.
map_of_nbdinfo() {
    timeout 60 "$newer/nbdinfo" --map="$1" "$uri" | awk '{ print $1, $2, $3 }' | joined
}

# qemu-img looks at the file itself: start, length, depth, present, zero, data.
map_of_qemu_img() {
    local field='\([^,]*\)'
    "$newer/qemu-img" map -U --output=json "$tmp/disk" |
        sed -n "s/.*\"start\": $field, \"length\": $field, \"depth\": $field, \"present\": \
$field, \"zero\": $field, \"data\": $field,.*/\1 \2 \3 \4 \5 \6/p" | awk -v context="$1" '
        context == "base:allocation" { print $1, $2, ($6 == "false") + 2 * ($5 == "true") }
        context == "qemu:allocation-depth" { print $1, $2, $4 == "true" ? $3 + 1 : 0 }' | joined
}

# same COMMAND...: prints what is in $tmp/expected.
same() {
    "$@" | diff "$tmp/expected" - >"$tmp/difference" && return
    sed 's/^/error: /' "$tmp/difference"
    return 1
}

info_map() {
    timeout 60 build/examples/info --map="$1" "$uri" | awk '{ print $1, $2, $3 }'
}

eight_tib() {
    check '8 TiB: starts' serve_unix --image-opts driver=null-co,size=8T,read-zeroes=on
    known='CACHE over the whole export' # qemu-nbd does not cache that much
    session '8 TiB' whole base:allocation
    known=
    echo '0 8796093022208 3' >"$tmp/expected"
    check '8 TiB: one query gives one extent' same extents whole together base:allocation
    check '8 TiB: nbdinfo sees the same' same map_of_nbdinfo base:allocation
    check '8 TiB: info --map prints the same' same info_map base:allocation
    stop
}

# The lower file has data at 1 MiB; the upper one at 4 MiB, and zeroes at 6 MiB.
make_layers() {
    rm -f "$tmp/disk" "$tmp/lower"
    "$newer/qemu-img" create -q -f qcow2 "$tmp/lower" 8M &&
        "$newer/qemu-io" -c 'write -P 1 1M 1M' "$tmp/lower" &&
        "$newer/qemu-img" create -q -f qcow2 -b "$tmp/lower" -F qcow2 "$tmp/disk" &&
        "$newer/qemu-img" bitmap --add "$tmp/disk" b0 &&
        "$newer/qemu-io" -c 'write -P 2 4M 1M' -c 'write -z 6M 512k' "$tmp/disk"
}

# layer CONTEXT EXPECTED: lines "START SIZE FLAGS" with sizes in KiB.
layer() {
    echo "$2" | awk '{ print $1 * 1024, $2 * 1024, $3 }' >"$tmp/expected"
    check "qcow2: $1, asked with the others" same extents status together "$1"
    check "qcow2: $1, asked alone" same extents status alone "$1"
    check "qcow2: $1, by nbdinfo" same map_of_nbdinfo "$1"
    check "qcow2: $1, by info --map" same info_map "$1"
    case $1 in
    qemu:dirty-bitmap:*) ;;
    *) check "qcow2: $1, by qemu-img" same map_of_qemu_img "$1" ;;
    esac
}

layers() {
    check 'qcow2: made' make_layers
    check 'qcow2: starts' serve_unix -f qcow2 -A -B b0 "$tmp/disk"
    session qcow2 status base:allocation qemu:allocation-depth qemu:dirty-bitmap:b0
    layer base:allocation '0 1024 3
1024 1024 0
2048 2048 3
4096 1024 0
5120 3072 3'
    layer qemu:allocation-depth '0 1024 0
1024 1024 2
2048 2048 0
4096 1024 1
5120 1024 0
6144 512 1
6656 1536 0'
    layer qemu:dirty-bitmap:b0 '0 4096 0
4096 1024 1
5120 1024 0
6144 512 1
6656 1536 0'
    stop
}

if has qemu-nbd && has nbdkit && has nbd-server; then
    all_of 'of this machine' '' 'STARTTLS EXTENDED_HEADERS' \
        'STARTTLS STRUCTURED_REPLY EXTENDED_HEADERS' info_go_differ
else
    skip 'servers of this machine' 'one of qemu-nbd, nbdkit, nbd-server is not installed'
fi
if [ -x "$tree/usr/bin/nbd-server" ]; then
    wrap_newer qemu-nbd qemu-img qemu-io nbdkit nbd-server nbdinfo
    all_of 'of Debian 13' "$newer/" STARTTLS \
        'STARTTLS EXTENDED_HEADERS LIST_META_CONTEXT SET_META_CONTEXT' simple_read
    extended_copies
    eight_tib
    layers
else
    skip 'servers of Debian 13' "tests/trixie.sh did not make $tree"
fi
