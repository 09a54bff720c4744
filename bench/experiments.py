#!/usr/bin/env python3
"""Five experiments: bench/experiments.py NAME [--rounds N] [--quick] [--pin MODE]

NAME is no-init, send-more, parallel, connections or tls.  Each prints its table, and
writes it to bench/results-NAME.md and a plot to bench/plots/; with --quick, an eighth of the
work, to build/bench/.  bench/experiments.md says what was seen.  All runs are in
build/bench/log-NAME-DATE.jsonl.  Programs that are not built or not installed are left out.
"""
import argparse
import contextlib
import filecmp
import itertools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import measure
from measure import KIB, MIB

BENCH = pathlib.Path("bench")
EXAMPLES = pathlib.Path("build/examples")
DEFAULT_MODE = measure.BUILD / "default"  # the same examples without NBD_NO_INIT


# What all of them share

part = 1  # with --quick, all is this much smaller
pinning = "none"  # of our server and its clients, a key of measure.PINS


def image_size():
    return 1024 * MIB // part


def counted(count):
    return max(count // part, 1)


def fast_server(address):
    return measure.fast_server(address, cpu=measure.cpus_of(pinning)[0])


def client(name):
    """The words that run a client of our server."""
    return [*measure.pin(measure.cpus_of(pinning)[1]), *measure.program(name)]


def subject(log, *command):
    """A program to interleave."""
    return lambda number: measure.run(command, log, round=number)


def run_groups(name, make_groups, rounds):
    """Makes the groups with a log of this experiment, interleaves them, returns the results."""
    log = measure.dated_log(name)
    groups = make_groups(log)
    progress = measure.Progress(rounds * sum(len(g) for g in groups.values()))
    results = measure.interleave(groups, rounds, log, progress)
    progress.end()
    return results


def middle(results, metric, program):
    """Median as text, or `-` if the program was never measured."""
    values = measure.figures(results, metric, program)
    return measure.number(measure.median(values)) if values else "-"


def ratio(results, metric, above, below):
    """Median of the ratios of each round, with its interval."""
    values = measure.ratios(results, metric, above, below)
    if not values:
        return "-"
    found = measure.summary(values)
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


def report(name, title, rounds, notes, parts):
    """Prints and writes the tables: `parts` is [(heading, header, rows), ...]."""
    text = [f"# {title}{', an eighth of the work' if part > 1 else ''}", "",
            *(f"- {line}" for line in measure.machine()),
            *(f"- {line}" for line in measure.versions() if line),
            f"- medians of {rounds} interleaved rounds; in brackets the interval of the median",
            *(f"- {note}" for note in notes), ""]
    for heading, header, rows in parts:
        text += [f"## {heading}", "", measure.table(header, rows)]
    path = (measure.BUILD if part > 1 else BENCH) / f"results-{name}.md"
    path.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    print("\n".join(text))
    print(f"{path}; all runs in {measure.BUILD}/log-{name}-*.jsonl")


def plot(name, panels):
    path = (measure.BUILD if part > 1 else BENCH) / "plots" / f"{name}.svg"
    if not measure.plot(path, panels):
        print("no plot: gnuplot is not installed", file=sys.stderr)


def points(results, metric, program, x):
    """[] or one point with its interval, at x."""
    values = measure.figures(results, metric, program)
    if not values:
        return []
    found = measure.summary(values)
    return [(x, found.median, found.low, found.high)]


def make_image(path):
    """A file system with files of this machine, as many as fit."""
    for files in ("/usr/share", "/usr/include", "/usr/share/perl", "/etc"):
        path.unlink(missing_ok=True)
        with path.open("wb") as image:
            image.truncate(image_size())
        made = subprocess.run(
            ["mke2fs", "-q", "-t", "ext4", "-m", "0", "-N", "200000", "-d", files, path],
            capture_output=True, check=False)
        if made.returncode == 0:
            used = path.stat().st_blocks * 512 // MIB
            return f"ext4 image of {files}: {image_size() // MIB} MiB, {used} MiB of them allocated"
    raise RuntimeError(f"mke2fs: {made.stderr.decode()}")


def copier(log, *command, size=None):
    """A program that copies `size` bytes, or the image: its speed and its CPU are measured from
    outside."""
    size = size or image_size()

    def once(number):
        found = measure.run(command, log, round=number)
        if found:
            found["mb_s"] = size / found["wall_s"] / 1e6
            found["cpu_ms"] = found["child_cpu_s"] * 1e3
            found["cpu_ns_byte"] = found["child_cpu_s"] * 1e9 / size
        return found

    return once


# 1. No-initialize

LOOPS = (("sync", "simple_copy"), ("poll", "poll_copy"), ("ev", "libev_copy"))


def loop_group(log, loop, example, size, depth, uris):
    """Ours and libnbd's of one loop, each with and without clearing."""
    ours = ["-s", size, *uris] if loop == "sync" else ["-s", size, "-r", depth, *uris]
    group = {}
    if (EXAMPLES / example).exists():
        group["ours"] = copier(log, DEFAULT_MODE / example, *ours)
        group["ours, no-init"] = copier(log, EXAMPLES / example, *ours)
    libnbd = measure.program("libnbd_copy")
    if libnbd:
        words = [*libnbd, "--loop", loop, "-s", size, "-r", depth]
        group["libnbd"] = copier(log, *words, *uris)
        group["libnbd, no-init"] = copier(log, *words, "--no-init", *uris)
    return group


def every_byte(program):
    """Words that keep a copier from looking for zeroes in what it read, if it does."""
    usage = subprocess.run([*program, "--help"], capture_output=True, text=True, check=False)
    return ["--sparse=0"] if "--sparse" in usage.stdout else []


def copy_group(log, size, depth, uris):
    """The whole programs; nbdcopy always reads without clearing."""
    words = [f"--requests={depth}", f"--request-size={size}", *uris]
    group = {}
    for name, directory in (("ours", DEFAULT_MODE), ("ours, no-init", EXAMPLES)):
        program = [str(directory / "copy")]
        group[name] = copier(log, *program, *every_byte(program), *words)
    program = measure.tool("nbdcopy")
    if program:
        group["libnbd, no-init"] = copier(log, *program, "--connections=1", "--threads=1",
                                          *every_byte(program), *words)
    return group


def no_init_groups(log, uris):
    sizes, depths, groups = (256 * KIB, MIB), (16, 64), {}
    for loop, example in LOOPS:
        for size in sizes:
            for depth in (1,) if loop == "sync" else depths:
                groups[(loop, size, depth)] = loop_group(log, loop, example, size, depth, uris)
    for size in sizes:
        for depth in depths:
            groups[("copy", size, depth)] = copy_group(log, size, depth, uris)
    return groups


def no_init_row(key, results):
    loop, size, depth = key
    pairs = (("ours", "ours, no-init"), ("libnbd", "libnbd, no-init"))
    return [loop, measure.size_name(size), depth,
            *(ratio(results, "mb_s", *pair) for pair in pairs),
            *(ratio(results, "cpu_ms", *pair) for pair in pairs),
            *(middle(results, "mb_s", name) for pair in pairs for name in pair)]


def no_init_panel(results, loop):
    """Throughput in default mode over that without clearing, ours and libnbd's side by side."""
    series, tics = {"ours": [], "libnbd": []}, []
    for x, key in enumerate(key for key in results if key[0] == loop):
        tics.append((f"{measure.size_name(key[1])}, {key[2]}", x))
        for shift, name in ((-0.1, "ours"), (0.1, "libnbd")):
            values = measure.ratios(results[key], "mb_s", name, f"{name}, no-init")
            if values:
                s = measure.summary(values)
                series[name].append((x + shift, s.median, s.low, s.high))
    return measure.Panel(loop, "request size, in flight", "default ÷ no-initialize, MB/s",
                         list(series.items()), x_log=False, x_tics=tuple(tics), styles="points")


def measure_no_init(rounds):
    """The results, and what the image is."""
    with contextlib.ExitStack() as stack:
        directory = scratch(stack, "/dev/shm")
        image = make_image(directory / "image")
        source = stack.enter_context(measure.nbdkit(
            measure.unix_address(directory, "source"), "file", directory / "image",
            options=["--filter=noextents"]))
        target = stack.enter_context(measure.nbdkit(
            measure.unix_address(directory, "target"), "null", image_size()))
        uris = (source.uri, target.uri)
        return run_groups("no-init", lambda log: no_init_groups(log, uris), rounds), image


def no_init(rounds):
    results, image = measure_no_init(rounds)
    header = ["loop", "request", "in flight", "MB/s, ours: default ÷ no-init",
              "libnbd: the same", "client CPU, ours: default ÷ no-init", "libnbd: the same",
              "ours", "ours, no-init", "libnbd", "libnbd, no-init"]
    rows = [no_init_row(key, found) for key, found in results.items()]
    notes = [f"libnbd {measure.libnbd_version()}", image,
             "nbdkit file to nbdkit null, Unix sockets, one connection each; the source tells no "
             "holes, so every byte is copied",
             "loops: examples/simple_copy, poll_copy, libev_copy and bench/libnbd_copy.c; copy: "
             "examples/copy and nbdcopy, which has no default mode to compare with",
             "the last four columns are MB/s"]
    report("no-init", "What clearing the buffer first costs", rounds, notes,
           [("Copying an image", header, rows)])
    plot("no-init", [no_init_panel(results, loop) for loop in ("sync", "poll", "ev", "copy")])


# 2. MSG_MORE

SENDS = ("plain", "more", "gather")
WRITES = ((512, 1, 30000), (512, 16, 150000), (4 * KIB, 1, 30000), (4 * KIB, 16, 100000),
          (4 * KIB, 64, 100000), (64 * KIB, 16, 8000))
THREADS = 8
MIXED_COUNT = 1500  # requests of each connection


def senders(log, program, uri, words):
    """nbdh in its three ways of sending, and libnbd; `program` gives the words that run them."""
    group = {send: subject(log, *program("nbdh"), uri, *words, "--send", send) for send in SENDS}
    if measure.program("libnbd"):
        group["libnbd"] = subject(log, *program("libnbd"), uri, *words)
    return group


def send_groups(log, fast, memory):
    groups = {}
    for transport, uri in fast.items():
        for size, depth, count in WRITES:
            words = ["--op", "write", "--size", size, "--depth", depth, "--count", counted(count)]
            groups[(transport, size, depth)] = senders(log, client, uri, words)
    mixed = ["--op", "mixed", "--size", 256 * KIB, "--depth", 64, "--count", counted(MIXED_COUNT),
             "--connections", THREADS, "--threads", THREADS, "--no-init"]
    for transport, uri in memory.items():
        groups[(transport, "mixed", 64)] = senders(log, measure.program, uri, mixed)
    return groups


def send_row(key, results):
    transport, size, depth = key
    names = (*SENDS, "libnbd")
    name = size if isinstance(size, str) else measure.size_name(size)
    return [transport, name, depth, *(middle(results, "ops_s", n) for n in names),
            *(middle(results, "segs_op", n) for n in names),
            *(middle(results, "cpu_us_op", n) for n in names)]


def send_panel(results, transport):
    keys = [key for key in results if key[0] == transport and key[1] != "mixed"]
    tics = tuple((f"{measure.size_name(k[1]).replace(' ', '')} {k[2]}", x)
                 for x, k in enumerate(keys))
    series = [(name, [p for x, k in enumerate(keys)
                      for p in points(results[k], "ops_s", name, x)])
              for name in (*SENDS, "libnbd")]
    return measure.Panel(f"{transport}, writes", "size, depth", "requests/s", series,
                         x_log=False, y_log=True, x_tics=tics, styles="linespoints")


def measure_send_more(rounds):
    with contextlib.ExitStack() as stack:
        directory = scratch(stack, "/dev/shm")

        def both(serve, name, *arguments):
            where = {"TCP": measure.tcp_address(), "Unix": measure.unix_address(directory, name)}
            return {transport: stack.enter_context(serve(address, *arguments)).uri
                    for transport, address in where.items()}

        fast = both(fast_server, "fast")
        memory = both(measure.nbdkit, "memory", "memory", "100M")
        return run_groups("send-more", lambda log: send_groups(log, fast, memory), rounds)


def send_more(rounds):
    results = measure_send_more(rounds)
    names = (*SENDS, "libnbd")
    header = ["transport", "size", "depth", *(f"req/s {n}" for n in names),
              *(f"segments/req {n}" for n in names), *(f"CPU µs/req {n}" for n in names)]
    writes = [send_row(k, r) for k, r in results.items() if k[1] != "mixed"]
    mixed = [send_row(k, r) for k, r in results.items() if k[1] == "mixed"]
    notes = [measure.pin_line(pinning), f"libnbd {measure.libnbd_version()}",
             "plain: header and payload in sends of their own; more: the same with MSG_MORE; "
             "gather: all that is queued in one call, as nbd.h does it",
             "segments are what the client's kernel sent, from TCP_INFO; its acknowledgements "
             "of what the server sent count too"]
    report("send-more", "MSG_MORE and gathering", rounds, notes,
           [("Writes, fast server", header, writes),
            (f"{THREADS} connections, a thread each, 4 KiB and 256 KiB, reads and writes in "
             "turn, nbdkit memory 100 MiB", header, mixed)])
    plot("send-more", [send_panel(results, "TCP"), send_panel(results, "Unix")])


# 3. Parallel copying

REQUESTS = (1, 2, 4, 8, 16)


def takes_direct(directory):
    path = directory / "direct"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        return True
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)


