"""What the benchmarks share: servers, runs, rounds, statistics, the log, tables and plots.

A program under measurement prints one line of key=value.  A subject is a callable that makes
one run and returns its figures as a dict, or None when the run failed.  Nothing here repeats
a run, and each run is in the log with its command.
"""
import dataclasses
import datetime
import json
import math
import os
import pathlib
import resource
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time

TREE = pathlib.Path(os.environ.get("NBD_TRIXIE", "/var/cache/nbd.h-trixie"))
TREE_LIBRARIES = TREE / "usr/lib/x86_64-linux-gnu"
TREE_LOADER = TREE / "usr/lib64/ld-linux-x86-64.so.2"
BUILD = pathlib.Path("build/bench")
SLACK = 0.03  # a time bar passes if the interval reaches it minus this
KIB = 1024
MIB = 1024 * 1024
LONGEST_RUN = 300  # seconds


# Statistics


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of one list of figures: `low` to `high` is the interval of the median."""

    count: int
    median: float
    low: float
    high: float
    least: float
    most: float
    coverage: float  # how sure the interval is, 0 to 1


def median(values):
    """The middle one; of an even number the mean of the two in the middle."""
    return statistics.median(values)


def tail(count, most):
    """P(X <= most) for X heads in `count` throws of a fair coin."""
    return sum(math.comb(count, k) for k in range(most + 1)) / 2**count


def rank(count, level=0.95):
    """Which order statistic, from 1, bounds the median from below with probability `level`
    for both bounds together.  Fewer than 6 values cannot give 95 %: then it is the first."""
    most = -1
    while tail(count, most + 1) <= (1 - level) / 2:
        most += 1
    return max(most + 1, 1)


def coverage(count, which):
    """How sure the interval from the `which`th of `count` values to its mirror is."""
    return 1 - 2 * tail(count, which - 1)


def summary(values, level=0.95):
    """Median and its exact interval by order statistics (no distribution is assumed)."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        raise ValueError("no values")
    which = rank(count, level)
    return Summary(
        count,
        median(ordered),
        ordered[which - 1],
        ordered[count - which],
        ordered[0],
        ordered[-1],
        max(coverage(count, which), 0.0),
    )


def ratios(results, metric, above, below):
    """Per round the figure `metric` of program `above` over that of `below`; rounds in which
    one of them failed are left out.  `results` is {program: [figures or None, ...]}."""
    pairs = zip(results.get(above, []), results.get(below, []))
    return [a[metric] / b[metric] for a, b in pairs if a and b and b.get(metric)]


def figures(results, metric, program):
    """What `program` got for `metric` in the rounds in which it did not fail."""
    return [f[metric] for f in results.get(program, []) if f and metric in f]


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(v) for v in values))


def reaches(found, bar, slack=SLACK):
    """Whether a time bar (at least `bar`) passes: its interval reaches the bar minus slack."""
    return found.high >= bar * (1 - slack)


# The log


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class Log:
    """One JSON object a line; written at once, so that a run that dies is seen too."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a", encoding="utf-8")

    def add(self, **record):
        self.file.write(json.dumps({"time": now(), **record}) + "\n")
        self.file.flush()


def dated_log(name):
    """build/bench/log-NAME-DATE.jsonl"""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Log(BUILD / f"log-{name}-{stamp}.jsonl")


# Programs


def has(program):
    return shutil.which(program) is not None


def pin(cpu):
    """The words before a command that keep it on one cpu; none for None, or where there is
    one cpu only."""
    if cpu is None or (os.cpu_count() or 1) < 2 or not has("taskset"):
        return []
    return ["taskset", "-c", str(cpu)]


# The cpus of a server and of its clients, the peer's like ours; and whether real servers are
# pinned as our own is.  Copies have threads: they are never pinned.
PINS = {"none": (None, None, False), "apart": (0, 1, False), "together": (1, 1, False),
        "all": (1, 1, True)}


def cpus_of(mode, real=False):
    server, client, reals = PINS[mode]
    return (server, client) if reals or not real else (None, None)


def pin_line(mode):
    server, client, reals = PINS[mode]
    if not pin(server):
        return "nothing is pinned to a cpu"
    return (f"{'servers are' if reals else 'our server is'} pinned to cpu {server}, clients to "
            f"cpu {client}; {'' if reals else 'real servers and '}copies are not pinned")


def from_tree(path):
    """Words that run the program at `path` with the libraries of the Debian 13 tree."""
    name = pathlib.Path(path).name
    return [str(TREE_LOADER), "--library-path", str(TREE_LIBRARIES), "--argv0", name, str(path)]


def tool(name):
    """Words that run the newest of an installed tool: the tree's, else this machine's; []
    if there is none."""
    if (TREE / "usr/bin" / name).exists():
        return from_tree(TREE / "usr/bin" / name)
    return [name] if has(name) else []


def program(name):
    """Words that run build/bench/NAME, libnbd with the newest library; [] if not built."""
    path = BUILD / name
    if not path.exists():
        return []
    needs_libnbd = name in ("libnbd", "memory")
    newest = needs_libnbd and (TREE_LIBRARIES / "libnbd.so.0").exists()
    return from_tree(path) if newest else [str(path)]


def first_line(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return (done.stdout + done.stderr).split("\n", 1)[0].strip()


def libnbd_version():
    """Of the library that program("libnbd") runs with."""
    if (TREE_LIBRARIES / "libnbd.so.0").exists():
        return first_line([*tool("nbdcopy"), "--version"]).split()[-1]
    return first_line(["pkg-config", "--modversion", "libnbd"])


def versions(names=("nbdkit", "qemu-nbd")):
    """First lines of what these servers and tools of this machine say of themselves."""
    return [first_line([name, "--version"]) for name in names if has(name)]


def machine():
    """Lines that say where the figures come from."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        model = next((l.split(":")[1].strip() for l in info if l.startswith("model name")), "?")
    kernel = os.uname()
    return [
        f"{os.cpu_count()} cpus, {model}",
        f"{kernel.sysname} {kernel.release} {kernel.machine}",
        first_line([os.environ.get("CC", "gcc"), "--version"]),
    ]


