#!/bin/bash
# limit: 600
# The documentation is true: each shell block of README.md runs, each C block compiles,
# and the examples that stand in two places are the same.
#
# The blocks run in a copy of this tree.  There apt-get, tests/trixie.sh and tests/lwip.sh are
# only printed, and "make check" runs one test, since this script is itself a part of all.
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
        tar -c --exclude=./build --exclude=./.git . | tar -x -C "$tmp/copy" &&
        printf '#!/bin/sh\necho trixie.sh\n' >"$tmp/copy/tests/trixie.sh" &&
        printf '#!/bin/sh\necho lwip.sh\n' >"$tmp/copy/tests/lwip.sh"
}

run_block() {
    (cd "$tmp/copy" && HOME=$tmp/home APT_GET='echo apt-get' TESTS=test_uri CI='' \
        MAKEFLAGS='' bash -e -o pipefail "$1") </dev/null
}

compile_block() {
    # shellcheck disable=SC2086
    $CC -std=c99 $WARN -Wno-unused-function -I. -x c -c -o "$tmp/o" "$1"
}

has_mbedtls() {
    echo '#include <mbedtls/ssl.h>' | $CC -E - >"$tmp/none" 2>&1
}

first_line() {
    head -n 1 "$1"
}

# The table number $1 of the chapter "Size".
size_table() {
    awk -v wanted="$1" '
        /^## / { here = $0 == "## Size" }
        here && /^\|/ { n += !inside; if (n == wanted) print }
        { inside = /^\|/ }
    ' README.md
}

same_sizes() {
    size_table "$1" >"$tmp/table" && tests/size.sh "$2" | diff "$tmp/table" -
}

# sizes NUMBER TARGET COMPILER: figures are those of one compiler only.
sizes() {
    rule="the size table of README.md is what make size prints: $2"
    case "$("$3" -dumpfullversion 2>&1)" in
    12.2.*) check "$rule" same_sizes "$1" "$2" ;;
    *) skip "$rule" "$3 is not gcc 12.2" ;;
    esac
}

# Each test that the chapter "Trust" names is there.
tests_exist() {
    # shellcheck disable=SC2016
    sed -n '/^## Trust/,/^## /s/.*| `\(test_[a-z_]*\) \([a-z_0-9]*\)`.*/\1 \2/p' README.md \
        >"$tmp/names"
    [ -s "$tmp/names" ] && while read -r program name; do
        name=${name%_default} # the macro of test_reads puts it behind the name
        grep -q "\b$name\b" "tests/$program.c" || { echo "error: no $program $name"; return 1; }
    done <"$tmp/names"
}

check 'the example in nbd.h is examples/hello.c' same_as_hello header_example
check 'a copy of the tree is made' make_copy
blocks sh
blocks c
for block in "$tmp"/sh.*; do
    if grep -q 'make deps' "$block" && ! has apt-get; then
        skip "README.md, shell block $(basename "$block") runs" 'apt-get is not installed'
        continue
    fi
    if grep -q pkg-config "$block" && ! has pkg-config; then
        skip "README.md, shell block $(basename "$block") runs" 'pkg-config is not installed'
        continue
    fi
    if grep -q psktool "$block" && ! { has psktool && has nbdkit; }; then
        skip "README.md, shell block $(basename "$block") runs" 'psktool or nbdkit is not installed'
        continue
    fi
    if grep -q 'mbedtls\|psktool' "$block" && ! has_mbedtls; then
        skip "README.md, shell block $(basename "$block") runs" 'mbedTLS is not installed'
        continue
    fi
    check "README.md, shell block $(basename "$block") runs: $(first_line "$block")" run_block "$block"
done
for block in "$tmp"/c.*; do
    check "README.md, C block $(basename "$block") compiles: $(first_line "$block")" \
        compile_block "$block"
done
sizes 1 native "$CC"
sizes 2 arm arm-none-eabi-gcc
sizes 3 cuts arm-none-eabi-gcc
check 'each test that README.md names exists' tests_exist
check 'the first example of README.md is examples/hello.c' same_as_hello cat "$tmp/c.1"
