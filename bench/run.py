#!/usr/bin/env -S python3 -B
"""Measures nbd.h, libnbd and the floor, and judges the bars.

    bench/run.py              all of it: make bench
    bench/run.py --quick      counts and the main cells: make bench-quick
    bench/run.py --log LOG    the report of a run that was made before; measures nothing

Run from the top directory with the programs built.  The report is made from the log alone,
so that of a run that ended early can be read too.  bench/README.md tells what is measured and
how.  Exit status: 0 all bars passed, 1 not all, 2 it could not be run.
"""
import argparse
import contextlib
import math
import pathlib
import shutil
import sys
import tempfile
import time

import counts
import measure
import report
from cells import (BINARIES, BUFFERS, COPY_TARGETS, CURVES, FAST, IMAGE, NBDKIT, QEMU, TCP, UNIX,
                   Cell, Copy, Curve, grid, programs_of, real_cells)
from measure import MIB

EXPORT = 64 * MIB
ROUNDS, QUICK_ROUNDS = 11, 3
SECONDS = 0.4  # that one run takes
OVERHEAD = 0.06  # seconds: starting a program and connecting


def start_servers(stack, directory, pinning):
    """All are there from the beginning to the end: the programs alternate, not the servers."""
    def path(name):
        return measure.unix_address(directory, name)

    fast = {UNIX: path("fast"), TCP: measure.tcp_address()}
    cpu, real_cpu = measure.cpus_of(pinning)[0], measure.cpus_of(pinning, real=True)[0]
    servers = {name: measure.fast_server(at, EXPORT, cpu=cpu) for name, at in fast.items()}
    if measure.has("nbdkit"):
        servers[NBDKIT] = measure.nbdkit(path("nbdkit"), "memory", f"{EXPORT // MIB}M",
                                         cpu=real_cpu)
    if measure.has("qemu-nbd"):
        disk = pathlib.Path(directory) / "disk"
        disk.write_bytes(b"\1" * EXPORT)
        servers[QEMU] = measure.qemu_nbd(path("qemu"), disk, cpu=real_cpu)
    for server in servers.values():
        stack.enter_context(server)
    return servers


# One run


def command_of(name, server, cell, pinning, *more):
    binary, *options = BINARIES[name]
    words = measure.program(binary)
    if not words:
        return []
    _, cpu = measure.cpus_of(pinning, real=cell.server not in FAST)
    return [*measure.pin(cpu), *words, server.uri, "--op", cell.op, "--size", cell.size, "--depth",
            cell.depth, *options, *more]


def calibrated(command, depth, seconds, log, **notes):
    """How many requests take `seconds`; None if the program fails.  Tries until a run is
    long enough to tell."""
    number = 2 * depth
    while True:
        done = measure.run([*command, "--count", number], log, calibration=True, **notes)
        if not done or not done.get("ops_s"):
            return None
        took = number / done["ops_s"]
        if took >= seconds / 8:
            return max(math.ceil(done["ops_s"] * seconds), 2 * depth)
        number = math.ceil(number * min(max(seconds / 4 / took, 2), 32))


def subject(command, number, log, **notes):
    words = [*command, "--count", number]
    return lambda turn: measure.run(words, log, round=turn, **notes)


class Plan:
    """Groups of subjects for measure.interleave, with how long each of them takes."""

    def __init__(self, log, options):
        self.log = log
        self.seconds = options.seconds
        self.pinning = options.pin
        self.groups = {}
        self.cost = 0.0  # seconds of one round

    def add(self, key, name, command, depth):
        """A subject that the machine cannot run is missing in its group, and its bars with
        it are not measured."""
        group = self.groups.setdefault(key, {})
        notes = {"cell": str(key), "program": name}
        number = calibrated(command, depth, self.seconds, self.log, **notes) if command else None
        if number:
            group[name] = subject(command, number, self.log, requests=number, **notes)
            self.cost += self.seconds + OVERHEAD

    def add_timed(self, key, name, command, prepare=None):
        """A whole program, run as it is; `prepare` comes before it and is not timed."""
        group = self.groups.setdefault(key, {})
        if not command:
            return

        def once(turn):
            if prepare:
                prepare()
            return measure.run(command, self.log, round=turn, cell=str(key), program=name)

        group[name] = once
        self.cost += 1.0


def add_cells(plan, servers, cells, progress):
    for cell in cells:
        for name in programs_of(cell):
            progress.step(f"counting for {cell}, {name}")
            if cell.server in servers:
                command = command_of(name, servers[cell.server], cell, plan.pinning)
                plan.add(cell, name, command, cell.depth)


def add_curves(plan, servers, progress):
    """The read-ahead curve: one group for each size of request, one subject for each buffer."""
    for size in CURVES:
        cell = Cell(UNIX, "read", size, 64)
        for buffer in BUFFERS:
            progress.step(f"counting for a buffer of {measure.size_name(buffer)}")
            command = command_of("ours", servers[UNIX], cell, plan.pinning, "--buffer",
                                 buffer)
            plan.add(Curve(size), buffer, command, cell.depth)


# Copies of an image


