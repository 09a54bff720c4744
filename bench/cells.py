"""What is measured: the cells, and the programs in each of them."""
import typing

from measure import KIB, MIB, size_name

UNIX, TCP, NBDKIT, QEMU = "Unix", "TCP", "nbdkit memory", "qemu-nbd"
FAST = (UNIX, TCP)
REAL = (NBDKIT, QEMU)

SIZES = (512, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
DEPTHS = (1, 16, 64)
OPS = ("read", "write")
MAIN = ((512, 16), (4 * KIB, 1), (4 * KIB, 64), (256 * KIB, 16))  # cells of the quick run
BUFFERS = tuple(512 << i for i in range(10))  # 512 bytes to 256 KiB
CURVES = (512, 4 * KIB, 16 * KIB)  # sizes of requests of the read-ahead curve
IMAGE = 1024 * MIB  # that is copied
COPY_TARGETS = ("null:", "/dev/shm")

# Each is a program of build/bench with options of its own.
BINARIES = {
    "ours": ("nbdh", "--no-init"),
    "libnbd": ("libnbd", "--no-init"),
    "floor": ("floor", "--no-init"),
    "ours, default": ("nbdh",),
    "libnbd, default": ("libnbd",),
}


class Cell(typing.NamedTuple):
    """One workload against one server."""

    server: str
    op: str
    size: int
    depth: int

    def __str__(self):
        return f"{self.server}, {self.op} {size_name(self.size)}, depth {self.depth}"


class Copy(typing.NamedTuple):
    """A copy of an image from nbdkit's file plugin."""

    to: str

    def __str__(self):
        return f"copy to {self.to}"


class Curve(typing.NamedTuple):
    """Reads of one size with buffers of many sizes; the buffers are its programs."""

    size: int

    def __str__(self):
        return f"read-ahead of {size_name(self.size)} reads"


def is_fast(key):
    return isinstance(key, Cell) and key.server in FAST


def cleared(key):
    return is_fast(key) and key.op == "read" and key.size in (256 * KIB, MIB)


def grid(quick):
    """The cells against the fast server."""
    every = [(size, depth) for size in SIZES for depth in DEPTHS]
    return [Cell(server, op, size, depth) for server in FAST for op in OPS
            for size, depth in (MAIN if quick else every)]


def real_cells(quick):
    if quick:
        return []
    return [Cell(server, op, 4 * KIB, depth) for server in REAL for op in OPS for depth in DEPTHS]


def keys():
    """{name in the log: key} of everything that is measured in rounds."""
    every = [*grid(False), *real_cells(False), *map(Curve, CURVES), *map(Copy, COPY_TARGETS)]
    return {str(key): key for key in every}


def programs_of(cell):
    names = ["ours", "libnbd", "floor"]
    if cleared(cell):
        names += ["ours, default", "libnbd, default"]
    return names
