#!/bin/sh
# test_tls and test_tls_errors with the newer mbedTLS (3, with TLS 1.3) of the tree that tests/trixie.sh makes.
. tests/lib.sh

tree=${NBD_TRIXIE:-/var/cache/nbd.h-trixie}
libraries=$tree/usr/lib/x86_64-linux-gnu
loader=$tree/usr/lib64/ld-linux-x86-64.so.2

# build PROGRAM: against the tree's mbedTLS and this machine's own C library.
build() {
    # shellcheck disable=SC2086
    $CC -std=c99 $WARN -O1 -g -DNBD_MBEDTLS -I. -isystem "$tmp/include" -o "$tmp/$1" \
        "tests/$1.c" "$libraries/libmbedtls.so" "$libraries/libmbedx509.so" \
        "$libraries/libmbedcrypto.so"
}

if [ ! -f "$tree/usr/include/mbedtls/ssl.h" ]; then
    skip 'sessions over TLS with mbedTLS 3' "no mbedTLS in $tree: run tests/trixie.sh"
    exit
fi
# Only these headers: the others are of another C library.
mkdir "$tmp/include"
ln -s "$tree/usr/include/mbedtls" "$tree/usr/include/psa" "$tmp/include"
for program in test_tls test_tls_errors; do
    check "$program compiles with mbedTLS 3" build "$program"
    [ -x "$tmp/$program" ] || continue
    "$loader" --library-path "$libraries" "$tmp/$program" >"$tmp/output" 2>&1 || failed=1
    grep -a -E '^(ok|FAIL|skip) ' "$tmp/output" ||
        fail "$program runs with mbedTLS 3" "$(tail -n 1 "$tmp/output")"
done
