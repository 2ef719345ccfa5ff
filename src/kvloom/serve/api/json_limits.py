"""Limits on the JSON of a request.

`check_structure` counts the lists, objects and items of a large body before it is decoded. Decoding millions of small
lists would hold Python's interpreter lock for seconds. `check_values` counts the values and the nesting of a field
after decoding.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvloom.serve.errors import bad_request

__all__ = [
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_ITEMS",
    "MAX_VALUES",
    "check_structure",
    "check_values",
    "paused_gc",
]

MAX_DEPTH = 64
"""Largest nesting of lists and objects, because templates and parsers recurse into them."""
MAX_VALUES = 1 << 17
"""Limit of values (items of lists and objects) in one nested field."""
MAX_CONTAINERS = 1 << 18
"""Largest number of lists, objects and keys of objects in a body, all together."""
MAX_ITEMS = 1 << 20
"""Limit of items in all lists and objects of a body."""


def check_structure(body: bytes) -> None:
    """Raise ApiError for a body with too many lists, objects or items. Takes about 8 ms per MB, without decoding."""
    if len(body) <= MAX_CONTAINERS:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    characters = np.frombuffer(plain, np.uint8)
    quotes = np.cumsum(characters == ord('"'), dtype=np.uint8)  # wraps around: only the lowest bit counts
    outside = characters[(quotes & 1) == 0]

    def count(marks: str) -> int:
        return sum(int(np.count_nonzero(outside == ord(mark))) for mark in marks)

    if (containers := count("[{:")) > MAX_CONTAINERS:
        raise bad_request(
            f"the JSON has {containers:,} lists, objects and keys; the limit is {MAX_CONTAINERS:,}: send fewer"
        )
    if (items := count(",")) > MAX_ITEMS:
        raise bad_request(
            f"the JSON has {items:,} items in its lists and objects; the limit is {MAX_ITEMS:,}: send fewer"
        )


def check_values(values: Iterable[Any], name: str, param: str | None = None) -> int:
    """Return the total number of characters of the texts in `values`. Raises ApiError for too many values, or for
    values nested too deeply."""
    characters = count = depth = 0
    level: list[Any] = list(values)
    while level:
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, str):
                characters += len(value)
            elif isinstance(value, dict | list):
                count += len(value)
                if count > MAX_VALUES:
                    raise bad_request(
                        f"{name} has more than {MAX_VALUES:,} values, the limit: send fewer", param or name
                    )
                if depth >= MAX_DEPTH:
                    raise bad_request(
                        f"{name} is nested more than {MAX_DEPTH} levels deep, the limit: use fewer levels",
                        param or name,
                    )
                deeper += value
                if isinstance(value, dict):
                    deeper += value.values()
        depth += 1
        level = deeper
    return characters


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause Python's garbage collection until the `with` block ends. Otherwise many collections would run while many
    objects are created, and take long.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
