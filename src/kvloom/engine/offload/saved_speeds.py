"""Saves the measured speeds of an engine in the folder of a disk tier, and loads them at the next start.

Without them, the first request after a restart computes half of the tokens that a tier has, because the engine cannot
compare loading with computing yet. The file is JSON. A file of another version, model or device is not used.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvloom.tiers.transfers import TierQueue

from .throughput import TimeModel

__all__ = ["SavedSpeeds"]

log = logging.getLogger("kvloom.engine")
VERSION = 1
FILE = "speeds.json"
MAX_BYTES = 1 << 16


class SavedSpeeds:
    """The file with the speeds of one engine. `owner` states the model and the device that were measured."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder, self._owner = folder, owner

    def save(self, times: Mapping[str, TimeModel], queues: Iterable[TierQueue]) -> None:
        """Write the speeds. Replaces an older file at once. A failure is logged, and has no other effect."""
        content = {
            "version": VERSION,
            "owner": self._owner,
            "times": {name: time.values for name, time in times.items()},
            "tiers": {queue.tier.name: queue.throughput.bytes_per_second for queue in queues},
        }
        new = self._folder / f"{FILE}.new"
        try:
            with suppress(FileNotFoundError):
                new.unlink()
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as out:
                json.dump(content, out)
            new.replace(self._folder / FILE)
        except OSError as error:
            log.warning("the measured speeds cannot be saved in %s: %s", self._folder, error)

    def load(self, times: Mapping[str, TimeModel], queues: Iterable[TierQueue]) -> bool:
        """Set the speeds from the file. Return whether the file was used. A damaged file is logged and not used."""
        try:
            file = os.open(self._folder / FILE, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(file, "rb") as data:
                content = json.loads(data.read(MAX_BYTES))
            if (content["version"], content["owner"]) != (VERSION, self._owner):
                return False
            values = {name: _numbers(content["times"][name], TimeModel.VALUES) for name in times}
            rates = {name: _numbers([rate], 1)[0] for name, rate in content["tiers"].items()}
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("the saved speeds in %s are damaged and are not used: %r", self._folder / FILE, error)
            return False
        for name, time in times.items():
            time.values = values[name]
        for queue in queues:
            if rate := rates.get(queue.tier.name):
                queue.throughput.set_estimate(rate)
        return True


def _numbers(given: Any, count: int) -> list[float]:
    """Return the list `given` as floats. Raises ValueError unless it has `count` numbers, all finite and at least 0."""
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(f"{count} numbers were expected")
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one < math.inf:
            raise ValueError(f"{one!r} is not a finite number from 0 on")
    return [float(one) for one in given]