def make_target(path):
    with path.open("wb") as target:
        target.truncate(image_size())
    return path


def file_server(stack, directory, threads):
    path = make_target(directory / f"file-{threads}")
    return stack.enter_context(measure.nbdkit(
        measure.unix_address(directory, f"file-{threads}.sock"), "file", path,
        options=["-t", threads]))


def direct_server(stack, directory, sockets):
    path = make_target(directory / "direct")
    return stack.enter_context(measure.nbdkit(
        measure.unix_address(sockets, "direct.sock"), "python", BENCH / "direct.py",
        f"disk={path}", options=["-t", 16]))


def copiers(log, image, uri, requests):
    """Ours and the peers, one connection each; all of them flush at the end."""
    words = ["--flush", f"--requests={requests}", image, uri]
    group = {"copy": copier(log, EXAMPLES / "copy", *words)}
    if measure.has("qemu-img"):
        group["qemu-img"] = copier(log, "qemu-img", "convert", "-n", "-m", requests, "-W",
                                   "-f", "raw", "-O", "raw", image, uri)
    if measure.tool("nbdcopy"):
        group["nbdcopy"] = copier(log, *measure.tool("nbdcopy"), "--connections=1",
                                  "--threads=1", *words)
    return group


def parallel_groups(log, image, files, direct):
    groups = {}
    for requests in REQUESTS:
        for threads, server in files.items():
            group = copiers(log, image, server.uri, requests)
            only = group if threads == max(files) else {"copy": group["copy"]}
            groups[("file", threads, requests)] = only
        groups[("direct", 16, requests)] = copiers(log, image, direct.uri, requests)
    return groups


