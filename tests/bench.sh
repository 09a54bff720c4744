#!/bin/bash
# limit: 600
# The programs of bench/: they run against each kind of server, count right, and refuse what
# they do not know.  Only counts are looked at, never time; how requests fall together
# depends on the machine, so the bounds of system calls leave room for a busy one.
. tests/lib.sh
. tests/servers.sh

programs='nbdh floor'

# compile NAME LIBRARIES [SOURCES...]
compile() {
    # shellcheck disable=SC2086
    $CC -std=c99 -O2 $WARN -Wstrict-prototypes -Wmissing-prototypes -I. -o "$tmp/$1" \
        ${3:-"bench/$1.c"} -lpthread $2
}

# Serves on TCP; the server says at which port.
start_tcp() {
    local deadline=$((SECONDS + 60))
    stop
    "$tmp/fastserver" --tcp 0 "$@" >"$tmp/server.log" 2>&1 </dev/null &
    server_pid=$!
    until grep -q '^listening [0-9]*$' "$tmp/server.log"; do
        if ! kill -0 "$server_pid" 2>/dev/null || [ $SECONDS -gt $deadline ]; then
            echo "error: server did not start: $(cat "$tmp/server.log")"
            return 1
        fi
    done
    uri=nbd://127.0.0.1:$(sed 's/listening //' "$tmp/server.log")
}

start_unix() {
    start "$tmp/fastserver" --unix "$socket" "$@"
}

# bench PROGRAM OP SIZE DEPTH COUNT ARGUMENTS...: its line is left in $tmp/line.
bench() {
    timeout 120 "$tmp/$1" "$uri" --op "$2" --size "$3" --depth "$4" --count "$5" "${@:6}" \
        >"$tmp/line"
}

# value KEY: what the line says.
value() {
    sed -n "s/.*\<$1=\([0-9.]*\).*/\1/p" "$tmp/line"
}

# between LEAST KEY MOST
between() {
    awk -v least="$1" -v is="$(value "$2")" -v most="$3" -v key="$2" 'BEGIN {
        if (is != "" && is + 0 >= least + 0 && is + 0 <= most + 0) exit 0
        print "error: " key " is " is ", not " least " to " most
        exit 1
    }'
}

# Every key that the program has on this server is there, and above 0.
complete() {
    local key keys='ops_s mb_s cpu_us_op'
    [ "$1" = libnbd ] || keys="$keys syscalls_op"
    case "$uri" in nbd://*) keys="$keys segs_op" ;; esac
    for key in $keys; do
        between 0.001 "$key" 1e12 || return 1
    done
    [ "$(value ops)" = "$2" ] || {
        echo "error: not $2 requests: $(cat "$tmp/line")"
        return 1
    }
}

# 1 connection, and 5 in 2 threads; requests are left over at the end of the last round.
runs() {
    local op
    for op in read write mixed; do
        bench "$1" $op 8K 7 200 --no-init && complete "$1" 200 || return 1
        bench "$1" $op 512 3 40 --connections 5 --threads 2 && complete "$1" 200 || return 1
    done
}

all_run() {
    local program
    for program in $programs; do
        check "${program}_runs_$1" runs "$program"
    done
}

fast_servers() {
    local replies
    for replies in simple structured extended; do
        check "fastserver_listens_unix_$replies" start_unix --replies $replies
        all_run "unix_$replies"
        check "fastserver_listens_tcp_$replies" start_tcp --replies $replies
        all_run "tcp_$replies"
    done
}

real_server() {
    if ! has nbdkit; then
        skip real_server 'nbdkit is not installed'
        return
    fi
    check nbdkit_listens start nbdkit -f -U "$socket" memory 16M
    all_run nbdkit
}

# Data

# 8 bytes of 8 bytes each, and the next.
pattern_is_copied() {
    start_unix --size "$2" --replies "$1" || return 1
    rm -f "$tmp/copied"
    timeout 60 build/examples/copy "$uri" "$tmp/copied" || return 1
    [ "$(stat -c %s "$tmp/copied")" = "$2" ] || return 1
    od -A n -t u8 --endian=big -w8 -v "$tmp/copied" | awk '$1 != 8 * (NR - 1) { exit 1 }'
}

