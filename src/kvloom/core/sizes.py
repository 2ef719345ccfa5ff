"""Parses and formats sizes in bytes."""

from __future__ import annotations

import re

__all__ = ["format_bytes", "parse_size"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Return the number of bytes in a text such as "80GiB", "80G" (the same), "80GB" (decimal), "1.5TiB" or
    "1000000". Raises ValueError for other text.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    unit, suffix = ("", "") if match is None else (match[2].lower(), (match[3] or "").lower())
    if match is None or (suffix == "ib" and not unit):
        raise ValueError(f"size {text!r} is not understood; write it like 80GiB, 80GB, 512MiB or 1000000")
    size = int(float(match[1]) * (1000 if suffix == "b" and unit else 1024) ** _POWERS[unit])
    if size <= 0:
        raise ValueError(f"size {text!r} is nothing; give a positive size and write it like 80GiB")
    if size >= 1 << 63:
        raise ValueError(f"size {text!r} is more than any machine has; write it like 80GiB")
    return size


def format_bytes(count: float) -> str:
    """Return a size as text: 327,680 → "320 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
