#!/bin/sh
# limit: 300
# The inputs that the fuzzers found worth keeping, and those that once crashed something, break
# no rule of their target (tests/fuzz).  Finding new ones: make fuzz.
. tests/lib.sh

if ! has python3; then
    skip 'the corpus of each fuzz target breaks no rule' 'python3 is not installed'
    exit
fi

# Without sanitizers, on a compiler that has none, the rules of the targets are still checked.
sanitize='-fsanitize=address,undefined -fno-sanitize-recover=all'
echo 'int main(void) { return 0; }' >"$tmp/empty.c"
# shellcheck disable=SC2086
$CC $sanitize -o "$tmp/empty" "$tmp/empty.c" >"$tmp/output" 2>&1 && "$tmp/empty" || sanitize=

# replay TARGET: a single program runs every input.
replay() {
    # shellcheck disable=SC2086
    $CC -std=c99 $WARN -O1 -g1 $sanitize -DFUZZ_MAIN -I. -o "$tmp/$1" "tests/fuzz/fuzz_$1.c" &&
        tests/fuzz/pack.py unpack "tests/fuzz/corpus/$1" "$tmp/inputs-$1" &&
        find "$tmp/inputs-$1" -type f -exec "$tmp/$1" {} +
}

for target in engine uri status; do
    check "the corpus of the fuzz target $target breaks no rule" replay $target
done
