"""The report of a run, made from its log alone: tables, plots and the verdicts."""
import json
import pathlib

import bars
import counts
import measure
from cells import (BINARIES, BUFFERS, CURVES, FAST, IMAGE, OPS, SIZES, Cell, Copy, Curve, keys)
from measure import MIB

PLOTS = pathlib.Path("bench/plots")
RESULTS = pathlib.Path("bench/results.md")


# The log


class Logged:
    """What a log holds: {key: {program: [figures or None, ...]}}, the counts, the head."""

    def __init__(self, path):
        self.path = path
        self.results = {}
        self.counts = {}
        self.head = []
        self.quick = False
        self.seconds = None
        known = keys()
        with open(path, encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                self.take(record, known)

    def take(self, record, known):
        if "cell" in record and "round" in record:
            group = self.results.setdefault(known[record["cell"]], {})
            group.setdefault(record["program"], []).append(measure.logged_figures(record))
        elif "missing" in record:
            self.results.setdefault(known[record["missing"]], {})
        elif "counts" in record:
            self.counts = record["counts"]
        elif "head" in record:
            self.head, self.quick = record["head"], record["quick"]
        elif "took" in record:
            self.seconds = record["took"]

    def rounds(self):
        """Of the group that has the fewest; the last round may be short."""
        return min((len(runs) for group in self.results.values() for runs in group.values()),
                   default=0)

    def lines(self):
        end = ("it ended early" if self.seconds is None
               else f"took {measure.duration(self.seconds)}")
        return [*self.head, f"- {pairs_line(self.rounds())}",
                f"- {end}; every run is in {self.path}"]


# Tables


def cell_row(cell, result):
    names = [name for name in BINARIES if result.get(name)]

    def medians(metric):
        return " / ".join(measure.number(measure.median(found)) if found else "-" for found in
                          (measure.figures(result, metric, name) for name in names))

    def ratio(metric, above, below):
        values = measure.ratios(result, metric, above, below)
        if not values:
            return "-"
        found = measure.summary(values)
        return f"{measure.number(found.median)} ({bars.interval(found)}; {bars.extent(found)})"

    return [cell, medians("ops_s"), medians("cpu_us_op"), ratio("ops_s", "ours", "libnbd"),
            ratio("ops_s", "ours", "floor"), ratio("cpu_us_op", "libnbd", "ours"),
            medians("requests")]


def cells_table(results):
    rows = [cell_row(key, result) for key, result in results.items()
            if isinstance(key, Cell)]
    return measure.table(
        ["cell", "requests/s", "client CPU us/request", "ours / libnbd, requests/s",
         "ours / floor, requests/s", "libnbd / ours, CPU", "requests in a run"], rows)


def defaults_table(results):
    rows = []
    for cell, result in results.items():
        for program in ("ours", "libnbd"):
            values = measure.ratios(result, "ops_s", f"{program}, default", program)
            if values:
                found = measure.summary(values)
                rows.append([cell, program, measure.number(found.median), bars.interval(found),
                             bars.extent(found)])
    return measure.table(["cell", "program", "default / no-initialize", "interval",
                          "min to max"], rows)


def copies_table(results):
    rows = []
    for key, result in results.items():
        if isinstance(key, Copy):
            for name in result:
                found = measure.figures(result, "wall_s", name)
                if found:
                    all_of = measure.summary(found)
                    rate = IMAGE / MIB / all_of.median
                    rows.append([key, name, measure.number(all_of.median), bars.extent(all_of),
                                 f"{rate:.0f}"])
    return measure.table(["copy", "program", "seconds", "min to max", "MiB/s"], rows)


def curves_table(results):
    rows = []
    for key, result in results.items():
        for buffer in result if isinstance(key, Curve) else ():
            rate, cpu, calls = (measure.figures(result, metric, buffer)
                                for metric in ("ops_s", "cpu_us_op", "syscalls_op"))
            if rate:
                rows.append([measure.size_name(key.size), measure.size_name(buffer),
                             *(measure.number(measure.median(f)) if f else "-"
                               for f in (rate, cpu, calls))])
    return measure.table(["request", "buffer", "requests/s", "client CPU us/request",
                          "system calls/request"], rows)


def verdicts_table(verdicts):
    rows = [[v.text, v.bar, v.figure, v.interval, v.extent, v.where, v.cells, v.word]
            for v in verdicts]
    return measure.table(["bar", "at", "worst figure", "interval", "min to max", "where",
                          "cells passed", "verdict"], rows)


def pairs_line(rounds):
    which = measure.rank(rounds)
    sure = measure.coverage(rounds, which)
    return (f"{rounds} interleaved rounds; figures are medians; the interval of a median ratio "
            f"is from the {which}. to the {rounds + 1 - which}. of {rounds} pairs "
            f"({sure:.1%}, exact)")


def expected_table(results, counted):
    return measure.table(["what", "there", "measured", "share", ""],
                         bars.against_expected(results, counted))


PASS = """
Pass (interval): the interval reaches the bar minus 3 %, the median does not reach the bar.
"""
CELLS = """Programs in the order ours / libnbd / floor, all with no-initialize; where there are five
figures the last two are ours and libnbd in their default mode.  Ratios: median (interval; min to
max).

"""


def report(logged):
    """The whole of results.md, and the verdicts."""
    results, counted = logged.results, logged.counts
    verdicts = bars.verdicts(results, counted, logged.quick)
    sections = [
        ("Bars", verdicts_table(verdicts) + PASS),
        ("Counts", counts.table(counted)),
        ("Check of floor and driver: against another machine", expected_table(results, counted)),
        ("Cells", CELLS + cells_table(results)),
        ("Default mode against no-initialize", defaults_table(results)),
        ("Copies of 1 GiB from nbdkit's file plugin", copies_table(results)),
        ("Read-ahead: Unix, 64 in flight", curves_table(results)),
    ]
    text = ["# Results of make bench", "", *logged.lines(), ""]
    for title, body in sections:
        if body.count("\n|") > 1:  # more than the head of a table
            text += [f"## {title}", "", body]
    return "\n".join(text), verdicts


# Plots


def tics(sizes):
    return tuple((measure.size_name(size), size) for size in sizes)


def points(results, metric, name, server, op, depth):
    """(size, median, low, high) of one program."""
    found = []
    for size in SIZES:
        values = measure.figures(results.get(Cell(server, op, size, depth), {}), metric, name)
        if values:
            one = measure.summary(values)
            found.append((size, one.median, one.low, one.high))
    return found


def gains(results, name, server, op, depth):
    """(size, median, low, high) of requests per second of one program over libnbd."""
    found = []
    for size in SIZES:
        result = results.get(Cell(server, op, size, depth), {})
        values = measure.ratios(result, "ops_s", name, "libnbd")
        if values:
            one = measure.summary(values)
            found.append((size, one.median, one.low, one.high))
    return found


def panels(y, curves):
    """One for each transport and operation; `curves` gives the series of it."""
    return [measure.Panel(f"{server}, {op}, 64 in flight", "request size (bytes)", y,
                          curves(server, op), y_log=True, x_tics=tics(SIZES))
            for server in FAST for op in OPS]


def curves_of(results, metric):
    return lambda server, op: [(name, points(results, metric, name, server, op, 64))
                               for name in ("ours", "libnbd", "floor")]


def curve(results, metric, size):
    result = results.get(Curve(size), {})
    found = []
    for buffer in result:
        values = measure.figures(result, metric, buffer)
        if values:
            one = measure.summary(values)
            found.append((buffer, one.median, one.low, one.high))
    return found


def draw(results):
    measure.plot(PLOTS / "rate.svg", panels("requests per second", curves_of(results, "ops_s")))
    measure.plot(PLOTS / "cpu.svg",
                 panels("client CPU (us per request)", curves_of(results, "cpu_us_op")))
    measure.plot(PLOTS / "gain.svg", panels(
        "requests/s, libnbd = 1",
        lambda server, op: [(f"{name} / libnbd", gains(results, name, server, op, 64))
                            for name in ("ours", "floor")]))
    measure.plot(PLOTS / "read-ahead.svg", [
        measure.Panel(
            title, "buffer given to the client (bytes)", y,
            [(f"{measure.size_name(size)} reads", curve(results, metric, size))
             for size in CURVES],
            y_log=True, x_tics=tics(BUFFERS[::3]))
        for metric, title, y in (
            ("cpu_us_op", "Unix, 64 in flight", "client CPU (us per request)"),
            ("ops_s", "Unix, 64 in flight", "requests per second"))
    ])


def tell(logged):
    """Prints the report; of a whole run it is kept.  Returns the exit status."""
    text, verdicts = report(logged)
    print(text)
    if not logged.quick:
        RESULTS.write_text(text, encoding="utf-8")
        draw(logged.results)
    return 0 if all(verdict.word.startswith("pass") for verdict in verdicts) else 1
