#!/bin/sh
# limit: 1800
# What reads nbd.h without running it finds nothing: gcc -fanalyzer, clang-tidy, cppcheck; nor
# does shellcheck in the scripts, above the level of style.  What is left out of the others is
# in tests/.clang-tidy and tests/cppcheck.txt, with the reason.
. tests/lib.sh

OPTIONS="
$CUTS
-DNBD_RANGES=1
-DNBD_RANGES=64
"
POSIX=-D_POSIX_C_SOURCE=200112L
source=tests/compile/implement.c

# quiet COMMAND...: it succeeds and prints nothing.
quiet() {
    "$@" >"$tmp/found" 2>&1 && [ ! -s "$tmp/found" ] && return
    cat "$tmp/found"
    return 1
}

# without_count COMMAND...: it succeeds; how many warnings were left out says nothing.
without_count() {
    "$@" >"$tmp/found" 2>&1 && return
    grep -v 'warnings generated' "$tmp/found"
    return 1
}

# The words of $1 are options of the preprocessor.
# shellcheck disable=SC2086
analyse() {
    check "gcc -fanalyzer finds nothing: ${1:-default}" quiet \
        gcc -std=c99 -O1 -fanalyzer $POSIX $1 -I. -c -o "$tmp/o" $source
}

# nbd.h itself is the source: the static analyser in it passes over functions of headers.
# shellcheck disable=SC2086
tidy() {
    check "clang-tidy finds nothing: ${1:-default}" without_count \
        clang-tidy --quiet --config-file=tests/.clang-tidy nbd.h -- \
        -x c -std=c99 -DNBD_IMPLEMENTATION $POSIX $1
}

# AI_PASSIVE: nbd.h looks whether <netdb.h>, which is not read, has it.
# shellcheck disable=SC2086
cpp_check() {
    check "cppcheck finds nothing: ${1:-default}" quiet \
        cppcheck -q --enable=warning,performance,portability --std=c99 --error-exitcode=1 \
        --suppressions-list=tests/cppcheck.txt --max-configs=1 $exhaustive $POSIX -DAI_PASSIVE=1 \
        $1 -I. $source
}

# every RULE PROGRAM FUNCTION: the function for each set of options.
every() {
    if ! has "$2"; then
        skip "$1 finds nothing" "$2 is not installed"
        return
    fi
    printf '%s\n' "$OPTIONS" | sed 1d >"$tmp/options"
    while read -r options; do
        "$3" "$options"
    done <"$tmp/options"
}

exhaustive=
if cppcheck --help 2>/dev/null | grep -q check-level; then
    exhaustive=--check-level=exhaustive
fi
every cppcheck cppcheck cpp_check
every clang-tidy clang-tidy tidy
if gcc --version 2>/dev/null | grep -q -i 'gcc\|free software'; then
    every 'gcc -fanalyzer' gcc analyse
else
    skip 'gcc -fanalyzer finds nothing' 'gcc is not installed'
fi

if has shellcheck; then
    git ls-files -co --exclude-standard '*.sh' .ci tests/run >"$tmp/scripts"
    # shellcheck disable=SC2046
    check 'shellcheck finds nothing in the scripts' shellcheck -x -S warning $(cat "$tmp/scripts")
else
    skip 'shellcheck finds nothing in the scripts' 'shellcheck is not installed'
fi
