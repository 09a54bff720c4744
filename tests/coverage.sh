#!/bin/sh
# limit: 1800
# Coverage of nbd.h by the tests that need no network: lines, branches and MC/DC, the
# union over all programs, and every miss.  tests/coverage.md explains the misses.
#
# Programs read their source from the standard input, so that static functions have the
# same name in all of them and their counts are added up.
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh

CLANG=${CLANG:-clang-19}
PROFDATA=${PROFDATA:-llvm-profdata-19}
build=build/coverage
# Atomic: clients in several threads must not lose counts.
flags='-std=c99 -g -O1 -fprofile-instr-generate -fprofile-update=atomic
    -fcoverage-mapping -fcoverage-mcdc'

rules='coverage_lines coverage_branches coverage_mcdc coverage_misses_are_explained
coverage_list_has_no_entry_without_a_miss'

for tool in "$CLANG" "$PROFDATA" "${LLVM_COV:-llvm-cov-19}" python3; do
    has "$tool" && continue
    for rule in $rules; do
        skip "$rule" "no $tool"
    done
    exit 0
done

# What is measured is a copy: an edit in the meantime would shift lines.
tree=$build/tree
rm -rf "$build"
mkdir -p "$tree/tests"
cp nbd.h "$tree"
cp tests/*.[ch] "$tree/tests"
cp -r tests/hostile tests/transports "$tree/tests"

# A program is a source with a main, named from the top directory without ".c".
# Left out is what takes minutes and repeats the sessions of the others, with each bit and
# each call wrong in turn: without them the figures can only be lower.
sources() {
    for source in tests/test_*.c tests/hostile/*.c; do
        case $source in */test_flips.c | */test_faults.c) continue ;; esac
        grep -q '^int main(' "$source" 2>/dev/null && echo "${source%.c}"
    done
}

# Builds and runs one program; its profile and its output lie in $build.
cat >"$build/one" <<'ONE'
program=../$(basename "$1")
tls=
case $1 in */test_tls | */test_tls_errors) tls=$mbedtls ;; esac
printf '#include "%s.c"\n' "$1" |
    $CLANG $flags -I. -Itests -x c - -o "$program" $tls 2>"$program.warnings" &&
    LLVM_PROFILE_FILE=$program.profraw timeout 600 "$program" >"$program.log" 2>&1 ||
    echo "$1" >>../failed
ONE

mbedtls=$(mbedtls_flags)
export CLANG flags mbedtls
sources >"$build/sources"
# What only a build with cuts has: lines of their refusals.
printf '#define NBD_MINIMAL\n#include "cuts.c"\n' >"$tree/tests/test_cuts_minimal.c"
printf '#define NBD_NO_%s\n' TLS EXTENDED_HEADERS BLOCK_STATUS >"$tree/tests/test_cuts_options.c"
echo '#include "cuts.c"' >>"$tree/tests/test_cuts_options.c"
printf 'tests/test_cuts_%s\n' minimal options >>"$build/sources"
(cd "$tree" && xargs -n 1 -P "${JOBS:-$(nproc)}" sh ../one) <"$build/sources"
if [ -s "$build/failed" ]; then
    fail coverage_programs_run "$(tr '\n' ' ' <"$build/failed")"
else
    ok coverage_programs_run
fi
check coverage_profiles_merge "$PROFDATA" merge -o "$build/all.profdata" "$build"/*.profraw

# Decisions with "&&" or "||" inside a call or behind "!" have no MC/DC in this compiler.
sed -n 's/.*nbd\.h:\([0-9]*\):.*unsupported MC\/DC.*/# no MC\/DC for nbd.h:\1/p' \
    "$build"/*.warnings | sort -u
top=$PWD
# shellcheck disable=SC2034,SC2046
(cd "$tree" && "$top/tests/coverage.py" ../all.profdata "$top/tests/coverage.md" \
    $(find .. -maxdepth 1 -name '*.profraw' | sed 's/\.profraw$//' | sort)) || failed=1
