"""What the command line's arguments have in common: their types, words that several commands say, a progress bar.

A command lives in its room's command.py. It knows argparse and this; nothing here knows a command.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvloom.core.sizes import parse_size

__all__ = [
    "BATCH_INVARIANT",
    "KV_DTYPE",
    "KV_SCALES",
    "MODEL",
    "THREADS",
    "TIER",
    "device",
    "parse_size",
    "progress_bar",
    "token_ids",
    "whole",
]

BATCH_INVARIANT = "the same tokens for the same seed on a GPU, too, whatever runs beside; slower"
KV_DTYPE = "bf16, fp16, fp32, int8 or fp8 (default: the model's own); by kind of layers: fp8,sliding=bf16"
KV_SCALES = "scales of int8 and fp8: dynamic (default), checkpoint, or a file of `kvloom calibrate`"
MODEL = "a folder with a Hugging Face model, its hub id, or one that comes along: kvloom-llama, kvloom-hybrid"
THREADS = "CPU threads of the model (default: $KVLOOM_THREADS, $OMP_NUM_THREADS, or all cores but one)"
TIER = "a place for pages below the pool, nearest first: host:64GiB, disk:/path:1TiB, …; repeatable (docs/tiers.md)"
MOST = 10**12


def whole(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to MOST."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= MOST:
            raise argparse.ArgumentTypeError(f"{value} is out of range; it must be {least} to {MOST:,}")
        return value

    return parse


def device(text: str) -> str:
    """An argparse type: where a model runs."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; give cpu, cuda or cuda:N")
    return text


def token_ids(text: str) -> list[int]:
    """Token ids as they are written on a command line."""
    try:
        return [int(token) for token in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f'--tokens {text!r} must be whole numbers, like "5 6 7"') from None


@contextmanager
def progress_bar(words: str, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr; what is given takes how much of how much is done."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(words, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
