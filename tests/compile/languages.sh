#!/bin/sh
# nbd.h compiles without a warning in each version of C and C++, strict and with the
# compiler's extensions, and for each platform that tests/portability.sh runs.  What
# tests/compile/matrix.sh does with every option for some versions is not done here again.
# The words of $compile and of options are separate arguments.
# shellcheck disable=SC2086
. tests/lib.sh

POSIX=-D_POSIX_C_SOURCE=200112L
ENGINE='-ffreestanding -DNBD_NO_SOCKETS -DNBD_NO_CONVENIENCE'
C='-Wstrict-prototypes -Wmissing-prototypes'

# The flags of language $1, and what a compiler of C is called for C++.
language_flags() {
    case $1 in
    *++*) echo "-x c++ -std=$1 $WARN" ;;
    *) echo "-x c -std=$1 $WARN $C" ;;
    esac
}

for compiler in gcc clang clang-19; do
    if ! has "$compiler"; then
        skip "every language: $compiler" "$compiler is not installed"
        continue
    fi
    for version in c99 c11 c17 c2x c++11 c++14 c++17 c++20; do
        for language in $version "gnu${version#c}"; do
            compile="$compiler $(language_flags "$language") -I. -fsyntax-only"
            check "no warning: $compiler $language" $compile $POSIX tests/compile/implement.c
            check "no warning: $compiler $language, engine, freestanding" \
                $compile $ENGINE tests/compile/implement.c
        done
    done
done

# target NAME COMPILER FLAGS...: each cut, and none.
target() {
    name=$1
    shift
    if ! has "$1"; then
        skip "every cut: $name" "$1 is not installed"
        return
    fi
    printf '\n%s\n' "$CUTS" | while read -r cut; do
        check "no warning: $name ${cut:-default}" \
            "$@" $POSIX $cut -I. -c -o "$tmp/o" tests/compile/implement.c
        echo "$failed" >"$tmp/failed"
    done
    failed=$(cat "$tmp/failed")
}

target musl musl-gcc -std=c99 $WARN $C
target arm arm-linux-gnueabihf-gcc -std=c99 $WARN $C
target aarch64 aarch64-linux-gnu-gcc -std=c99 $WARN $C
target s390x s390x-linux-gnu-gcc -std=c99 $WARN $C
target i386 gcc -m32 -isystem "/usr/include/$(gcc -print-multiarch)" -std=c99 $WARN $C
target 'Windows, C' x86_64-w64-mingw32-gcc -std=c99 $WARN $C
target 'Windows, C++' x86_64-w64-mingw32-g++ -x c++ -std=c++11 $WARN
target tcc tcc -std=c99 -Wall -Werror
