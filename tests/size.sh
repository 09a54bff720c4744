#!/bin/sh
# What the implementation costs: code, stack, memory.
#   tests/size.sh           checks the limits
#   tests/size.sh table     prints all figures as Markdown, for "make size"
#   tests/size.sh native    prints those of $CC only
#   tests/size.sh arm       prints those of arm-none-eabi-gcc only
#   tests/size.sh cuts      prints what each macro saves with arm-none-eabi-gcc
#   tests/size.sh functions [-D...]   shows where the bytes are in the engine for
#                           arm-none-eabi-gcc: by function as linked, by function as
#                           written (what is inlined counts where it stands), in texts;
#                           and what each public function takes of the stack
#   tests/size.sh readme    writes the figures into README.md; needs both compilers
# shellcheck disable=SC2016 # back-ticks are Markdown here
. tests/lib.sh

implement=$PWD/tests/compile/implement.c
stack=$PWD/tests/stack.py
flags="-std=c99 -Os -fno-pic -D_POSIX_C_SOURCE=200112L -I$PWD"

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

# build OPTIONS: the implementation with them, as $tmp/text.o, and its call graph.
build() {
    rm -f "$tmp"/text.*
    # shellcheck disable=SC2086
    (cd "$tmp" && $compiler $flags $graph $1 -c -o text.o "$implement")
}

# Column $1 of what size(1) says: 1 code and constants, 2 data, 3 bss.
column() {
    size "$tmp/text.o" | awk -v column="$1" 'NR == 2 { print $column }'
}

# Only gcc writes its call graph.
family() {
    case "$($compiler --version)" in
    *clang*) echo clang ;;
    *) echo gcc ;;
    esac
}

deepest() {
    if [ "$graph" ]; then
        "$stack" "$tmp/text.ci"
    else
        echo "not known${tab}only gcc tells"
    fi
}

row() {
    printf '| %-40s | %5s | %5s | %s |\n' "$@"
}

# profile NAME OPTIONS [LIMIT STACK-LIMIT]
profile() {
    build "$2"
    row "$1" "$(column 1)" "$3" ''
    deepest | {
        IFS=$tab read -r bytes way
        row "$1: deepest stack" "$bytes" "$4" "$way"
    }
    data=$((data + $(column 2) + $(column 3)))
}

# memory [LIMIT]: behind all profiles.
memory() {
    client=$(size_of nbd_client)
    slot=$(size_of nbd_slot)
    most='288 96'
    [ "$(size_of 'void *')" = 4 ] || most='384 112'
    row 'data and bss of all these' "$data" 0 ''
    row 'sizeof(nbd_client)' "$client" "${most% *}" ''
    row 'sizeof(nbd_slot)' "$slot" "${most#* }" ''
    row 'client, 4 slots, least buffer' $((client + 4 * slot + 256)) "$1" ''
}

# head_of_table FLAGS
head_of_table() {
    version=$($compiler -dumpfullversion -dumpversion)
    printf '| %s | bytes | limit | by way of |\n|---|---:|---:|---|\n' \
        "$($compiler -dumpmachine), $(family) $version, $1"
}

use_native() {
    compiler=$CC
    nm='nm'
    graph=
    [ "$(family)" = clang ] || graph=$callgraph
}

use_arm() {
    compiler="$arm_gcc -mthumb -mcpu=cortex-m3"
    nm=arm-none-eabi-nm
    graph=$callgraph
}

native() {
    use_native
    data=0
    head_of_table '-Os'
    profile 'engine' "$engine"
    profile 'engine without texts' "$engine -DNBD_NO_TEXT"
    profile 'engine, convenience' '-DNBD_NO_SOCKETS'
    profile 'engine, sockets' '-DNBD_NO_DIAL -DNBD_NO_CONVENIENCE'
    profile 'engine, sockets, dialling' '-DNBD_NO_CONVENIENCE'
    profile 'all of it' ''
    memory ''
}

# Its limits are the budgets of a firmware.
arm() {
    use_arm
    data=0
    head_of_table '-Os -mthumb -mcpu=cortex-m3'
    profile 'engine' "$engine" 12288 512
    profile 'engine without texts' "$engine -DNBD_NO_TEXT" 9216 512
    ! known NBD_MINIMAL || profile 'minimal engine' "$engine -DNBD_MINIMAL" 5120 512
    profile 'engine, convenience' '-DNBD_NO_SOCKETS' '' ''
    memory 1024
}

# known MACRO: nbd.h looks at it.
known() {
    grep -q "^#.*\b$1\b" nbd.h
}

# cut_row MACRO WHAT: what the engine with it saves, where nbd.h knows it.
cut_row() {
    if known "$1"; then
        build "$engine -D$1"
        printf '| `%s` | %s | %s |\n' "$1" "$2" $((whole - $(column 1)))
    fi
}

cuts() {
    use_arm
    build "$engine"
    whole=$(column 1)
    printf '| macro | what goes | bytes saved |\n|---|---|---:|\n'
    cut_row NBD_NO_TEXT 'the texts of `nbd_strerror` and `nbd_detail`'
    cut_row NBD_NO_NEGOTIATE 'options driven by you: `nbd_negotiate`, LIST, INFO'
    cut_row NBD_NO_BLOCK_STATUS 'metadata contexts and block status'
    cut_row NBD_NO_EXTENDED_HEADERS 'extended headers: lengths above 32 bits'
    cut_row NBD_NO_OLDSTYLE 'oldstyle servers'
    cut_row NBD_NO_TLS 'STARTTLS'
    cut_row NBD_NO_RAW 'raw commands and unchecked ones'
    cut_row NBD_NO_SPARSE 'holes of a read told as events'
    cut_row NBD_NO_IOV 'requests in pieces'
    cut_row NBD_NO_MESSAGES 'texts of the server'
    cut_row NBD_NO_GO 'GO, and with it block sizes'
    cut_row NBD_NO_COUNTERS 'counters but `in_flight`'
    cut_row NBD_NO_EXTRAS 'all but reading, writing and flushing'
    cut_row NBD_NO_ADVICE '`nbd_allows`, `nbd_phase`'
    cut_row NBD_NO_POLL '`nbd_poll`: you move the bytes'
    cut_row NBD_MINIMAL 'all of these'
}

