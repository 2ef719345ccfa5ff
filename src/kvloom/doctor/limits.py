"""Limits of the system that matter to a server: open files, locked memory, shared memory, free disk."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvloom.core import format_bytes, parse_size

from .problem import Problem

__all__ = ["Limit", "inspect_limits"]

OPEN_FILES = 4096 + 256
"""Number of files that a server may open: the default of `--max-connections`, plus 256 for the server itself."""
LOCKED_MEMORY = 64 << 20
SHARED_MEMORY = 256 << 20
"""Smallest size of /dev/shm without a warning. A container has 64 MiB by default, which is too small for UCX and
NCCL."""
FREE_DISK = 1 << 30


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of the system, such as the number of open files. `value` is None if there is no limit. `detail` describes
    the limit."""

    name: str
    value: int | None
    unit: str
    detail: str = ""

    def shown(self) -> str:
        """Return the value in words."""
        if self.value is None:
            return "unlimited"
        return format_bytes(self.value) if self.unit == "bytes" else f"{self.value:,}"


def inspect_limits(tiers: Iterable[str], rdma: bool) -> tuple[list[Limit], list[Problem]]:
    """Return limits and problems. `tiers` are the configured tiers. `rdma` states whether NIXL or Mooncake is
    installed. Only these two need locked memory, which they register with a network card."""
    limits, problems = [], []
    files = _hard(resource.RLIMIT_NOFILE)
    limits.append(
        Limit("open files", files, "files", "the hard limit, to which kvloom serve raises the soft one")
    )
    if files is not None and files < OPEN_FILES:
        what = f"at most {files:,} files may be open, and 4,096 connections need {OPEN_FILES:,}"
        fix = f"ulimit -Hn {OPEN_FILES} as root, LimitNOFILE= of a systemd unit, or kvloom serve --max-connections {max(files - 256, 1)}"
        problems.append(Problem(what, fix))
    locked = _hard(resource.RLIMIT_MEMLOCK)
    limits.append(Limit("locked memory", locked, "bytes", "for RDMA transfers of NIXL and Mooncake"))
    if rdma and locked is not None and locked < LOCKED_MEMORY:
        what = f"only {format_bytes(locked)} of memory may be locked: RDMA cannot register a pool"
        problems.append(Problem(what, "ulimit -l unlimited, or LimitMEMLOCK=infinity of a systemd unit"))
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        limits.append(Limit("shared memory", size, "bytes", str(shared)))
        if size < SHARED_MEMORY:
            what = f"{shared} has {format_bytes(size)}, and transfers between processes may need {format_bytes(SHARED_MEMORY)}"
            problems.append(Problem(what, "docker run --shm-size=1g, or mount -o remount,size=1G /dev/shm"))
    for folder, purpose, wanted in _folders(tiers):
        free = shutil.disk_usage(_existing(folder)).free
        limits.append(Limit("free disk", free, "bytes", f"{folder}, {purpose}"))
        if free < wanted:
            what = f"{folder} has {format_bytes(free)} free, and {purpose} may need {format_bytes(wanted)}"
            problems.append(Problem(what, f"free some of it, or choose another folder ({purpose})"))
    return limits, problems


def _hard(name: int) -> int | None:
    _, hard = resource.getrlimit(name)
    return None if hard == resource.RLIM_INFINITY else hard


def _folders(tiers: Iterable[str]) -> list[tuple[Path, str, int]]:
    """Return the folders that kvloom may fill: the folders of disk tiers, the cache of the Hugging Face hub, and the
    folder for temporary files. Each comes with its purpose and the number of bytes that should be free."""
    found = []
    for tier in tiers:
        kind, _, rest = tier.partition("?")[0].partition(":")
        folder, _, size = rest.rpartition(":")
        if kind == "disk" and folder:
            try:
                found.append((Path(folder), f"the tier disk:{folder}", parse_size(size)))
            except ValueError:  # `kvloom serve` reports it
                continue
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    found.append((Path(home), "downloaded models ($HF_HOME)", FREE_DISK))
    found.append((Path(tempfile.gettempdir()), "temporary files ($TMPDIR)", FREE_DISK >> 3))
    return found


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
