#!/bin/bash
# limit: 900
# Random sessions with the servers that people run, each answer held against a model of the
# disk; then the same sessions by libnbd, with the same results.  tests/differential.h says
# how.
#
#   tests/differential.sh [SEED [COUNT]]    COUNT sessions with each server, 20 if not given
#
# Without SEED it is CHECK_SEED, or 1.  The servers of Debian 13 are those that
# tests/trixie.sh unpacks.
. tests/lib.sh
. tests/servers.sh

seed=${1:-${CHECK_SEED:-1}}
count=${2:-20}
size=8389843   # no multiple of anything
blocks=8392704 # a multiple of 4096
peer=$tmp/differential_libnbd
modules= # where nbdkit's filters and plugins are, if it does not know by itself

### Servers ###

# module KIND NAME: a plugin or filter; those of the tree have to be named with their path.
module() {
    echo "${modules:+$modules/$1s/nbdkit-}$2${modules:+-$1.so}"
}

# serve_memory FILTERS SIZE PARAMETER...: nbdkit with the filters in that order.
serve_memory() {
    local filter filters=()
    for filter in $1; do
        filters+=("--filter=$(module filter "$filter")")
    done
    start nbdkit -f -U "$socket" -t 16 "${filters[@]}" "$(module plugin memory)" "${@:2}"
}

serve_qemu() {
    rm -f "$tmp/disk"
    qemu-img create -q -f "$1" "$tmp/disk" $blocks &&
        start qemu-nbd -t -e 8 -k "$socket" -f "$1" --discard=unmap "$tmp/disk"
}

serve_file() {
    rm -f "$tmp/disk"
    truncate -s $size "$tmp/disk"
    serve_nbd_server "$tmp/disk" $'flush = true\nfua = true\ntrim = true'
}

# Chunks of several replies mixed, holes among them.
serve_ours() {
    start build/tests/server -U "$socket" --size $size --chunk=4096 --shuffle=1
}

# with NAME SERVE...: fails if the server does not start.
with() {
    "${@:2}" >"$tmp/output" 2>&1 && return
    fail "$1: starts" "$(tail -n 1 "$tmp/output")"
    return 1
}

### Sessions ###

# by CLIENT COMMAND...: plays the sessions; results and counters stay in $tmp/CLIENT.*.
by() {
    timeout 200 "${@:2}" "$uri" "$seed" "$count" "$tmp/$1.results" >"$tmp/$1.counters"
}

same_results() {
    cmp "$tmp/ours.results" "$tmp/libnbd.results" && return
    diff "$tmp/ours.results" "$tmp/libnbd.results" | sed -n 's/^[<>]/error: &/p' | head -n 2
    return 1
}

# sessions NAME OPTION...: by nbd.h, then by libnbd.
sessions() {
    check "$1: nbd.h agrees with the model" by ours build/tests/differential "${@:2}"
    sed "s/^#/# $1:/" "$tmp/ours.counters"
    if [ -x "$peer" ]; then
        check "$1: libnbd agrees with the model" by libnbd "$peer" "${@:2}"
    fi
}

alike() {
    sessions "$@"
    [ ! -x "$peer" ] || check "$1: nbd.h and libnbd got the same" same_results
}

# The filter did what it is there for.
seen() {
    grep -q " $1" "$tmp/ours.counters" && return
    cat "$tmp/ours.counters"
    return 1
}

# What reached the server is what was issued, with all flags that nbdkit shows.
arrived_as_issued() {
    sed -n 's/^.* connection=[0-9]* \([A-Z][a-z]*\) id=[0-9]*\( .*\)\{0,1\} \.\.\.$/\1\2/p' \
        "$tmp/log" | sort >"$tmp/arrived"
    sed -n 's/^[0-9]* |\(.*\)| .* error .*/\1/p' "$tmp/ours.results" | sort >"$tmp/issued"
    [ -s "$tmp/issued" ] && cmp "$tmp/issued" "$tmp/arrived" && return
    diff "$tmp/issued" "$tmp/arrived" | sed -n 's/^[<>]/error: &/p' | head -n 2
    return 1
}

plain_memory() {
    rm -f "$tmp/log"
    with "$1" serve_memory log $size logfile="$tmp/log" || return
    check "$1: plays" by ours build/tests/differential
    check "$1: every command arrives with its flags" arrived_as_issued
    alike "$1"
    alike "$1, simple replies" -s
}

# Each kind with an error of its own, and none by chance.
certain_errors() {
    with "$1" serve_memory error $size error-pwrite=ENOSPC error-pwrite-rate=100% \
        error-zero=EPERM error-zero-rate=100% error-trim=ENOMEM error-trim-rate=100% \
        error-extents=EINVAL error-extents-rate=100% error-cache=EIO error-cache-rate=100% ||
        return
    alike "$1"
    check "$1: there were errors" seen 'errors=[1-9]'
}

