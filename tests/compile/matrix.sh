#!/bin/sh
# limit: 1800
# nbd.h compiles without a warning, for every compiler, language and option.
. tests/lib.sh

OPTIONS="
$CUTS
-DNBD_RANGES=1
-DNBD_RANGES=8
-DNBD_RANGES=64
-DNBD_IOVECS=2
-DNBD_IOVECS=1024
-DNBD_POLL_BYTES=1
-DNBD_SEND_BUFFER=0
-DNBD_STAGE=64
-include assert.h -DNBD_ASSERT=assert
-DNBD_NO_DIAL -DNBD_NO_CONVENIENCE
-DNBD_NO_SOCKETS -DNBD_NO_CONVENIENCE -DNBD_NO_TEXT -DNBD_STATIC -DNBD_RANGES=1
-DNBD_NO_DIAL -DNBD_STATIC -DNBD_IOVECS=2 -DNBD_RANGES=8
"
POSIX=-D_POSIX_C_SOURCE=200112L

# The command that compiles language $1 with compiler family $2, or nothing.
compiler() {
    case "$1-$2" in
    c++*-gcc) has g++ && echo "g++ -x c++ -std=$1 $WARN" ;;
    c++*-clang) has clang++ && echo "clang++ -x c++ -std=$1 $WARN" ;;
    *) has "$2" && echo "$2 -std=$1 $WARN -Wstrict-prototypes -Wmissing-prototypes" ;;
    esac
}

# Every option alone and some together.
every_option() {
    printf %s "$OPTIONS" | while read -r options; do
        # The words of $compile and $options are separate arguments.
        # shellcheck disable=SC2086
        check "no warning: $1 $2 ${options:-default}" \
            $compile -O1 $POSIX $options -I. -c -o "$tmp/o" tests/compile/implement.c
        echo "$failed" >"$tmp/failed"
    done
    failed=$(cat "$tmp/failed")
}

# Files that include nbd.h in some special way; $1 language, $2 compiler.
every_include() {
    # shellcheck disable=SC2086
    for source in declare twice later static_init; do
        check "no warning: $1 $2 $source.c" \
            $compile -O2 $POSIX -I. -c -o "$tmp/o" "tests/compile/$source.c"
    done
    beside linux/nbd.h beside_linux "$1" "$2"
    beside libnbd.h beside_libnbd "$1" "$2"
}

# A file $2 that includes another header $1 before and after nbd.h.
beside() {
    if ! echo "#include <$1>" | "$4" -E -x c - >"$tmp/output" 2>&1; then
        skip "no warning: $3 $4 beside <$1>" "<$1> is not installed"
        return
    fi
    # shellcheck disable=SC2086
    check "no warning: $3 $4 behind <$1>" \
        $compile $POSIX -I. -c -o "$tmp/o" "tests/compile/$2.c"
    # shellcheck disable=SC2086
    check "no warning: $3 $4 before <$1>" \
        $compile $POSIX -DNBD_FIRST -I. -c -o "$tmp/o" "tests/compile/$2.c"
}

for family in gcc clang; do
    for language in c99 c11 c++11 c++17; do
        compile=$(compiler "$language" "$family")
        if [ -z "$compile" ]; then
            skip "no warning: $language $family" "$family is not installed for $language"
            continue
        fi
        every_option "$language" "$family"
        every_include "$language" "$family"
    done
done