def check_copies(image, paths):
    """A fast copy that is wrong is no result."""
    for path in paths:
        if not filecmp.cmp(image, path, shallow=False):
            raise RuntimeError(f"{path} is not the image after the last copy")


def parallel_panels(results):
    def curve(server, threads, program):
        return [p for r in REQUESTS for p in points(
            results[(server, threads, r)], "mb_s", program, r)]

    tics = tuple((str(r), r) for r in REQUESTS)
    programs = ("copy", "qemu-img", "nbdcopy")
    labels = ("requests in flight", "MB/s")
    return [
        measure.Panel("nbdkit file, -t 16", *labels,
                      [(p, curve("file", 16, p)) for p in programs], x_tics=tics),
        measure.Panel("Python plugin past the page cache, -t 16", *labels,
                      [(p, curve("direct", 16, p)) for p in programs], x_tics=tics),
        measure.Panel("copy to nbdkit file, -t 1 to 16", *labels,
                      [(f"-t {t}", curve("file", t, "copy")) for t in REQUESTS], x_tics=tics),
    ]


def measure_parallel(rounds):
    """The results, what the image is, and where the target of O_DIRECT was."""
    with contextlib.ExitStack() as stack:
        directory = scratch(stack, "/dev/shm")
        slow = directory if takes_direct(directory) else scratch(stack, "/var/tmp")
        image = make_image(directory / "image")
        files = {t: file_server(stack, directory, t) for t in REQUESTS}
        direct = direct_server(stack, slow, directory)
        results = run_groups("parallel", lambda log: parallel_groups(
            log, directory / "image", files, direct), rounds)
        check_copies(directory / "image", [slow / "direct",
                                           *(directory / f"file-{t}" for t in REQUESTS)])
        return results, image, slow.parent


