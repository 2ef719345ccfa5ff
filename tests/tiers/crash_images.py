"""Records the file operations of a disk tier, and builds the directories that a crash at any operation may leave.

A killed process leaves all finished operations, and a part of the running write. A power cut also loses operations
that were not synced, in any order. `Recording` is the only way from the tier to its files, so the list is complete.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.tiers.disk import Files

SECTOR, BLOCK = 512, 4096
POWER_CUTS = ("lost", "sizes", "heads", "bodies", "sectors", "directory")
"""After a power cut, relative to the last syncs: all is lost; only file sizes survive; only the first block of each
write; only the other blocks; a random half of the sectors; all data, but an old directory."""


@dataclass(frozen=True)
class Operation:
    call: str
    name: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Log:
    """Operations in order. `acknowledged` are the pages that the tier acknowledged before an operation. `steps` are
    the first operation of each step of the script, and `present` the pages that the tier found after it."""

    operations: list[Operation] = field(default_factory=list)
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    present: list[frozenset[int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, operation: Operation) -> None:
        with self.lock:
            self.operations.append(operation)

    def required(self, done: int) -> frozenset[int]:
        """Return the pages that must survive a crash after `done` operations: acknowledged, and neither evicted nor
        dropped by the running step."""
        running = max(at for at, first in enumerate(self.steps) if first <= done)
        acknowledged = {page for at, page in self.acknowledged if at <= done}
        before = self.present[running - 1] if running else frozenset[int]()
        within = {page for at, page in self.acknowledged if self.steps[running] <= at <= done}
        return frozenset(acknowledged & (before | within) & self.present[running])


class Recording(Files):
    """The files of a directory. Every change is added to the log after it has succeeded."""

    def __init__(self, directory: int, log: Log) -> None:
        super().__init__(directory)
        self._log, self._names = log, dict[int, str]()

    def open(self, name: str, create: bool, direct: bool) -> int:
        fd = super().open(name, create, direct)
        self._names[fd] = name
        if create:
            self._log.add(Operation("create", name))
        return fd

    def remove(self, name: str) -> None:
        super().remove(name)
        self._log.add(Operation("remove", name))

    def allocate(self, fd: int, size: int) -> None:
        super().allocate(fd, size)
        self._log.add(Operation("allocate", self._names[fd], size))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._log.add(Operation("truncate", self._names[fd], size))

    def write(self, fd: int, pieces: Sequence[Any], offset: int) -> None:
        super().write(fd, pieces, offset)
        self._log.add(Operation("write", self._names[fd], offset, b"".join(map(bytes, pieces))))

    def sync(self, fd: int) -> None:
        self._log.add(Operation("sync", self._names[fd]))

    def sync_directory(self) -> None:
        self._log.add(Operation("sync_directory"))


class Unsynced(Files):
    """Files without syncs, because nothing crashes while an image is checked."""

    def sync(self, fd: int) -> None:
        return

    def sync_directory(self) -> None:
        return


def _apply(content: bytearray, operation: Operation, kept: Sequence[tuple[int, int]] | None = None) -> None:
    """Apply a change to a file. `kept` are the ranges of a write that reach the disk."""
    at = operation.offset
    if operation.call == "write":
        for start, stop in [(0, len(operation.data))] if kept is None else kept:
            if len(content) < at + stop:
                content.extend(bytes(at + stop - len(content)))
            content[at + start : at + stop] = operation.data[start:stop]
    elif operation.call == "allocate" and len(content) < at:
        content.extend(bytes(at - len(content)))
    elif operation.call == "truncate":
        content.extend(bytes(max(0, at - len(content))))
        del content[at:]


@dataclass(eq=False)
class _Inode:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    unsynced: list[Operation] = field(default_factory=list)

    def after_power_cut(self, kind: str, seed: int) -> bytes:
        content, chance = bytearray(self.synced), random.Random(seed)
        for operation in self.unsynced if kind != "lost" else ():
            size = len(operation.data)
            kept = {
                "sizes": [],
                "heads": [(0, min(BLOCK, size))],
                "bodies": [(min(BLOCK, size), size)],
                "sectors": [
                    (at, min(at + SECTOR, size)) for at in range(0, size, SECTOR) if chance.random() < 0.5
                ],
                "directory": [(0, size)],
            }[kind]
            _apply(content, operation, kept)
        return bytes(content)


Image = dict[str, bytes]


class Disk:
    """The state of a directory after some operations: what programs see, and what was synced."""

    def __init__(self) -> None:
        self._names: dict[str, _Inode] = {}
        self._synced_names: dict[str, _Inode] = {}

    def apply(self, operation: Operation) -> None:
        if operation.call == "create":
            self._names[operation.name] = _Inode()
        elif operation.call == "remove":
            del self._names[operation.name]
        elif operation.call == "sync_directory":
            self._synced_names = dict(self._names)
        elif operation.call == "sync":
            inode = self._names[operation.name]
            inode.synced, inode.unsynced = bytes(inode.content), []
        else:
            inode = self._names[operation.name]
            inode.unsynced.append(operation)
            _apply(inode.content, operation)

    def killed(self) -> Image:
        return {name: bytes(inode.content) for name, inode in self._names.items()}

    def torn(self, write: Operation) -> Iterator[Image]:
        """Yield the directory with every part of a write, in steps of a sector."""
        for stop in range(SECTOR, len(write.data), SECTOR):
            content = bytearray(self._names[write.name].content)
            _apply(content, write, [(0, stop)])
            yield {**self.killed(), write.name: bytes(content)}

    def power_cut(self, kind: str, seed: int) -> Image:
        names = self._synced_names if kind in ("lost", "directory") else self._names
        return {name: inode.after_power_cut(kind, seed) for name, inode in names.items()}


@dataclass(frozen=True)
class Crash:
    """One directory after a crash, and the pages that it must still have."""

    where: str
    image: Image
    required: frozenset[int]

    def write_to(self, folder: Path) -> None:
        folder.mkdir()
        for name, content in self.image.items():
            (folder / name).write_bytes(content)


def crashes(log: Log, power: bool) -> Iterator[Crash]:
    """Yield every different directory of a crash: before the first operation, after each operation, and inside each
    write. With `power`, also after power cuts at the same points."""
    disk, seen = Disk(), set[tuple[object, ...]]()
    for done in range(len(log.operations) + 1):
        required = log.required(done)
        found = [("killed", disk.killed())]
        if power:
            found += [(f"power cut, {kind}", disk.power_cut(kind, done)) for kind in POWER_CUTS]
        if done < len(log.operations) and log.operations[done].call == "write":
            found += [("torn", image) for image in disk.torn(log.operations[done])]
        for what, image in found:
            digest = (required, *((name, hash(content)) for name, content in sorted(image.items())))
            if digest not in seen:
                seen.add(digest)
                after = log.operations[done - 1].call if done else "nothing"
                yield Crash(f"{what} after operation {done} ({after})", image, required)
        if done < len(log.operations):
            disk.apply(log.operations[done])
