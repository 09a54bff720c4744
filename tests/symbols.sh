#!/bin/sh
# The implementation needs no symbol but those listed in tests/symbols.txt, for
# each set of options, and defines none that could meet a program's own.
. tests/lib.sh

list=tests/symbols.txt
# Calls that would break the promise of never allocating, printing or aborting.
forbidden='malloc calloc realloc free printf fprintf sprintf snprintf abort exit __assert_fail'

sets() {
    sed -n 's/^\[\(.*\)\].*/\1/p' $list
}

options_of() {
    sed -n "s/^\[$1\] *//p" $list
}

# The symbols allowed to set $1, one a line.
allowed() {
    sed -n "/^\[$1\]/,/^\$/p" $list | sed 1d | while read -r first rest; do
        if [ "$first" = + ]; then
            allowed "$rest"
        else
            echo "$first $rest" | tr ' ' '\n'
        fi
    done
}

# _GLOBAL_OFFSET_TABLE_ is the linker's.
undefined() {
    nm -u "$1" | sed 's/.* //' | grep -v '^_GLOBAL_OFFSET_TABLE_$'
}

compile() {
    # shellcheck disable=SC2086
    $CC -std=c99 -D_POSIX_C_SOURCE=200112L $1 $2 -fno-stack-protector -U_FORTIFY_SOURCE -I. \
        -c -o "$tmp/o" tests/compile/implement.c
}

# no_line COMMAND...: it prints nothing.
no_line() {
    lines=$("$@")
    [ -z "$lines" ] || { echo "error: $lines"; return 1; }
}

undefined_but_not_allowed() {
    allowed "$1" | sort -u >"$tmp/allowed"
    undefined "$tmp/o" | sort -u | comm -13 "$tmp/allowed" - | tr '\n' ' '
}

defined_without_prefix() {
    nm -g --defined-only "$1" | sed 's/.* //' | grep -v '^nbd_' | tr '\n' ' '
}

mutable_variables() {
    nm "$1" | sed -n 's/.* [BbDdCcGgSs] //p' | tr '\n' ' '
}

forbidden_but_used() {
    for symbol in $forbidden; do
        undefined "$tmp/o" | grep -x "$symbol"
    done | tr '\n' ' '
}

exported() {
    nm -D --defined-only "$1" | grep -w 'T' | grep nbd | tr '\n' ' '
}

check_set() {
    for optimise in -O0 -Os -O2; do
        check "compiles: $1 $optimise" compile "$optimise -fno-pic" "$(options_of "$1")"
        check "undefined symbols are those listed: $1 $optimise" no_line undefined_but_not_allowed "$1"
        check "nothing allocates, prints or aborts: $1 $optimise" no_line forbidden_but_used
        check "every exported name starts with nbd_: $1 $optimise" no_line defined_without_prefix "$tmp/o"
        check "no variable is kept: $1 $optimise" no_line mutable_variables "$tmp/o"
    done
}

if ! has nm; then
    skip 'undefined symbols are those listed' 'nm is not installed'
    exit
fi
sets >"$tmp/sets"
while read -r set; do
    if [ "$set" = 'engine, TLS' ] && [ -z "$(mbedtls_flags)" ]; then
        skip "undefined symbols are those listed: $set" 'mbedTLS is not installed'
    else
        check_set "$set"
    fi
done <"$tmp/sets"
check 'compiles: into a shared library' compile '-O2 -fPIC' ''
check 'links: into a shared library' $CC -shared -o "$tmp/lib.so" "$tmp/o"
check 'a shared library exports none of it' no_line exported "$tmp/lib.so"