random_errors() {
    with "$1" serve_memory error $size error=EIO error-rate=10% || return
    sessions "$1"
    check "$1: there were errors" seen 'errors=[1-9]'
}

delays() {
    with "$1" serve_memory delay $size delay-read=1ms delay-zero=2ms delay-extents=1ms || return
    alike "$1"
    check "$1: replies came out of order" seen 'out_of_order=[1-9]'
}

policy() {
    with "$1" serve_memory blocksize-policy $blocks blocksize-minimum=4096 \
        blocksize-preferred=65536 blocksize-maximum=1M blocksize-error-policy=error || return
    alike "$1"
    check "$1: requests were refused" seen 'misaligned=[1-9]'
}

all_filters() {
    with "$1" serve_memory 'blocksize-policy delay error' $blocks blocksize-minimum=512 \
        blocksize-preferred=4096 blocksize-maximum=64K blocksize-error-policy=error \
        delay-read=1ms delay-write=1ms error=ENOSPC error-rate=5% || return
    sessions "$1"
    check "$1: there were errors" seen 'errors=[1-9]'
}

in_turn() {
    with "$1" serve_memory noparallel $size serialize="$2" || return
    alike "$1"
}

# A session each, and the server has to go away by itself behind it.
once() {
    rm -f "$socket"
    with exitlast serve_memory exitlast $size || return 1
    by "$@" || return 1
    wait "$server_pid"
    local status=$?
    server_pid=
    return $status
}

last_clients() {
    local sessions=$count first=$seed last=$((seed + 4))
    count=1
    for ((seed = first; seed <= last; seed++)); do
        check "$1, seed $seed: nbd.h, and the server leaves" once ours build/tests/differential
        [ -x "$peer" ] || continue
        check "$1, seed $seed: libnbd, and the server leaves" once libnbd "$peer"
        check "$1, seed $seed: nbd.h and libnbd got the same" same_results
    done
    count=$sessions seed=$first
}

# served PROTOCOL NAME SERVE...
served() {
    with "${@:2}" || return
    alike "$2"
    check "$2: the protocol is $1" seen "protocol=$1"
}

# Whether a cluster can be zeroed fast depends on what was there, and that on the order in
# which requests that share it were served: with FAST_ZERO two sessions may differ.
served_qcow2() {
    with "$2" serve_qemu qcow2 || return
    sessions "$2"
    check "$2: the protocol is $1" seen "protocol=$1"
    alike "$2, without FAST_ZERO" -f
}

# nbd-server 3.26 offers DF, and refuses it.
served_without_df() {
    with "$1" "${@:2}" && alike "$1" -n
}

# all_servers SUFFIX PROTOCOL-OF-QEMU
all_servers() {
    plain_memory "nbdkit memory$1"
    certain_errors "nbdkit error filter, all fail but reads$1"
    random_errors "nbdkit error filter, one in ten fails$1"
    delays "nbdkit delay filter$1"
    policy "nbdkit blocksize-policy filter$1"
    all_filters "nbdkit error, delay and blocksize-policy filters$1"
    in_turn "nbdkit noparallel filter, requests$1" requests
    in_turn "nbdkit noparallel filter, all requests$1" all-requests
    last_clients "nbdkit exitlast filter$1"
    served "$2" "qemu-nbd raw$1" serve_qemu raw
    served_qcow2 "$2" "qemu-nbd qcow2$1"
    served_without_df "nbd-server$1" serve_file
    stop
}

echo "# seeds $seed to $((seed + count - 1))"
if echo '#include <libnbd.h>' | $CC -E -x c - >"$tmp/output" 2>&1; then
    # shellcheck disable=SC2086
    check 'compiles with libnbd' $CC -std=c99 $WARN -O2 -I. -o "$peer" \
        tests/differential_libnbd.c -lnbd
else
    skip 'the same sessions with libnbd' '<libnbd.h> is not installed'
fi
served structured 'our server, small chunks out of order' serve_ours
if has nbdkit && has qemu-nbd && has nbd-server; then
    all_servers '' structured
else
    skip 'servers of this machine' 'one of nbdkit, qemu-nbd, nbd-server is not installed'
fi
if [ -x "$tree/usr/bin/nbd-server" ]; then
    wrap_newer qemu-nbd qemu-img nbdkit nbd-server
    PATH=$newer:$PATH
    modules=$tree/usr/lib/x86_64-linux-gnu/nbdkit
    all_servers ', Debian 13' extended
else
    skip 'servers of Debian 13' "tests/trixie.sh did not make $tree"
fi