# Code of $tmp/text.o by the function that it was written in.
by_source() {
    length=$(size -A "$tmp/text.o" | awk '$1 == ".text" { print $2 }')
    seq 0 2 $((length - 2)) | awk '{ printf "0x%x\n", $1 }' |
        arm-none-eabi-addr2line -f -e "$tmp/text.o" |
        awk 'NR % 2 { bytes[$0] += 2 } END { for (name in bytes) print bytes[name], name }' |
        sort -rn
}

functions() {
    use_arm
    build "-g $engine $*" || exit
    echo "== as linked"
    $nm -S --size-sort -r "$tmp/text.o" | awk '$3 ~ /[tTrRdDbB]/ { print $2, $3, $4 }' |
        while read -r length kind name; do
            echo "$((0x$length)) $name$([ "$kind" != r ] || echo ' (constants)')"
        done
    echo "== as written"
    by_source
    echo "== stack of each public function"
    "$stack" --each "$tmp/text.ci"
    echo "== sections"
    size -A "$tmp/text.o" | grep -E '^\.(text|rodata|data|bss)'
    echo "$(column 1) all"
    undefined | tr '\n' ' '
    echo 'are called'
}

# README.md with table number $1 of its chapter "Size" replaced by file $2.
with_table() {
    awk -v wanted="$1" -v new="$2" '
        /^## / { here = $0 == "## Size" }
        !/^\|/ || !here { inside = 0; print; next }
        !inside { n++; inside = 1; if (n == wanted) while ((getline line <new) > 0) print line }
        n != wanted { print }
    ' README.md
}

write_readme() {
    number=0
    for part in native arm cuts; do
        number=$((number + 1))
        $part >"$tmp/part" && with_table $number "$tmp/part" >"$tmp/readme" &&
            cat "$tmp/readme" >README.md || return 1
    done
}

# at_most LIMIT SIZE
at_most() {
    echo "error: $2 bytes, limit $1"
    [ -n "$2" ] && [ "$2" -le "$1" ]
}

# Checks each row of table $2 that has a limit.
limits() {
    table_rows "$2" | tr '\t' '|' >"$tmp/rows"
    while IFS='|' read -r name bytes limit _; do
        [ -z "$limit" ] ||
            check "$name takes at most $limit bytes: $1" at_most "$limit" "$bytes"
    done <"$tmp/rows"
}

undefined() {
    $nm -u "$tmp/text.o" | sed 's/.* //'
}

# No helper of the compiler for division of 64 bits or floating point.
calls_only_the_list() {
    build "$1" &&
        undefined | grep -v -x -E 'memcpy|memmove|memset|memcmp|strlen' | nothing "$1 calls"
}

# Only what depends on the width of a pointer.
memory_32() {
    compiler='gcc -m32 -isystem /usr/include/x86_64-linux-gnu'
    nm='nm'
    data=0
    head_of_table -m32
    memory ''
}

# check_table TARGET: the function of that name prints it.
check_table() {
    $1 >"$tmp/table"
    limits "$1" "$tmp/table"
}

check_calls() {
    for options in "$@"; do
        for optimise in -Os -O2; do
            check "calls five functions of the C library and no helper: $optimise$options" \
                calls_only_the_list "$engine $optimise$options"
        done
    done
}

# graph_of C: the call graph of this text.
graph_of() {
    printf '%s\n' "$1" >"$tmp/graph.c"
    # shellcheck disable=SC2086
    (cd "$tmp" && $arm_gcc -O1 -fno-inline $callgraph -c graph.c)
}

# The walk itself: what it must not overlook.
check_walk() {
    graph_of 'void f(char *); void g(int n); void h(int n);
        void h(int n) { if (n) g(n - 1); f(0); } void g(int n) { char a[9]; f(a); h(n); f(a); }'
    refuse 'a recursion has no deepest stack' 'recursion: g, h, g' "$stack" "$tmp/graph.ci"
    graph_of 'void f(char *); void g(int n); void g(int n) { char a[n]; f(a); }'
    refuse 'a frame without a bound has no deepest stack' 'g has a frame' "$stack" "$tmp/graph.ci"
}

# The options that a firmware uses.
engine='-DNBD_NO_SOCKETS -DNBD_NO_CONVENIENCE'
callgraph='-fstack-usage -fcallgraph-info=su'
tab=$(printf '\t')
arm_gcc=arm-none-eabi-gcc

case "$1" in
table)
    native
    has $arm_gcc && echo && arm && echo && cuts
    exit
    ;;
functions)
    "$@"
    exit
    ;;
native | arm | cuts)
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
check_table native
if echo 'int main(void) { return 0; }' | gcc -m32 -x c -o "$tmp/empty" - >"$tmp/output" 2>&1; then
    check_table memory_32
else
    skip 'the sizes on 32 bits are within their limits' 'gcc -m32 cannot link a program'
fi
if has $arm_gcc; then
    check_walk
    check_table arm
    check_calls '' ' -DNBD_NO_TEXT' ' -DNBD_MINIMAL'
else
    skip 'the sizes on a Cortex-M3 are within their limits' "$arm_gcc is not installed"
fi