# Whole, split over two receives, above the buffer; 7 in flight.
data_arrives() {
    local size
    for size in 512 4K 24K 1M; do
        bench "$1" read $size 7 50 --verify || return 1
        bench "$1" read $size 3 50 --verify --connections 3 || return 1
        [ "$1" = libnbd ] || bench "$1" read $size 7 50 --verify --buffer 5000 || return 1
    done
}

data() {
    local replies program
    for replies in simple structured extended; do
        check "fastserver_serves_the_pattern_$replies" pattern_is_copied $replies 1000008
        check "fastserver_listens_again_$replies" start_unix --replies $replies
        for program in $programs; do
            check "${program}_reads_the_pattern_$replies" data_arrives "$program"
        done
    done
    if has nbdkit; then
        refuse zeroes_are_not_the_pattern 'wrong data' zeroes_arrive
    else
        skip zeroes_are_not_the_pattern 'nbdkit is not installed'
    fi
}

zeroes_arrive() {
    start nbdkit -f -U "$socket" memory 16M && bench nbdh read 4K 4 20 --verify
}

# Counts

# counts PROGRAM OP SIZE DEPTH KEY MOST ARGUMENTS...
counts() {
    bench "$1" "$2" "$3" "$4" 2000 "${@:7}" && between 0.0001 "$5" "$6"
}

# Of 64 requests in flight those that are answered together cost as much as one: 0.16 and
# 0.08 at most on an idle machine, where 4.0 is what a client takes that does not gather.
batches() {
    counts "$1" read 4K 64 syscalls_op 0.4 && counts "$1" write 4K 64 syscalls_op 0.2
}

# A request for each packet, or 16; acknowledgements of their own are rare.  A packet holds
# 64 KiB at most, and those that come in are fewer.
segments() {
    counts "$1" write 512 1 segs_op 1.01 && counts "$1" write 512 16 segs_op 0.07 &&
        counts "$1" write 512K 1 segs_op 99 && between 8 segs_op 99
}

# Without the flag the head of a request is a packet of its own.
plain_segments() {
    counts "$1" write 512 1 segs_op 2.01 --send plain && between 1.99 segs_op 2.01 &&
        counts "$1" write 512 1 segs_op 1.01 --send more &&
        counts "$1" write 512 16 segs_op 0.07 --send more
}

# One request in flight makes the same calls in every run: with those of connecting and of
# ending, fewer than 100, strace sees what the program counts.
as_strace_counts() {
    local seen
    timeout 120 strace -f -o "$tmp/strace" -e trace=poll,sendmsg,recvfrom,recvmsg,readv,sendto \
        "$tmp/$1" "$uri" --op write --size 4K --depth 1 --count 2000 >"$tmp/line" || return 1
    seen=$(grep -c ' = ' "$tmp/strace")
    awk -v seen="$seen" -v counted="$(value syscalls_op)" 'BEGIN {
        more = seen - 2000 * counted
        if (more >= 0 && more < 100) exit 0
        print "error: strace saw " seen " calls, the program " 2000 * counted
        exit 1
    }'
}

count_all() {
    local program
    check fastserver_listens_for_counts start_unix
    for program in nbdh floor; do
        check "${program}_sends_and_receives_many_at_once" batches "$program"
        if has strace; then
            check "${program}_counts_as_strace_does" as_strace_counts "$program"
        else
            skip "${program}_counts_as_strace_does" 'strace is not installed'
        fi
    done
    check fastserver_listens_for_segments start_tcp
    for program in nbdh floor; do
        check "${program}_fills_segments" segments "$program"
        check "${program}_leaves_segments_open_if_told" plain_segments "$program"
    done
}

# Command lines

# wrong NAME ARGUMENTS...: nbdh refuses them with its usage.
wrong() {
    refuse "nbdh_refuses_$1" '^usage\|: not a number\|: unknown' usage_error "$tmp/nbdh" "${@:2}"
}

# Shows 2, the exit status of a wrong command line, as a failure and all others as success.
usage_error() {
    "$@"
    [ $? != 2 ]
}

