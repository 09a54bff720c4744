"""An nbdkit plugin that serves a file past the page cache: nbdkit python bench/direct.py disk=FILE

Requests run in parallel, as many as nbdkit has threads.  O_DIRECT wants memory, offset and
size aligned to blocks: each thread has aligned memory of its own (a mapping of pages), and
the block size is told to the client.  A range is zeroed by writing zeroes from one aligned
buffer of limited size.
"""
import mmap
import os
import threading

import nbdkit

API_VERSION = 2
BLOCK = 4096
LARGEST = 32 * 1024 * 1024
ZEROES = memoryview(mmap.mmap(-1, 1024 * 1024))

disk = ""
threads = threading.local()


def config(key, value):
    global disk
    if key != "disk":
        raise RuntimeError(f"unknown parameter: {key}")
    disk = os.path.abspath(value)


def config_complete():
    if not disk:
        raise RuntimeError("disk=FILE is needed")


def thread_model():
    return nbdkit.THREAD_MODEL_PARALLEL


def open(readonly):  # pylint: disable=redefined-builtin
    return os.open(disk, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_DIRECT)


def close(fd):
    os.close(fd)


def get_size(fd):
    return os.lseek(fd, 0, os.SEEK_END)


def block_size(fd):
    return (BLOCK, 64 * 1024, LARGEST)


def can_multi_conn(fd):
    return True


def can_fua(fd):
    return nbdkit.FUA_NATIVE


def aligned(size):
    """Memory of this thread, at the start of a page."""
    memory = getattr(threads, "memory", None)
    if memory is None or len(memory) < size:
        memory = threads.memory = memoryview(mmap.mmap(-1, size))
    return memory[:size]


def transfer(call, fd, memory, offset):
    """Calls preadv or pwritev until all of it is moved."""
    while memory:
        moved = call(fd, [memory], offset)
        if moved == 0:
            raise OSError(5, "the file is shorter than it was")
        memory, offset = memory[moved:], offset + moved


def stable(fd, flags):
    if flags & nbdkit.FLAG_FUA:
        os.fdatasync(fd)


def pread(fd, buffer, offset, flags):
    memory = aligned(len(buffer))
    transfer(os.preadv, fd, memory, offset)
    buffer[:] = memory


def pwrite(fd, buffer, offset, flags):
    memory = aligned(len(buffer))
    memory[:] = buffer
    transfer(os.pwritev, fd, memory, offset)
    stable(fd, flags)


def zero(fd, count, offset, flags):
    while count > 0:
        part = min(count, len(ZEROES))
        transfer(os.pwritev, fd, ZEROES[:part], offset)
        count, offset = count - part, offset + part
    stable(fd, flags)


def flush(fd, flags):
    os.fdatasync(fd)
