"""A key-value store in a dict, for tests of tiers over stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloom.tiers import Outcome
from kvloom.tiers.remote import Destination, Store, Usage, ValueRange


class MemoryStore(Store):
    """One connection; connections with the same `values` share a store."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self.values = values

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.values for key in keys]

    def get(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        lengths = []
        for number, wanted in enumerate(ranges):
            value = self.values.get(wanted.key, b"")
            value = value[wanted.start : wanted.stop or len(value)]
            lengths.append(len(value) or -1)
            at = 0
            for piece in (destination(number, len(value)) or ()) if value else ():
                piece[:] = value[at : at + len(piece)]
                at += len(piece)
        return lengths

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        for key, pieces in items:
            self.values[key] = b"".join(bytes(piece) for piece in pieces)
        return [Outcome.OK] * len(items)

    def remove(self, keys: Sequence[bytes]) -> int:
        return sum(self.values.pop(key, None) is not None for key in keys)

    def usage(self) -> Usage:
        return Usage(len(self.values), sum(map(len, self.values.values())), 0)

    def close(self) -> None:
        return
