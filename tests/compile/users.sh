#!/bin/sh
# The programs of the users that nbd.h is for compile, as C99 and as C++11.
. tests/lib.sh

# The headers that a program names and that are not everywhere.
missing_header() {
    sed -n 's/^#include <\(.*\)>.*/\1/p' "$1" | while read -r header; do
        echo "#include <$header>" | $CC -E -x c - >"$tmp/output" 2>&1 || echo "$header"
    done
}

compile_user() {
    absent=$(missing_header "$1")
    if [ -n "$absent" ]; then
        skip "compiles: $1" "<$absent> is not installed"
        return
    fi
    # shellcheck disable=SC2086
    check "compiles as C99: $1" $CC -std=c99 $WARN -I. -c -o "$tmp/o" "$1"
    if has g++; then
        # shellcheck disable=SC2086
        check "compiles as C++11: $1" g++ -x c++ -std=c++11 $WARN -I. -c -o "$tmp/o" "$1"
    else
        skip "compiles as C++11: $1" 'g++ is not installed'
    fi
}

for source in tests/compile/user_*.c; do
    [ -f "$source" ] && compile_user "$source"
done