def parallel_row(key, results):
    programs = ("copy", "qemu-img", "nbdcopy")
    return [*key, *(middle(results, "mb_s", p) for p in programs),
            *(ratio(results, "mb_s", "copy", p) for p in programs[1:]),
            *(middle(results, "cpu_ms", p) for p in programs)]


def parallel(rounds):
    results, image, slow = measure_parallel(rounds)
    programs = ("copy", "qemu-img", "nbdcopy")
    header = ["server", "-t", "requests", *(f"MB/s {p}" for p in programs),
              "copy ÷ qemu-img", "copy ÷ nbdcopy", *(f"CPU ms {p}" for p in programs)]
    rows = [parallel_row(key, results[key]) for key in sorted(results)]
    notes = [f"libnbd {measure.libnbd_version()}", image,
             f"MB/s count the whole image, {image_size() // MIB} MiB, holes too",
             "from the image to the server over a Unix socket, one connection, with a flush",
             "file: nbdkit's file plugin, to /dev/shm; direct: bench/direct.py, with O_DIRECT, "
             f"to {slow}",
             "qemu-img convert -n -m REQUESTS -W; nbdcopy --connections=1 --threads=1"]
    report("parallel", "Parallel copying", rounds, notes, [("Upload of an image", header, rows)])
    plot("parallel", parallel_panels(results))


