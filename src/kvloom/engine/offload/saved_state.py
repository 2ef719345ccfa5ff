"""Saves measured speeds and the samples of the eviction policy in the folder of a disk tier. Loads them at the next
start.

| file           | content                                                | without the file, after a restart            |
|----------------|--------------------------------------------------------|----------------------------------------------|
| speeds.json    | measured speeds of prefill, copies and tiers           | the first request computes half of the       |
|                |                                                        | tokens whose pages a tier has                |
| reuse.msgpack  | samples of the eviction policy, if the policy learns   | the policy evicts like LRU at first          |

A file of another version, model or device is not used.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvloom.core import KVCache
from kvloom.tiers.transfers import TierQueue

from .time_model import TimeModel

__all__ = ["SavedState"]

log = logging.getLogger("kvloom.engine")
VERSION = 1
SPEEDS, REUSE = "speeds.json", "reuse.msgpack"
MAX_BYTES = {SPEEDS: 1 << 16, REUSE: 1 << 20}
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class SavedState:
    """The saved files of one engine. `owner` states the model and the device that were measured."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder, self._owner = folder, owner

    def save(self, times: Mapping[str, TimeModel], queues: Iterable[TierQueue], cache: KVCache) -> None:
        """Write the files. Each file replaces its older version atomically. A failure is logged, and has no other
        effect. Takes about 1 ms."""
        head = {"version": VERSION, "owner": self._owner}
        speeds = {
            "times": {name: time.values for name, time in times.items()},
            "tiers": {queue.tier.name: queue.throughput.bytes_per_second for queue in queues},
        }
        self._write(SPEEDS, json.dumps(head | speeds).encode())
        if (learned := cache.save_policy()) is not None:
            self._write(REUSE, msgspec.msgpack.encode({**head, "learned": learned}))

    def load(self, times: Mapping[str, TimeModel], queues: Iterable[TierQueue], cache: KVCache) -> None:
        """Read the files. Set the speeds of `times` and `queues`, and the samples of the eviction policy of `cache`. A
        missing file has no effect. A damaged file is logged and has no effect."""
        with _damage_is_logged(self._folder / SPEEDS):
            self._load_speeds(times, queues)
        with _damage_is_logged(self._folder / REUSE):
            content = msgspec.msgpack.decode(self._read(REUSE))
            if self._is_own(content):
                cache.restore_policy(content["learned"])

    def _load_speeds(self, times: Mapping[str, TimeModel], queues: Iterable[TierQueue]) -> None:
        content = json.loads(self._read(SPEEDS))
        if not self._is_own(content):
            return
        values = {name: _numbers(content["times"][name], TimeModel.VALUES) for name in times}
        rates = {name: _numbers([rate], 1)[0] for name, rate in content["tiers"].items()}
        for name, time in times.items():
            time.values = values[name]
        for queue in queues:
            if rate := rates.get(queue.tier.name):
                queue.throughput.set_estimate(rate)

    def _is_own(self, content: Mapping[str, Any]) -> bool:
        return (content["version"], content["owner"]) == (VERSION, self._owner)

    def _read(self, name: str) -> bytes:
        file = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(file, "rb") as data:
            return data.read(MAX_BYTES[name])

    def _write(self, name: str, content: bytes) -> None:
        new = self._folder / f"{name}.new"
        try:
            with suppress(FileNotFoundError):
                new.unlink()
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "wb") as out:
                out.write(content)
            new.replace(self._folder / name)
        except OSError as error:
            log.warning("what was learned cannot be saved in %s: %s", self._folder / name, error)


@contextmanager
def _damage_is_logged(path: Path) -> Iterator[None]:
    """Suppress the errors of a missing file, and log those of a damaged one."""
    try:
        yield
    except FileNotFoundError:
        pass
    except DAMAGE as error:
        log.warning("%s is damaged and is not used: %r", path, error)


def _numbers(given: Any, count: int) -> list[float]:
    """Return the list `given` as floats. Raises ValueError unless it has `count` numbers, all finite and at least 0."""
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(f"{count} numbers were expected")
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one < math.inf:
            raise ValueError(f"{one!r} is not a finite number from 0 on")
    return [float(one) for one in given]
