#!/bin/sh
# limit: 2400
# Every test program that needs no network, built again with each sanitizer and run; a line for
# each of them.  The fuzz targets replay their corpora: all memory of theirs is fresh from
# malloc, so msan and valgrind see every byte that leaves the client without having been set.
# Two at a time: JOBS of tests/run counts tests, not what they start.
#
#   tests/sanitizers.sh                   all
#   tests/sanitizers.sh KIND [PROGRAM]    one kind, one program
. tests/lib.sh

KINDS='asan-gcc asan-clang msan tsan valgrind O3-aliasing m32'
POISON='-O0 -gline-tables-only -fno-omit-frame-pointer -fno-sanitize-recover=all'

compiler_of() {
    case $1 in
    *-clang | msan | tsan) echo clang ;;
    *) echo gcc ;;
    esac
}

# What else a kind needs.
tool_of() {
    [ "$1" != valgrind ] || echo valgrind
}

# integer also finds what C defines, unsigned sums that wrap: nbd.h has none.
flags_of() {
    case $1 in
    asan-gcc) echo '-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all' ;;
    asan-clang) echo "$POISON -fsanitize=address,undefined,integer,implicit-conversion,nullability" \
        '-fsanitize-ignorelist=tests/sanitizers.ignore' ;;
    msan) echo "$POISON -fsanitize=memory -fsanitize-memory-track-origins" ;;
    tsan) echo '-O1 -gline-tables-only -fsanitize=thread' ;;
    valgrind) echo '-O1 -g' ;;
    O3-aliasing) echo '-O3 -g1 -Wall -Werror -fstrict-aliasing -Wstrict-aliasing' \
        '-fsanitize=alignment -fno-sanitize-recover=all' ;;
    # The headers of the kernel are not where -m32 looks for them.
    m32) echo '-O0 -g1 -m32 -fsanitize=undefined -fno-sanitize-recover=all' \
        "-isystem /usr/include/$(gcc -print-multiarch)" ;;
    esac
}

# Programs that take seconds when they are plain run the first of every so many cases: the
# others of their cases differ in the session that is played, and those all run in the programs
# that the sessions are from.
every_of() {
    case $2-$1 in
    test_flips-valgrind) echo 100 ;;
    test_steps-valgrind | test_faults-valgrind) echo 41 ;;
    test_transports-valgrind | test_tls-valgrind) echo 5 ;;
    test_tls_errors-valgrind) echo 3 ;;
    test_flips-*) echo 16 ;;
    test_steps-* | test_faults-*) echo 9 ;;
    *) echo 1 ;;
    esac
}

# run KIND ARGUMENT...  A calloc of the program's own stays what is called, also in valgrind.
run() {
    kind=$1
    shift
    case $kind in
    valgrind) valgrind -q --error-exitcode=99 --leak-check=full \
        --soname-synonyms=somalloc=nouserintercepts \
        --errors-for-leak-kinds=definite,possible "$tmp/program" "$@" ;;
    *) "$tmp/program" "$@" ;;
    esac
}

# source_of KIND PROGRAM.  mbedTLS is not instrumented for msan, and not there for m32.
source_of() {
    case $1-$2 in
    *-fuzz_*) echo "tests/fuzz/$2.c -DFUZZ_MAIN" ;;
    msan-* | m32-*) echo "tests/$2.c" ;;
    valgrind-test_tls_errors) echo "tests/$2.c -DERRORS_STRIDE=5000 $(mbedtls_flags)" ;;
    *-test_tls | *-test_tls_errors) echo "tests/$2.c $(mbedtls_flags)" ;;
    *) echo "tests/$2.c" ;;
    esac
}

# run_program KIND PROGRAM
run_program() {
    case $2 in
    fuzz_*)
        tests/fuzz/pack.py unpack "tests/fuzz/corpus/${2#fuzz_}" "$tmp/inputs" &&
            run "$1" "$tmp"/inputs/*
        ;;
    *) CHECK_EVERY=$(every_of "$1" "$2") run "$1" ;;
    esac
}

# What a sanitizer says is worth more than that a rule failed.
why() {
    grep -a -m 1 -E 'runtime error|SUMMARY|^==[0-9]*== [A-Z]|^FAIL|error:' "$tmp/output" ||
        tail -n 1 "$tmp/output"
}

one() {
    rule="$2 is clean: $1"
    # shellcheck disable=SC2046
    if ! $(compiler_of "$1") -std=c99 -I. $(flags_of "$1") -o "$tmp/program" $(source_of "$1" "$2") \
        -pthread >"$tmp/output" 2>&1; then
        fail "$rule" "does not compile: $(why)"
    elif ! run_program "$1" "$2" >"$tmp/output" 2>&1; then
        fail "$rule" "$(why)"
    else
        ok "$rule"
    fi
}

# Whether the machine can build and run a program of this kind at all.
works() {
    echo 'int main(void) { return 0; }' >"$tmp/empty.c"
    # shellcheck disable=SC2046
    $(compiler_of "$1") $(flags_of "$1") -o "$tmp/program" "$tmp/empty.c" >"$tmp/output" 2>&1 &&
        run "$1" >"$tmp/output" 2>&1
}

programs_of() {
    if [ "$1" = tsan ]; then
        echo test_threads
    else
        for source in tests/test_*.c tests/fuzz/fuzz_*.c; do
            basename "$source" .c
        done
    fi
}

# Without sockets not even the strictest and least exact levels of the warning find a thing;
# with them they mind the casts to struct sockaddr.
aliasing() {
    for level in 1 2; do
        check "the engine and URIs keep to strict aliasing at level $level" \
            gcc -std=c99 -O3 -Wall -Werror -Wstrict-aliasing=$level -DNBD_NO_SOCKETS -I. -c \
            -o "$tmp/o" tests/compile/implement.c
    done
}

# Pairs of kind and program.
pairs() {
    for kind in $1; do
        if works "$kind"; then
            programs_of "$kind" | sed "s/^/$kind /"
        else
            skip "test programs are clean: $kind" \
                "$(compiler_of "$kind") $(tool_of "$kind") cannot do it here" >&3
        fi
    done
}

if [ $# = 2 ]; then
    one "$1" "$2"
    exit
fi
exec 3>&1
aliasing
pairs "${1:-$KINDS}" | xargs -n 2 -P 2 "$0" || failed=1