command_lines() {
    local good="$uri --op read --size 4K --depth 2 --count 10"
    # shellcheck disable=SC2086
    {
        wrong no_uri --op read --size 4K --depth 2 --count 10
        wrong two_uris $good $uri
        wrong no_op "$uri" --size 4K --depth 2 --count 10
        wrong unknown_op $good --op trim
        wrong unknown_option $good --fast
        wrong no_count "$uri" --op read --size 4K --depth 2
        wrong no_number $good --depth 2x
        wrong empty_number $good --depth ''
        wrong negative_number $good --depth -1
        wrong large_number $good --size 18446744073709551617
        wrong large_product $good --size 17592186044416M
        wrong unknown_send $good --send fast
        wrong small_buffer $good --buffer 255
        wrong threads_without_connections $good --threads 2
        wrong verify_of_writes $good --op write --verify
        refuse fastserver_refuses_no_address '^usage' usage_error "$tmp/fastserver"
        refuse fastserver_refuses_unknown_replies ': unknown' usage_error "$tmp/fastserver" \
            --unix "$socket.2" --replies fast
        refuse nbdh_fails_without_server "$socket.2: " failure "$tmp/nbdh" \
            "nbd+unix:///?socket=$socket.2" --op read --size 4K --depth 2 --count 10
        [ "$programs" = 'nbdh floor' ] ||
            refuse libnbd_refuses_send '^usage' usage_error "$tmp/libnbd" $good --send more
    }
}

# Shows 1, the exit status of what went wrong, as a failure and all others as success.
failure() {
    "$@"
    [ $? != 1 ]
}

# TLS

make_certificate() {
    (
        cd "$tmp" || exit 1
        printf 'cn = "localhost"\nca\ncert_signing_key\nsigning_key\nexpiration_days = 7\n%s\n' \
            'dns_name = "localhost"' >info
        certtool --generate-privkey --key-type=ecdsa --curve=secp256r1 --outfile server-key.pem &&
            certtool --generate-self-signed --load-privkey server-key.pem --template info \
                --outfile server-cert.pem && cp server-cert.pem ca-cert.pem
    )
}

tls_server() {
    start nbdkit -f -U "$socket" --tls=require --tls-certificates="$tmp" memory 16M &&
        uri="nbds+unix:///?socket=$socket&tls-hostname=localhost&tls-certificates=$tmp"
}

# The same program with a seam.
sealed() {
    compile "nbdh_$1" "$2" "-DBENCH_SEAL bench/nbdh.c bench/seal_$1.c"
}

floor_runs() {
    local op
    for op in read write; do
        uri=$tmp bench tls_floor $op 8K 7 200 && complete libnbd 200 || return 1
    done
}

tls_programs() {
    local program mbedtls='-lmbedtls -lmbedx509 -lmbedcrypto' openssl='-lssl -lcrypto'
    if ! has certtool || ! has nbdkit || ! printf '%s\n' '#include <mbedtls/ssl.h>' \
        '#include <openssl/ssl.h>' | $CC -E - >"$tmp/none" 2>&1; then
        skip tls_programs 'certtool, nbdkit, mbedTLS or OpenSSL is not installed'
        return
    fi
    check nbdh_mbedtls_compiles sealed mbedtls "$mbedtls"
    check nbdh_openssl_compiles sealed openssl "$openssl"
    check tls_floor_compiles compile tls_floor "$mbedtls $openssl"
    check certificate_for_tls_is_made make_certificate
    check nbdkit_listens_with_tls tls_server
    for program in nbdh_mbedtls nbdh_openssl; do
        check "${program}_runs_nbdkit" runs $program
    done
    check tls_floor_runs floor_runs
    refuse tls_floor_refuses_connections 'one connection' "$tmp/tls_floor" "$tmp" --op read \
        --size 4K --depth 1 --count 10 --connections 2
}

# SIGTERM ends it with success and takes its socket away.
ends_on_sigterm() {
    start_unix || return 1
    kill "$server_pid"
    wait "$server_pid" || return 1
    server_pid=
    [ ! -e "$socket" ] && [ "$(cat "$tmp/server.log")" = listening ]
}

for program in fastserver nbdh floor; do
    check "${program}_compiles" compile $program
done
if pkg-config --exists libnbd 2>/dev/null; then
    programs="$programs libnbd"
    check libnbd_compiles compile libnbd "$(pkg-config --libs libnbd)"
else
    skip libnbd_compiles 'libnbd is not installed'
fi
fast_servers
real_server
data
count_all
command_lines
tls_programs
check fastserver_ends_on_sigterm ends_on_sigterm
