#!/bin/sh
# The statistics of the benchmarks; nothing is measured.
. tests/lib.sh

if has python3; then
    python3 -B tests/bench_stats.py || failed=1
else
    skip 'the statistics of the benchmarks' 'python3 is not installed'
fi