# Runs


def parse(line):
    """The figures of a line of key=value; words without a number are left out."""
    found = {}
    for word in line.split():
        key, _, value = word.partition("=")
        try:
            found[key] = float(value)
        except ValueError:
            pass
    return found


def children_cpu():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def execute(command, timeout=LONGEST_RUN):
    """One run: (status, standard output, standard error, wall seconds, cpu seconds)."""
    cpu, start = children_cpu(), time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
            check=False
        )
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, out, err = 124, "", f"not over after {timeout} seconds"
    except OSError as error:
        status, out, err = 127, "", str(error)
    return status, out, err, time.monotonic() - start, children_cpu() - cpu


def run(command, log, **notes):
    """Runs `command` once, adds it to the log with `notes`, and returns the figures that it
    printed, with wall_s and child_cpu_s; None if it failed.  Failures are told on stderr."""
    command = [str(word) for word in command]
    status, out, err, seconds, cpu = execute(command)
    line = out.strip().split("\n")[-1]
    log.add(command=shlex.join(command), status=status, line=line, wall_s=round(seconds, 4),
            error=err.strip()[-500:] if status else "", **notes)
    if status:
        print(f"error: {shlex.join(command)}: exit {status}: {err.strip()[-200:]}",
              file=sys.stderr)
        return None
    return {**parse(line), "wall_s": seconds, "child_cpu_s": cpu}


def logged_figures(record):
    """What run() returned, from its record in the log, and how many requests it made."""
    if record["status"]:
        return None
    return {**parse(record["line"]), "wall_s": record["wall_s"],
            "requests": record.get("requests", 0)}


def interleave(groups, rounds, log=None, progress=None):
    """Makes `rounds` rounds over all groups and returns the same shape with lists of figures.

    `groups` is {key: {program: subject}}; a subject is called with the number of the round and
    returns figures or None.  A round visits every group once, so a slow minute of the machine
    falls on one pair of many groups, not on all pairs of one.  Within a group the programs run one behind
    the other, and the first one changes with each round."""
    results = {key: {name: [] for name in subjects} for key, subjects in groups.items()}
    for number in range(rounds):
        if log:
            log.add(round=number)
        for key, subjects in groups.items():
            names = list(subjects)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                results[key][name].append(subjects[name](number))
                if progress:
                    progress.step(f"round {number + 1}: {key} {name}")
    return results


class Progress:
    """Steps done and time left, on standard error if that is a terminal."""

    def __init__(self, steps):
        self.steps = steps
        self.done = 0
        self.start = time.monotonic()
        self.shown = sys.stderr.isatty()

    def step(self, text=""):
        self.done += 1
        if not self.shown:
            return
        left = (time.monotonic() - self.start) * (self.steps - self.done) / self.done
        share = 100 * self.done // self.steps
        sys.stderr.write(f"\r\033[K{share} %, {duration(left)} left: {text}")
        sys.stderr.flush()

    def end(self):
        if self.shown:
            sys.stderr.write("\r\033[K")


# Servers


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a server listens: a Unix socket or a port of 127.0.0.1."""

    path: str = ""
    port: int = 0

    @property
    def uri(self):
        if self.path:
            return f"nbd+unix:///?socket={self.path}"
        return f"nbd://127.0.0.1:{self.port}/"

    def listens(self):
        """The kernel's lists of sockets tell, so that no connection has to be made."""
        if self.path:
            end, table, state = self.path, "/proc/net/unix", " 00010000 "
            with open(table, encoding="utf-8") as lines:
                return any(state in line and line.rstrip().endswith(end) for line in lines)
        with open("/proc/net/tcp", encoding="utf-8") as lines:
            return any(f":{self.port:04X} 00000000:0000 0A " in line for line in lines)


def unix_address(directory, name="socket"):
    return Address(path=str(pathlib.Path(directory) / name))


