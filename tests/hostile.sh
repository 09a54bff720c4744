#!/bin/sh
# tests/hostile/README.md is complete and true: each test that it names exists, and each
# rule of the programs there stands in it.  And a 32-bit client takes the same blows.
# limit: 900
. tests/lib.sh

readme=tests/hostile/README.md
tab=$(printf '\t')

# A row names its tests, or says with a dash why there are none.
full_rows() {
    [ -s "$tmp/rows" ] || { echo 'error: there is no row'; return 1; }
    awk -F "$tab" '$1 !~ /[a-z]/ || $2 !~ /[a-z]/ ||
        ($3 !~ /^`[^`]+`(, `[^`]+`)*$/ && !($3 == "" && $2 ~ /^— /))' "$tmp/rows" |
        nothing 'row is not full'
}

# Where program or script $1 has its text.
source_of() {
    case $1 in
    hostile_*) echo "tests/hostile/${1#hostile_}.c" ;;
    *.sh) echo "tests/$1" ;;
    *) echo "tests/$1.c" ;;
    esac
}

# Rules of a program: names of functions in a table or a call, which the compiler spells out,
# or the first string of a row.  Rules of a script: those it checks.
rules_of() {
    case $1 in
    *.sh) sed -n "s/^ *check ['\"]\([^'\"]*\)['\"].*/\1/p" "$(source_of "$1")" | sed 's/: \$.*//' ;;
    *)
        $CC -E -P -I. "$(source_of "$1")" | tr '\n' ' ' |
            grep -o '\("\([a-z_0-9]*\)" *, *\2\b\|{ *"[a-z_0-9]*"\)' | cut -d '"' -f 2
        ;;
    esac
}

existing() {
    cut -d ' ' -f 1 "$tmp/named" | sort -u | while read -r name; do
        rules_of "$name" | sed "s/^/$name /"
    done | sort -u
}

tests_exist() {
    comm -23 "$tmp/named" "$tmp/existing" | nothing 'no test'
}

# What the programs of tests/hostile check, as they call it.
every_rule_has_a_row() {
    for source in tests/hostile/*.c; do
        name=hostile_$(basename "$source" .c)
        sed -n "s/^ *\(RULE\|CHECK_CASE\)(\([a-z_0-9]*\));/$name \2/p" "$source"
    done | sort -u >"$tmp/programs"
    [ -s "$tmp/programs" ] || { echo 'error: there is no rule'; return 1; }
    comm -13 "$tmp/named" "$tmp/programs" | nothing 'no row for'
}

# Where 64-bit sums and large sizes matter most.
on_32_bits() {
    "$tmp/uri" &&
        "$tmp/status" count_of_extents_is_theirs_or_ends_it extents_follow_each_other_or_end_it &&
        "$tmp/replies" chunk_of_an_impossible_length_ends_it &&
        "$tmp/reads" content_lies_inside_its_request_or_ends_it
}

compile_32_bits() {
    for name in uri status replies reads; do
        # Where several cross compilers are installed the kernel's headers are elsewhere.
        gcc -std=c99 -O1 -m32 -static -isystem "/usr/include/$(gcc -print-multiarch)" -I. \
            -o "$tmp/$name" "tests/hostile/$name.c" || return 1
    done
}

table_rows "$readme" >"$tmp/rows"
cut -f 3 "$tmp/rows" | grep -o '`[^`]*`' | tr -d '`' | sort -u >"$tmp/named"
existing >"$tmp/existing"
check 'no row of the hostile cases is empty' full_rows
check 'each test of the hostile cases exists' tests_exist
check 'each hostile rule stands in the table' every_rule_has_a_row

echo 'int main(void) { return 0; }' >"$tmp/empty.c"
if gcc -m32 -static -o "$tmp/empty" "$tmp/empty.c" 2>/dev/null && "$tmp/empty" 2>/dev/null &&
    compile_32_bits >"$tmp/output" 2>&1; then
    check 'the hostile servers fail on 32 bits as on 64' on_32_bits
else
    skip 'the hostile servers fail on 32 bits as on 64' 'no 32-bit program can be made and run here'
fi
