"""Numbers, sizes and times as text, for terminals."""

from __future__ import annotations

import time

__all__ = ["format_ago", "format_bytes", "format_count", "format_percent", "format_seconds"]


def format_count(number: float) -> str:
    """Return a number as text. From 1,000 on it has a unit letter."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def format_percent(value: float | None) -> str:
    """Return a share as a percentage."""
    return "-" if value is None else f"{value:.0%}"


def format_bytes(size: float) -> str:
    """Return a size in bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"


def format_seconds(value: float | None) -> str:
    """Return a duration as text, such as "35 ms" or "02:10:00"."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.1f} ms" if value < 0.01 else f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.3g} s"
    return time.strftime(
        "%H:%M:%S" if value < 86400 else f"{int(value // 86400)} d %H:%M", time.gmtime(value)
    )


def format_ago(value: float) -> str:
    """Return the time since an event as text."""
    return "now" if value < 1.5 else format_seconds(round(value))
