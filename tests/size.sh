#!/bin/sh
# What the implementation costs: code, stack, memory.
#   tests/size.sh           checks the limits
#   tests/size.sh table     prints the figures as Markdown, for "make size"
#   tests/size.sh native    prints those of $CC only
#   tests/size.sh arm       prints those of arm-none-eabi-gcc only
#   tests/size.sh readme    writes the figures into README.md; needs both compilers
. tests/lib.sh

implement=tests/compile/implement.c
flags='-std=c99 -Os -D_POSIX_C_SOURCE=200112L -I.'

# size_of TYPE: its size, read from the size of an array in an object file, so that
# it works for a cross compiler too.  $compiler compiles.
size_of() {
    printf '#include "nbd.h"\nconst char array[sizeof(%s)] = "";\n' "$1" >"$tmp/size.c"
    # shellcheck disable=SC2086
    $compiler $flags -c -o "$tmp/size.o" "$tmp/size.c" &&
        $nm -S "$tmp/size.o" | while read -r _ length _; do
            echo $((0x$length))
        done
}

# Bytes of code and constants of the implementation with options $1.
text_of() {
    # shellcheck disable=SC2086
    $compiler $flags $1 -c -o "$tmp/text.o" $implement &&
        size "$tmp/text.o" | awk 'NR == 2 { print $1 }'
}

# The largest frame of the implementation with options $1, and whose it is.
stack_of() {
    # shellcheck disable=SC2086
    (cd "$tmp" && $compiler $flags -I"$top" $1 -fstack-usage -c -o stack.o "$top/$implement") &&
        sort -t "$tab" -k 2 -n -r "$tmp/stack.su" |
        awk -F "$tab" 'NR == 1 { n = split($1, at, ":"); print $2 " " at[n] }'
}

name_of_compiler() {
    case "$($compiler --version)" in
    *clang*) family=clang ;;
    *) family=gcc ;;
    esac
    echo "$($compiler -dumpmachine), $family $($compiler -dumpfullversion -dumpversion), -Os"
}

row() {
    printf '| %-25s | %5s | %s |\n' "$1" "$(text_of "$2")" "$(stack_of "$2")"
}

# Of $compiler; the sets of options that need no operating system.
table() {
    printf '| %s | text | largest stack frame |\n|---|---:|---|\n' "$(name_of_compiler)"
    row 'engine' "$engine"
    row 'engine without texts' "$engine -DNBD_NO_TEXT"
    row 'engine, convenience' '-DNBD_NO_SOCKETS'
}

sockets() {
    row 'engine, sockets' '-DNBD_NO_DIAL -DNBD_NO_CONVENIENCE'
    row 'engine, sockets, dialling' '-DNBD_NO_CONVENIENCE'
    row 'all of it' ''
}

memory() {
    printf '| %-25s | %5s | |\n' 'sizeof(nbd_client)' "$(size_of nbd_client)"
    printf '| %-25s | %5s | |\n' 'sizeof(nbd_slot)' "$(size_of nbd_slot)"
}

native() {
    compiler=$CC
    nm='nm'
    table
    sockets
    memory
}

arm() {
    compiler="$arm_gcc -mcpu=cortex-m3 -mthumb"
    nm=arm-none-eabi-nm
    table
    memory
}

# README.md with the tables of its chapter "Size" replaced by those in file $1.
with_tables() {
    awk -v new="$1" '
        /^## / { here = $0 == "## Size" }
        here && /^\|/ && !done { while ((getline line <new) > 0) print line; done = 1 }
        here && /^\|/ { inside = 1; next }
        inside && /^$/ { next }
        inside { inside = 0; print "" }
        { print }
    ' README.md
}

write_readme() {
    { native && echo && arm; } >"$tmp/tables" && with_tables "$tmp/tables" >"$tmp/readme" &&
        cat "$tmp/readme" >README.md
}

# at_most LIMIT SIZE
at_most() {
    echo "error: $2 bytes, limit $1"
    [ -n "$2" ] && [ "$2" -le "$1" ]
}

# limits TARGET CLIENT SLOT
limits() {
    check "nbd_client takes at most $2 bytes: $1" at_most "$2" "$(size_of nbd_client)"
    check "nbd_slot takes at most $3 bytes: $1" at_most "$3" "$(size_of nbd_slot)"
}

# The options that a firmware uses.
engine='-DNBD_NO_SOCKETS -DNBD_NO_CONVENIENCE'
top=$PWD
tab=$(printf '\t')
compiler=$CC
nm='nm'
arm_gcc=arm-none-eabi-gcc

case "$1" in
table)
    native
    has $arm_gcc && echo && arm
    exit
    ;;
native | arm)
    $1
    exit
    ;;
readme)
    has $arm_gcc || fail 'tests/size.sh readme' "$arm_gcc is not installed"
    [ "$failed" = 0 ] && write_readme
    exit
    ;;
esac
if ! has nm; then
    skip 'the sizes are within their limits' 'nm is not installed'
    exit
fi
case "$(size_of 'void *')" in
8) limits '64 bits' 384 112 ;;
4) limits '32 bits' 288 96 ;;
esac
if echo 'int main(void) { return 0; }' | gcc -m32 -x c -o "$tmp/empty" - >"$tmp/output" 2>&1; then
    compiler='gcc -m32 -isystem /usr/include/x86_64-linux-gnu'
    limits '32 bits, -m32' 288 96
else
    skip 'the sizes on 32 bits are within their limits' 'gcc -m32 cannot link a program'
fi
