#!/bin/bash
# limit: 600
# The documentation is true: each shell block of README.md runs, each C block compiles,
# and the examples that stand in two places are the same.
#
# The blocks run in a copy of this tree.  There apt-get is only printed, and "make check"
# runs one test, since this script is itself a part of all of them.
. tests/lib.sh

# Writes the blocks of language $1 to $tmp/$1.1, $tmp/$1.2 ...
blocks() {
    awk -v language="$1" -v to="$tmp/$1." '
        /^```/ && inside { inside = 0; close(to n); next }
        $0 == "```" language { inside = 1; n++; next }
        inside { print > (to n) }
    ' README.md
}

# The comment EXAMPLE of nbd.h without its "//     ".
header_example() {
    sed -n '/^\/\/ EXAMPLE/,/^\/\/ THE LOOP/p' nbd.h | grep -E '^//( {5}|$)' |
        sed 's,^//$,,; s,^//     ,,' | sed '1{/^$/d}' | sed '${/^$/d}'
}

same_as_hello() {
    "$@" | diff - examples/hello.c
}

make_copy() {
    mkdir "$tmp/copy" "$tmp/home" &&
        tar -c --exclude=./build --exclude=./.git . | tar -x -C "$tmp/copy"
}

run_block() {
    (cd "$tmp/copy" && HOME=$tmp/home APT_GET='echo apt-get' TESTS=test_uri CI='' \
        MAKEFLAGS='' bash -e -o pipefail "$1") </dev/null
}

compile_block() {
    # shellcheck disable=SC2086
    $CC -std=c99 -D_POSIX_C_SOURCE=200112L $WARN -Wno-unused-function -I. -x c -c -o "$tmp/o" "$1"
}

first_line() {
    head -n 1 "$1"
}

check 'the example in nbd.h is examples/hello.c' same_as_hello header_example
check 'a copy of the tree is made' make_copy
blocks sh
blocks c
for block in "$tmp"/sh.*; do
    if grep -q pkg-config "$block" && ! has pkg-config; then
        skip "README.md, shell block $(basename "$block") runs" 'pkg-config is not installed'
        continue
    fi
    check "README.md, shell block $(basename "$block") runs: $(first_line "$block")" run_block "$block"
done
for block in "$tmp"/c.*; do
    check "README.md, C block $(basename "$block") compiles: $(first_line "$block")" \
        compile_block "$block"
done
check 'the first example of README.md is examples/hello.c' same_as_hello cat "$tmp/c.1"