# 4. Many connections

CONNECTIONS = (1, 10, 100, 1000, 10000)
BUSY = 10


def busy_of(key):
    name, connections_open = key
    return connections_open if name == "all busy" else min(BUSY, connections_open)


def connections_groups(log, uri):
    groups = {}
    for key in itertools.product(("few busy", "all busy"), CONNECTIONS):
        groups[key] = {"ours": subject(
            log, *client("connections"), uri, "--connections", key[1], "--busy",
            busy_of(key), "--count", counted(max(50000, 10 * key[1])))}
    return groups


def instructions(uri, connections, busy):
    """User instructions per request, by callgrind: of a long run less those of a short one."""
    if not measure.has("valgrind"):
        return None
    found = []
    for count in (max(2000, connections), 2 * max(2000, connections)):
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null",
             "--toggle-collect=measured*", *measure.program("connections"), uri, "--connections",
             str(connections), "--busy", str(busy), "--count", str(count)],
            capture_output=True, text=True, timeout=300, check=False)
        match = re.search(r"Collected : (\d+)", done.stderr)
        if done.returncode or not match or match.group(1) == "0":
            raise RuntimeError(f"callgrind counted nothing: {done.stderr[-300:]}")
        found.append((count, int(match.group(1))))
    return (found[1][1] - found[0][1]) / (found[1][0] - found[0][0])


def connections_row(key, results, instructions_each):
    shown = ("bytes_conn", "rss_conn", "open_us", "cpu_us_op", "user_us_op", "sys_us_op", "ops_s")
    return [key[1], busy_of(key), *(middle(results, m, "ours") for m in shown),
            f"{instructions_each:.0f}" if instructions_each else "-"]


def measure_connections(rounds):
    """The results, and the instructions of each."""
    with contextlib.ExitStack() as stack:
        directory = scratch(stack, "/dev/shm")
        server = stack.enter_context(fast_server(measure.unix_address(directory, "fast")))
        results = run_groups("connections", lambda log: connections_groups(log, server.uri), rounds)
        return results, {key: instructions(server.uri, key[1], busy_of(key)) for key in results}


def connections_panel(results, title, metric, label, least):
    series = [(name, [p for key, found in results.items() if key[0] == name and key[1] >= least
                      for p in points(found, metric, "ours", key[1])])
              for name in ("few busy", "all busy")]
    return measure.Panel(title, "connections", label, series)


def connections(rounds):
    results, instructions_each = measure_connections(rounds)
    header = ["connections", "busy", "bytes each (sizeof)", "bytes each (RSS)", "µs to open",
              "CPU µs/req", "user", "sys", "req/s", "user instructions/req"]
    rows = [connections_row(key, results[key], instructions_each[key])
            for key in sorted(results, key=lambda key: (key[0] == "all busy", key[1]))]
    notes = [measure.pin_line(pinning),
             "reads of 512 B, one in flight on each busy connection, Unix socket, fast server",
             "one thread, one epoll set; 4 slots and a buffer of 256 bytes for each connection",
             "RSS is the growth of the client's process, which tells nothing for less than "
             "a hundred; the memory of kernel and server is not counted"]
    report("connections", "Many connections in one thread", rounds, notes,
           [("What each takes, and what a request costs", header, rows)])
    plot("connections", [
        connections_panel(results, "Cost of a request", "cpu_us_op", "client CPU µs/request", 1),
        connections_panel(results, "Memory of a connection", "rss_conn", "bytes", 100)])


# 5. TLS