def tcp_address():
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address(port=probe.getsockname()[1])


class Server:
    """A server as a context: listens inside, is stopped by its pid outside."""

    def __init__(self, command, address):
        self.command = [str(word) for word in command]
        self.address = address
        self.uri = address.uri
        self.process = None

    def __enter__(self):
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while not self.address.listens():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"server did not start: {shlex.join(self.command)}")
            time.sleep(0.005)
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def pid(self):
        return self.process.pid

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.address.path:
            pathlib.Path(self.address.path).unlink(missing_ok=True)


def fast_server(address, size=64 * MIB, replies="simple", cpu=None):
    """Our fast server; `cpu` pins it."""
    where = ["--unix", address.path] if address.path else ["--tcp", address.port]
    return Server([*pin(cpu), *program("fastserver"), *where, "--size", size, "--replies", replies],
                  address)


def nbdkit(address, *plugin, options=(), cpu=None):
    """nbdkit(address, "memory", "1G") or nbdkit(address, "file", path, options=["-t", 16])"""
    where = ["-U", address.path] if address.path else ["-i", "127.0.0.1", "-p", address.port]
    return Server([*pin(cpu), "nbdkit", "-f", *where, *options, *plugin], address)


def qemu_nbd(address, path, options=(), cpu=None):
    """qemu-nbd of the raw file at `path`, for up to 64 clients."""
    if address.path:
        where = ["-k", address.path]
    else:
        where = ["-b", "127.0.0.1", "-p", address.port]
    return Server([*pin(cpu), "qemu-nbd", "-f", "raw", "-t", "-e", 64, *where, *options, path],
                  address)


# Text


def duration(seconds):
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def size_name(size):
    """4096 is 4 KiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def number(value):
    """Three digits that matter, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{places}f}"


def table(header, rows):
    """A Markdown table that can be read as plain text too."""
    lines = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header))]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text) + "\n"


# Plots

COLOURS = ["#0060c0", "#d55e00", "#555555", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#000000"]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One diagram: `series` is [(label, [(x, y) or (x, y, low, high), ...]), ...]."""

    title: str
    x: str  # axis labels with units
    y: str
    series: list
    x_log: bool = True
    y_log: bool = False
    x_tics: tuple = ()  # ((label, position), ...); () lets gnuplot choose
    styles: str = "linespoints"


def gnuplot_data(name, points):
    rows = [" ".join(f"{v:g}" for v in point) for point in points]
    return [f"${name} << EOD", *rows, "EOD"]


def gnuplot_panel(panel, number_of_panel):
    text, curves = [], []
    for i, (label, points) in enumerate(panel.series):
        name = f"data_{number_of_panel}_{i}"
        text += gnuplot_data(name, points)
        style = f'lc rgb "{COLOURS[i % len(COLOURS)]}" lw 2 pt {i + 5} ps 0.7'
        curves.append(f'${name} using 1:2 with {panel.styles} {style} title "{label}"')
        if points and len(points[0]) == 4:
            curves.append(f"${name} using 1:2:3:4 with yerrorbars {style} notitle")
    return text + gnuplot_axes(panel) + ["plot " + ", ".join(curves)]


def gnuplot_axes(panel):
    points = [point for _, each in panel.series for point in each]
    least, most = (edge(point[0] for point in points) for edge in (min, max))
    tics = ", ".join(f'"{label}" {at}' for label, at in panel.x_tics)
    large = max(point[1] for point in points) >= 1000
    step = "%.0s%c" if panel.y_log else "%.1s%c"
    return [
        f'set title "{panel.title}"', f'set xlabel "{panel.x}"', f'set ylabel "{panel.y}"',
        "set logscale x" if panel.x_log else "unset logscale x",
        f"set xrange [{least / 1.4}:{most * 1.4}]" if panel.x_log else "set xrange [*:*]",
        "set logscale y" if panel.y_log else "unset logscale y",
        "set yrange [*:*]" if panel.y_log else "set yrange [0:*]",
        f"set format y '{step if large else '%g'}'",
        f"set xtics ({tics}) font ',10'" if tics else "set xtics autofreq font ',10'",
    ]


def plot(path, panels, columns=2):
    """Writes the panels as one SVG with a white background; [] of points are left out.
    Without gnuplot, or without points, nothing is written and False is returned."""
    panels = [dataclasses.replace(p, series=[s for s in p.series if s[1]]) for p in panels]
    panels = [p for p in panels if p.series]
    if not panels or not has("gnuplot"):
        return False
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = [
        f'set terminal svg size {460 * columns},{320 * rows} font "sans-serif,12" '
        'background "#ffffff"',
        f'set output "{path}"',
        "set grid lc rgb '#cccccc'", "set key outside bottom center horizontal",
        f"set multiplot layout {rows},{columns}",
    ]
    for i, panel in enumerate(panels):
        text += gnuplot_panel(panel, i)
    text.append("unset multiplot")
    subprocess.run(["gnuplot"], input="\n".join(text) + "\n", text=True, check=True)
    return True
