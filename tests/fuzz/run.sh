#!/bin/sh
# Fuzzes every target with libFuzzer and AFL++, both at once, one target after the other.
#
#   tests/fuzz/run.sh SECONDS [TARGET...]    make fuzz, make fuzz-long
#
# Starts from the inputs in tests/fuzz/corpus/TARGET.  All that comes out, what is found
# new too, goes to build/fuzz/TARGET-FUZZER, or FUZZ_OUT/TARGET-FUZZER.  A crash, a leak, or
# an input that takes FUZZ_TIMEOUT seconds is a failure, and its input is kept there.
# FUZZ_OUT/pids holds the fuzzers that run, for those who want to pause them.
cd "$(dirname "$0")/../.." || exit 1
seconds=${1:?seconds}
shift
out=${FUZZ_OUT:-build/fuzz}
limit=${FUZZ_TIMEOUT:-20}
flags='-std=c99 -g -O1 -I. -fsanitize=fuzzer -fno-sanitize-recover=all'
failed=0

fail() {
    echo "FAIL $1: $2"
    failed=1
}

# need RULE PROGRAM: what is not there is left out by name, but not in CI.
need() {
    command -v "$2" >/dev/null 2>&1 && return
    if [ "$CI" = true ]; then
        fail "$1" "$2 is not installed"
    else
        echo "skip $1: $2 is not installed"
    fi
    return 1
}

# The driver of AFL++ that -fsanitize=fuzzer links keeps one process and shares memory.
build() {
    # shellcheck disable=SC2086
    case $2 in
    libfuzzer) clang $flags -fsanitize=address,undefined -o "$program" "tests/fuzz/fuzz_$1.c" ;;
    afl) AFL_QUIET=1 AFL_USE_ASAN=1 AFL_USE_UBSAN=1 \
        afl-clang-fast $flags -o "$program" "tests/fuzz/fuzz_$1.c" ;;
    esac
}

# run TARGET FUZZER, with the words that the target likes, if it has any.
run() {
    longest=600
    [ "$1" != engine ] || longest=2000
    words=tests/fuzz/$1.dict
    [ -f "$words" ] || words=
    case $2 in
    libfuzzer) exec "$program" -max_len=$longest -timeout="$limit" -report_slow_units=$((2 * limit)) \
        -print_final_stats=1 \
        -max_total_time="$seconds" -artifact_prefix="$dir/crashes/" ${words:+-dict="$words"} \
        "$dir/corpus" "$dir/seeds" ;;
    afl) exec env AFL_NO_UI=1 AFL_NO_AFFINITY=1 AFL_SKIP_CPUFREQ=1 AFL_NO_COLOR=1 \
        AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1 \
        afl-fuzz -i "$dir/seeds" -o "$dir/out" -G $longest -t "$((limit * 1000))" \
        -V "$seconds" ${words:+-x "$words"} -- "$program" ;;
    esac
}

# start TARGET FUZZER: leaves the process in $started, or nothing.
start() {
    dir=$out/$1-$2
    program=$dir/fuzz_$1
    started=
    rm -rf "$dir"
    mkdir -p "$dir/corpus" "$dir/crashes"
    if ! build "$1" "$2" >"$dir/log" 2>&1; then
        fail "$1 $2" "does not compile: see $dir/log"
    elif tests/fuzz/pack.py unpack "tests/fuzz/corpus/$1" "$dir/seeds"; then
        run "$1" "$2" >"$dir/log" 2>&1 </dev/null &
        started=$!
        echo "$started" >>"$out/pids"
    fi
}

# What AFL++ found is looked at again by the other build, which sees leaks too.
replay() {
    other=$out/$1-libfuzzer/fuzz_$1
    [ ! -x "$other" ] || "$other" -runs=0 -timeout="$limit" -artifact_prefix="$dir/crashes/" \
        "$dir/out/default/queue" >"$dir/log.replay" 2>&1
}

# Sets $runs and $new, and $status if something is wrong.
results() {
    stats=$dir/out/default/fuzzer_stats
    if [ "$2" = libfuzzer ]; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$dir/log")
        new=$(find "$dir/corpus" -type f | wc -l)
    elif [ -f "$stats" ]; then
        runs=$(sed -n 's/^execs_done *: *//p' "$stats")
        new=$(sed -n 's/^corpus_found *: *//p' "$stats")
        find "$dir/out/default/crashes" "$dir/out/default/hangs" -name 'id:*' \
            -exec cp -t "$dir/crashes" {} +
        replay "$1" || status=$?
    fi
    [ "$(find "$dir/crashes" -type f | wc -l)" = 0 ] || status=1
    [ "${runs:-0}" -gt 0 ] || status=1
}

# finish TARGET FUZZER PROCESS
finish() {
    [ -n "$3" ] || return
    dir=$out/$1-$2
    status=0 runs='' new=''
    wait "$3" || status=$?
    results "$1" "$2"
    if [ "$status" = 0 ]; then
        echo "ok $1 $2: $seconds s, $runs executions, $new new inputs"
    else
        fail "$1 $2" "exit $status, ${runs:-no} executions: see $dir/log and $dir/crashes"
    fi
}

fuzz() {
    libfuzzer='' afl=''
    : >"$out/pids"
    if need "$1 libfuzzer" clang; then
        start "$1" libfuzzer
        libfuzzer=$started
    fi
    if need "$1 afl" afl-fuzz; then
        start "$1" afl
        afl=$started
    fi
    finish "$1" libfuzzer "$libfuzzer"
    finish "$1" afl "$afl"
}

stop_all() {
    # shellcheck disable=SC2046
    kill $(cat "$out/pids") 2>/dev/null
    exit 1
}
trap stop_all HUP INT TERM

mkdir -p "$out"
[ $# -gt 0 ] || set -- engine uri status
for target in "$@"; do
    fuzz "$target"
done
[ "$failed" = 0 ]
