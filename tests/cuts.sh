#!/bin/sh
# A session works with each macro that leaves something out, what is left out is refused, and
# the proof of a read holds: tests/cuts.c, compiled with each line of CUTS.
# limit: 600
. tests/lib.sh

# sessions OPTIONS: compiles and runs; prints the line of the first rule that fails.
sessions() {
    # shellcheck disable=SC2086 # options are words
    $CC -std=c99 $WARN -O0 -fsanitize=address,undefined -fno-sanitize-recover=all \
        -I. $1 -o "$tmp/cuts" tests/cuts.c && "$tmp/cuts" >"$tmp/told" && return
    echo "error: $(grep -m 1 FAIL "$tmp/told")"
    return 1
}

IFS='
'
for options in '' $CUTS; do
    IFS=' '
    check "a session works with $options" sessions "$options"
done