TLS_CELLS = ((256 * KIB, 16, 1000), (4 * KIB, 64, 20000))  # size, in flight, requests of mbedTLS
TLS_FASTER = 5  # times as many requests where the cipher is fast
TLS_COPY = 256 * MIB
MBEDTLS, OPENSSL, FLOOR, PLAIN = "ours, mbedTLS", "ours, OpenSSL", "mbedTLS alone", "ours, no TLS"
TLS_PROGRAMS = (FLOOR, MBEDTLS, OPENSSL, "libnbd", PLAIN)


def certtool(*words):
    subprocess.run(["certtool", *map(str, words)], check=True, capture_output=True)


def make_certificates(directory):
    """ca-cert.pem, server-cert.pem and server-key.pem for localhost, ECDSA."""
    def template(name, *lines):
        (directory / name).write_text("\n".join([f'cn = "{name}"', "expiration_days = 7", *lines]),
                                      encoding="utf-8")
        return ["--template", directory / name]

    keys = {name: directory / f"{name}-key.pem" for name in ("ca", "server")}
    for path in keys.values():
        certtool("--generate-privkey", "--key-type=ecdsa", "--curve=secp256r1", "--outfile", path)
    certtool("--generate-self-signed", "--load-privkey", keys["ca"],
             *template("ca.info", "ca", "cert_signing_key"), "--outfile", directory / "ca-cert.pem")
    certtool("--generate-certificate", "--load-privkey", keys["server"],
             "--load-ca-certificate", directory / "ca-cert.pem", "--load-ca-privkey", keys["ca"],
             *template("server.info", 'dns_name = "localhost"', "signing_key", "tls_www_server"),
             "--outfile", directory / "server-cert.pem")


def tls_group(log, op, cell, where):
    size, depth, count = cell
    directory, sealed, plain = where

    def words(times):
        return ["--op", op, "--size", size, "--depth", depth, "--count", counted(count * times)]

    def one(program, target, times, *more):
        if not (measure.BUILD / program).exists():
            return {}
        return {subject(log, *measure.program(program), target, *words(times), *more)}

    programs = {FLOOR: one("tls_floor", directory, 1),
                MBEDTLS: one("nbdh_mbedtls", sealed, 1, "--no-init"),
                OPENSSL: one("nbdh_openssl", sealed, TLS_FASTER, "--no-init"),
                "libnbd": one("libnbd", sealed, TLS_FASTER, "--no-init"),
                PLAIN: one("nbdh", plain, TLS_FASTER, "--no-init")}
    return {name: found.pop() for name, found in programs.items() if found}


def tls_copiers(log, directory, path, uri):
    """Whole programs, to nowhere, one connection each; the requests of qemu-img are its own."""
    words = ["--requests=16", "--request-size=262144", uri, "null:"]
    group = {"copy": copier(log, EXAMPLES / "copy", "--connections=1", "--sparse=0", *words,
                            size=TLS_COPY)}
    nbdcopy = measure.tool("nbdcopy")
    if nbdcopy:
        group["nbdcopy"] = copier(log, *nbdcopy, "--connections=1", "--threads=1",
                                  *every_byte(nbdcopy), *words, size=TLS_COPY)
    if measure.has("qemu-img"):
        group["qemu-img"] = copier(
            log, "qemu-img", "convert", "-n", "-m", 16, "-W", "-S", 0, "--object",
            f"tls-creds-x509,id=t,endpoint=client,dir={directory}", "--image-opts",
            "driver=raw,file.driver=nbd,file.tls-creds=t,file.tls-hostname=localhost,"
            f"file.server.type=unix,file.server.path={path}", "--target-image-opts",
            f"driver=null-co,size={TLS_COPY}", size=TLS_COPY)
    return group


def tls_groups(log, where, copied):
    groups = {(op, *cell[:2]): tls_group(log, op, cell, where)
              for cell in TLS_CELLS for op in ("read", "write")}
    groups[("copy", 256 * KIB, 16)] = tls_copiers(log, *copied)
    return groups


def measure_tls(rounds):
    with contextlib.ExitStack() as stack:
        directory = scratch(stack, "/dev/shm")
        make_certificates(directory)
        seal = ["--tls=require", f"--tls-certificates={directory}"]

        def serve(name, options, size):
            address = measure.unix_address(directory, name)
            stack.enter_context(measure.nbdkit(
                address, "memory", size, options=[*options, "--filter=noextents"]))
            query = f"tls-certificates={directory}&tls-hostname=localhost"
            return f"nbds+unix:///?socket={address.path}&{query}" if options else address.uri

        where = (directory, serve("sealed", seal, 64 * MIB), serve("plain", [], 64 * MIB))
        copied = (directory, directory / "copied", serve("copied", seal, TLS_COPY))
        return run_groups("tls", lambda log: tls_groups(log, where, copied), rounds)