def copy_commands(uri, target):
    """How each program copies to null: (no target) or to a file."""
    convert = [*measure.tool("qemu-img"), "convert", "-m16", "-W", "-f", "raw"]
    null = ["-n", "--target-image-opts", uri, f"driver=null-co,size={IMAGE}"]
    commands = {
        "copy": ["build/examples/copy", uri, target or "null:"],
        "nbdcopy": [*measure.tool("nbdcopy"), uri, target or "null:"],
        "qemu-img": [*convert, *(["-O", "raw", uri, target] if target else null)],
    }
    there = {"copy": pathlib.Path("build/examples/copy").exists(),
             "nbdcopy": measure.tool("nbdcopy"), "qemu-img": measure.tool("qemu-img")}
    return {name: command if there[name] else [] for name, command in commands.items()}


def random_image(path):
    """Nothing in it is sparse, nothing repeats within a request of any of the programs."""
    with open("/dev/urandom", "rb") as source, open(path, "wb") as image:
        for _ in range(IMAGE // (16 * MIB)):
            image.write(source.read(16 * MIB))


def add_copies(plan, stack, directory):
    """nbdkit's file plugin and the copying programs have threads: none of them is pinned."""
    if not measure.has("nbdkit") or shutil.disk_usage("/dev/shm").free < 3 * IMAGE:
        return
    shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="nbd-bench.", dir="/dev/shm"))
    image, target = pathlib.Path(shared) / "image", pathlib.Path(shared) / "copy"
    random_image(image)
    address = measure.unix_address(directory, "file")
    server = stack.enter_context(measure.nbdkit(address, "file", image))
    for key, file in zip(map(Copy, COPY_TARGETS), (None, target)):
        for name, command in copy_commands(server.uri, file).items():
            plan.add_timed(key, name, command, lambda: target.unlink(missing_ok=True))


# All of it


def head(options):
    """Lines for the log that say how the figures came about, and where."""
    return [
        f"- {measure.now()}, {'; '.join(measure.machine())}",
        f"- peer: libnbd {measure.libnbd_version() or 'not installed'}; "
        f"{measure.first_line([*measure.tool('nbdcopy'), '--version'])}; "
        f"{measure.first_line([*measure.tool('qemu-img'), '--version'])}",
        f"- servers: {'; '.join(measure.versions())}",
        f"- a run takes about {options.seconds:g} s; {measure.pin_line(options.pin)}",
    ]


def estimate(cells, options):
    """Seconds, before anything has been measured: on paper."""
    runs = sum(len(programs_of(cell)) for cell in cells)
    curve_runs = 0 if options.partial else len(CURVES) * len(BUFFERS)
    copy_runs = 0 if options.partial else 6
    one = options.seconds + OVERHEAD
    each_round = (runs + curve_runs) * one + copy_runs * 1.0
    return (runs + curve_runs) * one + options.rounds * each_round + 2.5 * counts.STEPS


def plan_all(stack, directory, servers, cells, options, log):
    plan = Plan(log, options)
    curve_steps = 0 if options.partial else len(CURVES) * len(BUFFERS)
    progress = measure.Progress(sum(len(programs_of(cell)) for cell in cells) + curve_steps)
    add_cells(plan, servers, cells, progress)
    if not options.partial:
        add_curves(plan, servers, progress)
        add_copies(plan, stack, directory)
    progress.end()
    for key in [key for key, group in plan.groups.items() if not group]:
        log.add(missing=str(key))
        del plan.groups[key]
    return plan


def measure_all(options, log):
    """Everything that is found is in the log."""
    start = time.monotonic()
    log.add(head=head(options), quick=options.partial)
    every = grid(options.quick) + real_cells(options.quick)
    cells = [cell for cell in every if options.cells in str(cell)]
    print(f"bench: about {measure.duration(estimate(cells, options))}, log in {log.path}",
          flush=True)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="nbd-bench."))
        servers = start_servers(stack, directory, options.pin)
        progress = measure.Progress(counts.STEPS)
        log.add(counts=counts.all_counts(log, servers, progress))
        progress.end()
        plan = plan_all(stack, directory, servers, cells, options, log)
        print(f"bench: {options.rounds} rounds, "
              f"{measure.duration(options.rounds * plan.cost)} left", flush=True)
        progress = measure.Progress(options.rounds * sum(map(len, plan.groups.values())))
        measure.interleave(plan.groups, options.rounds, log, progress)
        progress.end()
    log.add(took=round(time.monotonic() - start))


def missing():
    needed = [str(measure.BUILD / name) for name in ("nbdh", "floor", "fastserver")]
    return ([path for path in needed if not pathlib.Path(path).exists()] +
            [tool for tool in ("strace", "valgrind") if not shutil.which(tool)])


def parse_options():
    parser = argparse.ArgumentParser(description="measures nbd.h and judges the bars")
    parser.add_argument("--quick", action="store_true", help="counts and the main cells only")
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, with --quick {QUICK_ROUNDS}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that one run takes")
    parser.add_argument("--log", help="measure nothing, make the report of this log")
    parser.add_argument("--pin", choices=measure.PINS, default="none",
                        help="our server and its clients, or all servers and clients")
    parser.add_argument("--cells", default="", metavar="TEXT",
                        help="those with TEXT in their name, and the counts, only")
    options = parser.parse_args()
    options.partial = options.quick or options.cells != ""  # is printed, but no report is written
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def main():
    options = parse_options()
    if options.log:
        return report.tell(report.Logged(options.log))
    if missing():
        print(f"bench: not there: {', '.join(missing())}", file=sys.stderr)
        return 2
    log = measure.dated_log("quick" if options.partial else "bench")
    measure_all(options, log)
    return report.tell(report.Logged(log.path))


if __name__ == "__main__":
    sys.exit(main())
