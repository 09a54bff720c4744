"""Statistics and judgement of the benchmarks against values worked out by hand."""
import pathlib
import sys
import tempfile

sys.path.insert(0, "bench")
import bars  # noqa: E402
import cells  # noqa: E402
import counts  # noqa: E402
import measure  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402

failed = False


def same(rule, found, wanted):
    global failed
    if found == wanted:
        print(f"ok {rule}")
    else:
        failed = True
        print(f"FAIL {rule}: {found!r}, not {wanted!r}")


def runs(metric, *values):
    return [None if value is None else {metric: value} for value in values]


# Of 11 fair coins at most 1 is heads in 12 of 2048 throws, at most 2 in 67 (3.3 %).
def statistics():
    same("median: odd count", measure.median([9, 1, 5]), 5)
    same("median: even count, mean of the middle two", measure.median([9, 1, 5, 6]), 5.5)
    same("interval: tail of the coin", measure.tail(11, 1), 12 / 2048)
    same("interval: rank of 5, 8, 9, 11, 12, 17 values",
         [measure.rank(n) for n in (5, 8, 9, 11, 12, 17)], [1, 1, 2, 2, 3, 5])
    same("interval: 11 values cover 98.8 %", measure.coverage(11, 2), 1 - 24 / 2048)
    same("interval: 5 values cover 93.75 %", measure.coverage(5, 1), 0.9375)
    same("interval: 2nd and 10th of 11 values, whatever their order",
         measure.summary([11, 3, 1, 8, 2, 7, 5, 6, 4, 10, 9]),
         measure.Summary(11, 6, 2, 10, 1, 11, 1 - 24 / 2048))
    same("interval: of 3 values it is their range",
         measure.summary([3, 1, 2]), measure.Summary(3, 2, 1, 3, 1, 3, 0.75))
    same("geometric mean: 1, 2 and 4 give 2",
         round(measure.geometric_mean([1, 2, 4]), 12), 2)


def pairs():
    result = {"ours": runs("ops_s", 6, 8, None, 9), "libnbd": runs("ops_s", 3, 2, 5, None)}
    same("ratios: round by round, a failed run takes its pair away",
         measure.ratios(result, "ops_s", "ours", "libnbd"), [2, 4])
    same("ratios: a program that is not there gives none",
         measure.ratios(result, "ops_s", "ours", "floor"), [])
    same("parse: numbers of key=value only",
         measure.parse("ops_s=5e3 segs_op=- mode=read loose 7"), {"ops_s": 5000.0})


def rounds():
    order = []

    def subject(name):
        return lambda number: order.append((number, name))

    groups = {"one": {name: subject("1" + name) for name in "ABC"},
              "two": {name: subject("2" + name) for name in "AB"}}
    results = measure.interleave(groups, 2)
    same("rounds: each visits all groups, the first program changes",
         [name for _, name in order],
         ["1A", "1B", "1C", "2A", "2B", "1B", "1C", "1A", "2B", "2A"])
    same("rounds: a failed run keeps its place", results["one"]["B"], [None, None])


CELL = cells.Cell(cells.UNIX, "read", 4096, 64)
OTHER = cells.Cell(cells.TCP, "read", 4096, 64)
BAR = bars.Bar("faster", 2.0, "ops_s", "ours", "libnbd", lambda key: isinstance(key, cells.Cell))


def cell(*ours):
    return {"ours": runs("ops_s", *ours), "libnbd": runs("ops_s", *[100] * len(ours))}


def judged(results):
    verdict = BAR.judge(results)
    return verdict.word, verdict.cells


def judgement():
    same("bar: a median that reaches it passes", judged({CELL: cell(200, 200, 200)}),
         ("pass", "1 of 1"))
    same("bar: an interval that reaches it minus 3 % passes", judged({CELL: cell(150, 160, 194)}),
         ("pass (interval)", "1 of 1"))
    same("bar: an interval that ends below that misses", judged({CELL: cell(150, 160, 193)}),
         ("MISS", "0 of 1"))
    # Of 11 pairs the 10th is the end of the interval: one lucky pair does not pass.
    same("bar: the best of 11 pairs alone does not pass it",
         judged({CELL: cell(*[150] * 10, 250)}), ("MISS", "0 of 1"))
    same("bar: one cell that misses is a miss",
         judged({CELL: cell(300, 300, 300), OTHER: cell(100, 100, 100)}), ("MISS", "1 of 2"))
    same("bar: a cell without a pair is not passed",
         judged({CELL: cell(300, 300, 300), OTHER: cell(None, None)}), ("not measured", "1 of 2"))
    same("bar: no cell, no pass", judged({}), ("not measured", "0 of 0"))
    worst = BAR.judge({CELL: cell(300, 300, 300), OTHER: cell(210, 210, 210)})
    same("bar: the worst cell is shown", (worst.figure, worst.where), ("2.10", str(OTHER)))