def bytes_cost(found, size):
    """Adds the CPU time of a byte to what the programs printed."""
    for runs in found.values():
        for each in runs:
            if each and "cpu_us_op" in each:
                each["cpu_ns_byte"] = each["cpu_us_op"] * 1e3 / size
    return found


def tls_bars(results):
    """[[what, bar, ratio, verdict], ...] of the cells with 256 KiB."""
    rows = []
    for op in ("read", "write"):
        found = results[(op, 256 * KIB, 16)]
        for above, below, bar in ((MBEDTLS, FLOOR, 0.9), (OPENSSL, "libnbd", 1.0)):
            values = measure.ratios(found, "mb_s", above, below)
            verdict = "not measured"
            if values:
                verdict = "pass" if measure.reaches(measure.summary(values), bar) else "MISSED"
            rows.append([f"{op} 256 KiB: {above} ÷ {below}", bar, ratio(found, "mb_s", above, below),
                         verdict])
    return rows


def tls_row(key, found, metric, programs):
    op, size, depth = key
    return [op, measure.size_name(size), depth, *(middle(found, metric, n) for n in programs)]


def tls_panel(results, metric, label):
    keys = [key for key in results if key[0] != "copy"]
    tics = tuple((f"{op} {measure.size_name(size)}", x) for x, (op, size, _) in enumerate(keys))
    series = [(name, [p for x, k in enumerate(keys) for p in points(results[k], metric, name, x)])
              for name in TLS_PROGRAMS]
    return measure.Panel(label, "operation, size", label, series, x_log=False, y_log=True,
                         x_tics=tics, styles="points")


def tls(rounds):
    results = {key: bytes_cost(found, key[1]) for key, found in measure_tls(rounds).items()}
    copied = results[("copy", 256 * KIB, 16)]
    cells = {key: found for key, found in results.items() if key[0] != "copy"}
    notes = [f"libnbd {measure.libnbd_version()} with GnuTLS",
             measure.first_line(["openssl", "version"]),
             "nbdkit memory, TLS with an ECDSA certificate, Unix socket, one connection",
             f"{FLOOR}: the same bytes one way over a Unix socket, no NBD; its peer is OpenSSL",
             "CPU is that of the client, in ns for each byte of payload",
             "the copies are of 256 MiB to nowhere, whole programs, start included"]
    report("tls", "TLS", rounds, notes, [
        ("Bars", ["what", "bar", "found", ""], tls_bars(results)),
        ("MB/s", ["op", "size", "in flight", *TLS_PROGRAMS],
         [tls_row(k, f, "mb_s", TLS_PROGRAMS) for k, f in cells.items()]),
        ("CPU ns/byte", ["op", "size", "in flight", *TLS_PROGRAMS],
         [tls_row(k, f, "cpu_ns_byte", TLS_PROGRAMS) for k, f in cells.items()]),
        ("Copies", ["program", "MB/s", "CPU ns/byte"],
         [[n, middle(copied, "mb_s", n), middle(copied, "cpu_ns_byte", n)] for n in copied])])
    plot("tls", [tls_panel(cells, "mb_s", "MB/s"), tls_panel(cells, "cpu_ns_byte", "CPU ns/byte")])


# The command line


def scratch(stack, parent):
    """A directory of our own that is gone at the end."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="nbd-bench.", dir=parent))
    stack.callback(shutil.rmtree, path)
    return path


EXPERIMENTS = {"no-init": (no_init, 9), "send-more": (send_more, 11), "parallel": (parallel, 7),
               "connections": (connections, 11), "tls": (tls, 11)}


def main():
    global part, pinning
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="an eighth of everything, to try it")
    parser.add_argument("--pin", choices=("none", "apart", "together"), default="none",
                        help="our server and its clients")
    arguments = parser.parse_args()
    pinning = arguments.pin
    part = 8 if arguments.quick else 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are stopped then
    call, rounds = EXPERIMENTS[arguments.name]
    call(arguments.rounds or rounds)


if __name__ == "__main__":
    main()
