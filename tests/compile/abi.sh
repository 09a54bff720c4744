#!/bin/sh
# A file with other layout macros than the implementation is told so at run time.
. tests/lib.sh

# build NAME CALLER-OPTION IMPLEMENTATION-OPTION
build() {
    flags='-std=c99 -Wall -Werror -D_POSIX_C_SOURCE=200112L -I.'
    # shellcheck disable=SC2086
    $CC $flags $2 -c -o "$tmp/caller.o" tests/compile/abi.c &&
        $CC $flags $3 -c -o "$tmp/implement.o" tests/compile/implement.c &&
        $CC -o "$tmp/$1" "$tmp/caller.o" "$tmp/implement.o"
}

# status NUMBER COMMAND: the command exits with this status.
status() {
    "$2"
    [ $? = "$1" ]
}

check 'files with the same NBD_RANGES link' build same -DNBD_RANGES=8 -DNBD_RANGES=8
check 'nbd_init takes a client of the same NBD_RANGES' status 0 "$tmp/same"
check 'files with more NBD_RANGES than the implementation link' build more -DNBD_RANGES=8 -DNBD_RANGES=4
check 'nbd_init refuses a slot that is too large with NBD_ERR_ABI' status 3 "$tmp/more"
check 'files with fewer NBD_RANGES than the implementation link' build fewer -DNBD_RANGES=1 -DNBD_RANGES=4
check 'nbd_init refuses a slot that is too small with NBD_ERR_ABI' status 3 "$tmp/fewer"