def exact():
    count = bars.Count("calls", 0.2, "calls read ours")
    same("count: at the bar passes", count.judge({"calls read ours": 0.2}).word, "pass")
    same("count: no slack", count.judge({"calls read ours": 0.201}).word, "MISS")
    same("count: not counted is no pass", count.judge({}).word, "not measured")
    real = {cells.Cell(cells.QEMU, "read", 4096, depth): cell(100 * depth) for depth in (1, 2, 4)}
    same("real servers: the geometric mean of all cells", bars.mean_verdict(real).figure, "2.00")


def expected():
    rates = dict(bars.EXPECTED_RATES)
    floor = {"floor": runs("ops_s", 140), "libnbd": runs("ops_s", 100)}
    near = bars.against_expected({CELL: floor}, {"calls read libnbd": 4.5})
    same("expected: within 15 % is not marked", [row[4] for row in near], ["", ""])
    floor["floor"] = runs("ops_s", 100 * rates[CELL] * 1.2)
    far = bars.against_expected({CELL: floor}, {"calls read libnbd": 4.7})
    same("expected: more than 15 % is marked", [bool(row[4]) for row in far], [True, True])


# A program that takes 100 us and makes 3 calls for each request, and 7 calls for the start.
FAKE = """while [ $# -gt 1 ]; do [ $1 = --count ] && n=$2; shift; done
[ -n "$TOLD" ] && echo "$((7 + 3 * n)) total" >"$TOLD"
echo ops_s=10000"""


def programs():
    with tempfile.TemporaryDirectory() as directory:
        log = measure.Log(pathlib.Path(directory) / "log")
        fake = pathlib.Path(directory) / "fake"
        fake.write_text(FAKE, encoding="utf-8")
        same("calibration: requests that take the time asked for",
             run.calibrated(["sh", fake], 1, 0.5, log), 5000)
        same("calibration: at least twice the depth",
             run.calibrated(["sh", fake], 4000, 0.5, log), 8000)
        same("count: the start cancels",
             counts.per_request(log, ["env", "TOLD={}"], ["sh", fake], r"(\d+) total", "x"), 3)
        lines = log.path.read_text(encoding="utf-8").splitlines()
        same("log: every run is in it, with its command",
             sum("fake" in line and "--count" in line for line in lines) == len(lines) > 4, True)


def logged():
    with tempfile.TemporaryDirectory() as directory:
        log = measure.Log(pathlib.Path(directory) / "log")
        measure.run(["echo", "ops_s=5"], log, calibration=True, cell=str(CELL), program="ours")
        log.add(missing=str(OTHER))
        for turn, status in enumerate((0, 1)):
            measure.run(["sh", "-c", f"echo ops_s=7; exit {status}"], log, round=turn,
                        cell=str(CELL), program="ours", requests=9)
        log.add(counts={"calls read ours": 0.1})
        found = report.Logged(log.path)
        runs_found = found.results[CELL]["ours"]
        same("log: a run's figures come back; a failed one as none; calibration is left out",
             (len(runs_found), runs_found[0]["ops_s"], runs_found[0]["requests"], runs_found[1]),
             (2, 7.0, 9, None))
        same("log: a cell that could not be measured is known", found.results[OTHER], {})
        same("log: the counts come back", found.counts, {"calls read ours": 0.1})


def names():
    same("sizes are named", [measure.size_name(n) for n in (512, 4096, 1 << 20)],
         ["512 B", "4 KiB", "1 MiB"])
    same("numbers have three digits that matter",
         [measure.number(n) for n in (0.0364, 0.97, 1.0, 12.34, 99.96, 1234567)],
         ["0.0364", "0.970", "1.00", "12.3", "100.0", "1234567"])


for part in (statistics, pairs, rounds, judgement, exact, expected, programs, logged, names):
    part()
sys.exit(failed)
