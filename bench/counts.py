"""Exact counts: what N and 2 N requests take, and the difference by N, so that start and
handshake cancel.  Also the memory that a connection takes."""
import os
import re
import subprocess
import tempfile

import measure
from cells import TCP, UNIX
from measure import KIB

REQUESTS = 10000
# What needs memory for a connection, as a program that prints it.
SIZES = """
#include "nbd.h"
#include <stdio.h>
int main(void)
{
    return printf("%lu\\n", (unsigned long)(sizeof(nbd_client) + 4 * sizeof(nbd_slot) +
                                           NBD_BUFFER_MIN)) < 0;
}
"""


def count(log, prefix, command, pattern, name, number):
    """The number that `pattern` finds in what the tool says behind one run, or None."""
    with tempfile.NamedTemporaryFile("r") as told:
        words = [*(word.format(told.name) for word in prefix), *command, "--count", number]
        done = measure.run(words, log, count=name)
        found = re.search(pattern, told.read())
    return int(found[1]) if done and found else None


def per_request(log, prefix, command, pattern, name):
    once = count(log, prefix, command, pattern, name, REQUESTS)
    twice = count(log, prefix, command, pattern, name, 2 * REQUESTS)
    return None if once is None or twice is None else (twice - once) / REQUESTS


def system_calls(log, command, name):
    tool = ["strace", "-f", "-c", "-U", "calls,name", "-o", "{}"]
    return per_request(log, tool, command, r"(\d+) total", name)


def instructions(log, command, name):
    tool = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--log-file={}"]
    return per_request(log, tool, command, r"Collected : (\d+)", name)


def counted(log, uri, progress):
    """System calls and user instructions of 4 KiB requests, 64 in flight."""
    found = {}
    for op in ("read", "write"):
        for program, binary in (("ours", "nbdh"), ("libnbd", "libnbd"), ("floor", "floor")):
            command = [*measure.program(binary), uri, "--op", op, "--size", 4 * KIB,
                       "--depth", 64, "--no-init"]
            for what, tool in (("calls", system_calls), ("instructions", instructions)):
                name = f"{what} {op} {program}"
                progress.step(name)
                if measure.program(binary):
                    found[name] = tool(log, command, name)
    return found


def price_of_default(log, uri, counts, progress):
    """How many instructions more a read takes in default mode than with no-initialize."""
    for program, binary in (("ours", "nbdh"), ("libnbd", "libnbd")):
        name = f"more instructions by default {program}"
        progress.step(name)
        least = counts.get(f"instructions read {program}")
        if least is None:
            continue
        command = [*measure.program(binary), uri, "--op", "read", "--size", 4 * KIB,
                   "--depth", 64]
        most = instructions(log, command, name)
        counts[name] = None if most is None else most - least


def segments(log, uri, progress):
    """Segments per request that TCP_INFO counts, writes of 512 bytes."""
    found = {}
    for depth in (1, 16):
        for program, binary in (("ours", "nbdh"), ("libnbd", "libnbd"), ("floor", "floor")):
            name = f"segments at depth {depth} {program}"
            progress.step(name)
            if measure.program(binary):
                command = [*measure.program(binary), uri, "--op", "write", "--size", 512,
                           "--depth", depth, "--count", REQUESTS]
                done = measure.run(command, log, count=name)
                found[name] = done and done.get("segs_op")
    return found


def memory(log, uri):
    """KiB for client, 4 slots and the least buffer; KiB of heap of a libnbd handle."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/sizes"
        compiler = [os.environ.get("CC", "gcc"), "-I.", "-x", "c", "-o", program, "-"]
        subprocess.run(compiler, input=SIZES, text=True, check=True)
        found["KiB for a connection ours"] = int(measure.first_line([program])) / KIB
    if measure.program("memory"):
        done = measure.run([*measure.program("memory"), uri], log, count="KiB for a connection libnbd")
        found["KiB for a connection libnbd"] = done and done["heap"] / KIB
    return found


STEPS = 2 * 3 * 2 + 2 + 2 * 3  # of progress


def all_counts(log, servers, progress):
    """{name: figure}; `servers` are the fast ones, {UNIX: Server, TCP: Server}."""
    uri = servers[UNIX].uri
    counts = counted(log, uri, progress)
    price_of_default(log, uri, counts, progress)
    counts |= segments(log, servers[TCP].uri, progress)
    return counts | memory(log, uri)


def table(counts):
    """What was counted, a row for each thing and a column for each program."""
    programs = ("ours", "floor", "libnbd")
    rows = []
    for what in dict.fromkeys(name.rsplit(" ", 1)[0] for name in counts):
        values = [counts.get(f"{what} {program}") for program in programs]
        rows.append([what, *("-" if v is None else measure.number(v) for v in values)])
    return measure.table(["count", *programs], rows)
