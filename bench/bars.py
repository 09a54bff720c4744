"""The bars that the figures have to reach, and what floor and libnbd gave on another machine.

A bar is judged in each cell that it is for; it is passed if it is in all of them.
"""
import dataclasses
import typing

from cells import NBDKIT, QEMU, REAL, TCP, UNIX, Cell, Copy, cleared, is_fast
from measure import KIB, MIB, geometric_mean, number, ratios, reaches, summary

UNKNOWN = "not measured"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One row of the table of bars."""

    text: str
    bar: str
    figure: str  # of the worst cell
    interval: str
    extent: str
    where: str
    cells: str
    word: str  # pass, pass (interval): its median alone does not, MISS, or UNKNOWN


# Bars that are ratios of two programs, pair by pair


@dataclasses.dataclass(frozen=True)
class Bar:
    """`above` over `below` in figure `metric`, at least `bar` in every cell that `where` takes."""

    text: str
    bar: float
    metric: str
    above: str
    below: str
    where: typing.Callable

    def judge(self, results):
        cells = {key: ratios(result, self.metric, self.above, self.below)
                 for key, result in results.items() if self.where(key)}
        found = [(key, summary(values)) for key, values in cells.items() if values]
        return ratio_verdict(self.text, self.bar, found, len(cells))


def word_of(found, bar):
    if not reaches(found, bar):
        return "MISS"
    return "pass" if found.median >= bar else "pass (interval)"


def ratio_verdict(text, bar, found, cells):
    """`found` is [(cell, Summary)] of those of the `cells` that could be measured.  The row
    shows the worst one: the lowest of those that miss, if any do."""
    if not found:
        return Verdict(text, f">= {bar:.2f}", "-", "-", "-", "-", f"0 of {cells}", UNKNOWN)
    key, worst = min(found, key=lambda pair: (reaches(pair[1], bar), pair[1].median))
    words = [word_of(each, bar) for _, each in found] + [UNKNOWN] * (cells - len(found))
    passed = sum(word.startswith("pass") for word in words)
    word = next(w for w in ("MISS", UNKNOWN, "pass (interval)", "pass") if w in words)
    return Verdict(text, f">= {bar:.2f}", number(worst.median), interval(worst), extent(worst),
                   str(key), f"{passed} of {cells}", word)


def interval(found):
    return f"{number(found.low)} to {number(found.high)}"


def extent(found):
    return f"{number(found.least)} to {number(found.most)}"


def small(ops, sizes, depths=(16, 64)):
    return lambda key: (
        is_fast(key) and key.op in ops and key.size in sizes and key.depth in depths
    )


def bulk(key):
    return is_fast(key) and key.size >= 64 * KIB and key.depth == 16


def one_by_one(key):
    return is_fast(key) and key.depth == 1


def of_size(least, most):
    return lambda key: is_fast(key) and least <= key.size <= most


def real(key):
    return isinstance(key, Cell) and key.server in REAL


def is_copy(key):
    return isinstance(key, Copy)


RATIOS = [
    Bar("CPU per request, libnbd / ours, 4 KiB, depth 16 and 64: read", 2.0, "cpu_us_op",
        "libnbd", "ours", small(("read",), (4 * KIB,))),
    Bar("CPU per request, libnbd / ours, 4 KiB, depth 16 and 64: write", 5.0, "cpu_us_op",
        "libnbd", "ours", small(("write",), (4 * KIB,))),
    Bar("requests/s, ours / libnbd, 512 B to 16 KiB, depth 16 and 64: read", 1.2, "ops_s",
        "ours", "libnbd", small(("read",), (512, 4 * KIB, 16 * KIB))),
    Bar("requests/s, ours / libnbd, 512 B and 4 KiB, depth 16 and 64: write", 2.5, "ops_s",
        "ours", "libnbd", small(("write",), (512, 4 * KIB))),
    Bar("bulk, 64 KiB to 1 MiB, depth 16, ours / libnbd: read and write", 1.0, "ops_s",
        "ours", "libnbd", bulk),
    Bar("depth 1, all sizes, ours / libnbd", 1.0, "ops_s", "ours", "libnbd", one_by_one),
    Bar("ours / floor, 4 KiB", 0.90, "ops_s", "ours", "floor", of_size(4 * KIB, 4 * KIB)),
    Bar("ours / floor, from 64 KiB", 0.97, "ops_s", "ours", "floor", of_size(64 * KIB, MIB)),
    Bar("throughput, default / no-initialize, 256 KiB and 1 MiB reads", 0.98, "ops_s",
        "ours, default", "ours", cleared),
    Bar("real servers, 4 KiB, depth 1, 16, 64: ours / libnbd", 1.0, "ops_s",
        "ours", "libnbd", real),
    Bar("examples/copy / nbdcopy, 1 GiB", 1.0, "wall_s", "nbdcopy", "copy", is_copy),
    Bar("examples/copy / qemu-img convert -m16 -W, 1 GiB", 1.1, "wall_s", "qemu-img", "copy",
        is_copy),
]
MEAN = ("real servers: ours / libnbd, geometric mean of all cells", 1.15)


def mean_verdict(results):
    """The mean over the cells is taken in each round; its median and interval are judged."""
    cells = [ratios(result, "ops_s", "ours", "libnbd")
             for key, result in results.items() if real(key)]
    means = [geometric_mean(values) for values in zip(*cells)]
    found = [(f"{len(cells)} cells", summary(means))] if means else []
    return ratio_verdict(*MEAN, found, min(len(cells), 1))


# Bars that are counts: exact, without slack


@dataclasses.dataclass(frozen=True)
class Count:
    """The count named `key` is at most `bar`."""

    text: str
    bar: float
    key: str

    def judge(self, counts):
        value = counts.get(self.key)
        bar = f"<= {self.bar:g}"
        if value is None:
            return Verdict(self.text, bar, "-", "-", "-", "-", "0 of 1", UNKNOWN)
        good = value <= self.bar
        return Verdict(self.text, bar, number(value), "exact", "exact", "", f"{good:d} of 1",
                       "pass" if good else "MISS")


COUNTS = [
    Count("system calls per read, 4 KiB, depth 64, Unix", 0.20, "calls read ours"),
    Count("system calls per write, 4 KiB, depth 64, Unix", 0.06, "calls write ours"),
    Count("user instructions per read, 4 KiB, depth 64, Unix", 950, "instructions read ours"),
    Count("user instructions per write, 4 KiB, depth 64, Unix", 430, "instructions write ours"),
    Count("segments per request, TCP writes of 512 B, depth 1", 1.0, "segments at depth 1 ours"),
    Count("segments per request, TCP writes of 512 B, depth 16", 0.07, "segments at depth 16 ours"),
    Count("instructions per read, default minus no-initialize, 4 KiB, depth 64", 10,
          "more instructions by default ours"),
    Count("memory per connection, KiB (libnbd takes 9.2)", 1.25, "KiB for a connection ours"),
]


def verdicts(results, counts, quick=False):
    """All rows of the table, in the order of the lists above; a quick run leaves out those
    that it has no cells for."""
    rows = [count.judge(counts) for count in COUNTS]
    rows += [bar.judge(results) for bar in RATIOS]
    rows.append(mean_verdict(results))
    return [row for row in rows if not quick or row.cells != "0 of 0"]


# Check of floor and driver: the figures of an independent measurement on another machine.
# A large difference points at the machine or at the driver.

EXPECTED_SLACK = 0.15


def expected_row(server, op, size, depths, rates):
    return [(Cell(server, op, size, depth), rate) for depth, rate in zip(depths, rates)]


# Requests per second, floor / libnbd.
EXPECTED_RATES = [
    *expected_row(UNIX, "read", 512, [64], [3.2]),
    *expected_row(UNIX, "read", 4 * KIB, [1, 16, 64], [1.1, 1.8, 1.4]),
    *expected_row(UNIX, "read", 16 * KIB, [64], [1.3]),
    *expected_row(UNIX, "read", 64 * KIB, [16], [1.0]),
    *expected_row(UNIX, "read", 256 * KIB, [16], [1.2]),
    *expected_row(UNIX, "write", 512, [64], [3.0]),
    *expected_row(UNIX, "write", 4 * KIB, [1, 16, 64], [1.2, 5.5, 3.5]),
    *expected_row(UNIX, "write", 16 * KIB, [64], [2.7]),
    *expected_row(TCP, "read", 512, [64], [4.4]),
    *expected_row(TCP, "read", 4 * KIB, [1, 16, 64], [1.1, 1.8, 2.1]),
    *expected_row(TCP, "read", 16 * KIB, [64], [1.7]),
    *expected_row(TCP, "read", 64 * KIB, [16], [0.84]),
    *expected_row(TCP, "read", 256 * KIB, [16], [1.1]),
    *expected_row(TCP, "write", 512, [64], [11.8]),
    *expected_row(TCP, "write", 4 * KIB, [1, 16, 64], [1.1, 7.0, 8.1]),
    *expected_row(NBDKIT, "write", 4 * KIB, [1, 16, 64], [1.27, 1.37, 1.23]),
    *expected_row(NBDKIT, "read", 4 * KIB, [1, 16, 64], [1.25, 1.06, 1.22]),
    *expected_row(QEMU, "write", 4 * KIB, [1, 16, 64], [1.34, 0.99, 1.15]),
    *expected_row(QEMU, "read", 4 * KIB, [1, 16, 64], [1.39, 1.07, 1.20]),
]

# Client CPU per request, libnbd / floor; from figures of two digits.
EXPECTED_CPU = [
    *expected_row(UNIX, "read", 512, [64], [8.5]),
    *expected_row(UNIX, "read", 4 * KIB, [1, 16, 64], [1.22, 2.39, 2.42]),
    *expected_row(UNIX, "read", 16 * KIB, [64], [1.43]),
    *expected_row(UNIX, "read", 64 * KIB, [16], [1.14]),
    *expected_row(UNIX, "read", 256 * KIB, [16], [1.16]),
    *expected_row(UNIX, "write", 512, [64], [5.2]),
    *expected_row(UNIX, "write", 4 * KIB, [1, 16, 64], [3.17, 7.0, 9.3]),
    *expected_row(UNIX, "write", 16 * KIB, [64], [6.4]),
    *expected_row(TCP, "read", 512, [64], [15.3]),
    *expected_row(TCP, "read", 4 * KIB, [1, 16, 64], [1.41, 2.73, 2.45]),
    *expected_row(TCP, "read", 16 * KIB, [64], [2.33]),
    *expected_row(TCP, "read", 64 * KIB, [16], [0.94]),
    *expected_row(TCP, "read", 256 * KIB, [16], [1.47]),
    *expected_row(TCP, "write", 512, [64], [18.7]),
    *expected_row(TCP, "write", 4 * KIB, [1, 16, 64], [1.17, 8.3, 10.0]),
]

EXPECTED_COUNTS = {
    "calls read libnbd": 4.0,
    "calls write libnbd": 4.0,
    "calls read floor": 0.15,
    "calls write floor": 0.036,
    "instructions read libnbd": 2650,
    "instructions write libnbd": 2650,
    "instructions read floor": 510,
    "instructions write floor": 90,
}


def compared(name, found, expected, shown=None):
    share = found / expected
    near = abs(share - 1) <= EXPECTED_SLACK
    return [name, number(expected), shown or number(found), f"{share:.2f}",
            "" if near else f"off by more than {EXPECTED_SLACK:.0%}"]


def compared_cells(results, what, expected, metric, above, below):
    rows = []
    for cell, ratio in expected:
        values = ratios(results.get(cell, {}), metric, above, below)
        if values:
            found = summary(values)
            shown = f"{number(found.median)} ({interval(found)})"
            rows.append(compared(f"{what}: {cell}", found.median, ratio, shown))
    return rows


def against_expected(results, counts):
    """Rows: what, figure there, measured, measured / there, and a mark where it is off."""
    return [
        *(compared(key, counts[key], value) for key, value in EXPECTED_COUNTS.items()
          if counts.get(key)),
        *compared_cells(results, "requests/s, floor / libnbd", EXPECTED_RATES, "ops_s",
                        "floor", "libnbd"),
        *compared_cells(results, "CPU, libnbd / floor", EXPECTED_CPU, "cpu_us_op",
                        "libnbd", "floor"),
    ]
