"""The memory that `kvloom bench tiers` copies, and the baselines without a tier: memcpy, files with O_DIRECT, and TCP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvloom.tiers import Form, Objects, aligned_bytes
from kvloom.tiers.disk import Files
from kvloom.tiers.remote import ByteStream

__all__ = ["FILE_ROUNDS", "WAIT_SECONDS", "Memory", "Side", "address", "memcpy", "raw", "tcp"]

WAIT_SECONDS = 120.0
_IO_BYTES = 512 << 10  # best size of reads from the plain file, and number of reading threads
_READ_THREADS = 8
_CONNECTIONS = 2
FILE_ROUNDS = 4  # number of rounds in one file, for the tier and for the plain file
_FAR_SIDE = """
import socket, sys, threading
from kvloom.tiers.remote import ByteStream
part = int(sys.argv[1]) // int(sys.argv[2])
def serve(stream):
    memory, verb = memoryview(bytearray(part)), memoryview(bytearray(1))
    try:
        while True:
            stream.wait_readable()
            stream.begin()
            stream.receive(verb)
            if verb[0] == ord("w"):
                stream.receive(memory)
                stream.send([b"w"])
            else:
                stream.send([memory])
    except OSError:
        pass
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
threads = []
for _ in range(int(sys.argv[2])):
    stream = ByteStream(server.accept()[0], 120.0)
    threads.append(threading.Thread(target=serve, args=(stream,)))
    threads[-1].start()
for thread in threads:
    thread.join()
"""
_rounds = count()


@dataclass(frozen=True, slots=True)
class Side:
    write: Callable[[], None]
    read: Callable[[], None]


class Memory:
    """Pages to write (`source`), memory to read them into (`target`), and the keys under which this round stores the
    pages.
    """

    def __init__(self, page: int, total: int) -> None:
        self.page, self.total, self.count = page, total, total // page
        self.form = Form("bf16", "LKTHD", page, max(min(page, 64 << 10), page // 32))
        self.source = np.frombuffer(aligned_bytes(total), np.uint8)
        self.target = np.frombuffer(aligned_bytes(total), np.uint8)
        self.source[:] = np.random.default_rng(0).integers(0, 256, total, dtype=np.uint8)
        self.target[:] = 0
        self.starts = np.arange(self.count) * page
        self.objects = self.fresh()

    def fresh(self) -> Objects:
        """Choose new hashes for the objects, so that no tier has stored them."""
        salt = f"{os.getpid()} {next(_rounds)}"
        names = [blake2b(f"{salt} {i}".encode(), digest_size=16).digest() for i in range(self.count)]
        self.objects = Objects(names, 0, self.form)
        _ = self.objects.keys
        return self.objects

    def check(self) -> None:
        """Raise RuntimeError if the bytes read differ from those written."""
        if not np.array_equal(self.source, self.target):
            raise RuntimeError("the bytes read differ from those written")
        self.target[:] = 0


def memcpy(memory: Memory) -> Side:
    buffer = np.frombuffer(aligned_bytes(memory.total), np.uint8)
    buffer[:] = 0

    def write() -> None:
        buffer[:] = memory.source

    def read() -> None:
        memory.target[:] = buffer

    return Side(write, read)


def raw(memory: Memory, path: Path, sync: bool, files: Files | None = None) -> Side:
    """Return a baseline that writes and reads plain files with O_DIRECT. With `sync`, a write ends with fdatasync. One
    file has the bytes of FILE_ROUNDS rounds. If `files` is given, its methods write and read the files.
    """
    files = files or Files(-1)
    source, target, total = memory.source.data, memory.target.data, memory.total
    pool = ThreadPoolExecutor(_READ_THREADS)
    fd, rounds = -1, 0

    def write() -> None:
        nonlocal fd, rounds
        begin = rounds % FILE_ROUNDS * total
        if not begin:  # allocate space for several rounds at once, like a tier does; included in its time
            fd = os.open(f"{path}-{rounds}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(fd, 0, FILE_ROUNDS * total)
        for at in range(0, total, 16 << 20):
            files.write(fd, [source[at : at + (16 << 20)]], begin + at)
        if sync:
            os.fdatasync(fd)
        rounds += 1

    def read() -> None:
        begin = (rounds - 1) % FILE_ROUNDS * total

        def some(first: int) -> None:
            for at in range(first * _IO_BYTES, total, _READ_THREADS * _IO_BYTES):
                files.read(fd, [target[at : at + _IO_BYTES]], begin + at)

        list(pool.map(some, range(_READ_THREADS)))

    return Side(write, read)


def tcp(memory: Memory) -> tuple[Side, Callable[[], None]]:
    """Return a baseline that sends the bytes to another process over plain TCP connections, and a function that closes
    the connections."""
    process = subprocess.Popen(
        [sys.executable, "-c", _FAR_SIDE, str(memory.total), str(_CONNECTIONS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port, part = int(process.stdout.readline()), memory.total // _CONNECTIONS
    streams = [
        ByteStream(socket.create_connection(("127.0.0.1", port)), WAIT_SECONDS) for _ in range(_CONNECTIONS)
    ]
    pool = ThreadPoolExecutor(_CONNECTIONS)

    def write() -> None:
        def some(number: int) -> None:
            stream = streams[number]
            stream.begin()
            stream.send([b"w", memory.source[number * part : (number + 1) * part].data])
            stream.receive(memoryview(bytearray(1)))

        list(pool.map(some, range(_CONNECTIONS)))

    def read() -> None:
        def some(number: int) -> None:
            stream = streams[number]
            stream.begin()
            stream.send([b"r"])
            stream.receive(memory.target[number * part : (number + 1) * part].data)

        list(pool.map(some, range(_CONNECTIONS)))

    def end() -> None:
        for stream in streams:
            stream.close()
        process.communicate(timeout=30)

    return Side(write, read), end


def address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
