#!/bin/sh
# nbd.h compiles in strict mode, without a C library, with other C libraries and
# for 32 bits.
# The words of $C99 and $ENGINE are separate arguments.
# shellcheck disable=SC2086
. tests/lib.sh

C99="-std=c99 $WARN -I."
ENGINE='-DNBD_NO_SOCKETS -DNBD_NO_CONVENIENCE'
POSIX=-D_POSIX_C_SOURCE=200112L
implement=tests/compile/implement.c

check 'strict C99 without a feature macro compiles with NBD_NO_DIAL' \
    $CC $C99 -DNBD_NO_DIAL -c -o "$tmp/o" $implement
refuse 'strict C99 without a feature macro says what to define' 'error.*NBD_NO_DIAL' \
    $CC $C99 -c -o "$tmp/o" $implement
refuse 'strict C99 without a feature macro names the feature macro' 'error.*_POSIX_C_SOURCE' \
    $CC $C99 -c -o "$tmp/o" $implement
check 'the engine compiles freestanding' \
    $CC $C99 -ffreestanding $ENGINE -c -o "$tmp/o" $implement

# other NAME COMMAND FLAGS...: compiles all of nbd.h with another compiler, and runs it,
# under $emulator if this kernel cannot.
other() {
    name=$1
    compiler=$2
    shift 2
    if ! has "$compiler"; then
        skip "compiles and runs: $name" "$compiler is not installed"
    elif ! echo 'int main(void) { return 0; }' >"$tmp/empty.c" ||
        ! "$compiler" "$@" -o "$tmp/empty" "$tmp/empty.c" >"$tmp/output" 2>&1; then
        skip "compiles and runs: $name" "$compiler $* cannot link a program"
    else
        check "compiles: $name" "$compiler" -std=c99 -Wall -Werror $POSIX "$@" -I. \
            -o "$tmp/abi" tests/compile/abi.c $implement
        run_other
    fi
}

run_other() {
    if "$tmp/empty" 2>"$tmp/output"; then
        check "runs: $name" "$tmp/abi"
    elif has "$emulator"; then
        check "runs: $name" "$emulator" "$tmp/abi"
    else
        skip "runs: $name" "neither this kernel nor $emulator runs it"
    fi
}

emulator=none
other musl musl-gcc
other tcc tcc
# Where several cross compilers are installed the kernel's headers are not in the
# place where -m32 looks for them.
emulator=qemu-i386
other 32-bit gcc -m32 -static -isystem "/usr/include/$(gcc -print-multiarch 2>/dev/null)"
