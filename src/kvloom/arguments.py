"""What the command line's arguments have in common: the parser, types, words that several commands say, a progress bar.

A command lives in its room's command.py. It knows argparse and this; nothing here knows a command.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn
from urllib.parse import urlsplit

from kvloom.core.sizes import parse_size

__all__ = [
    "BATCH_INVARIANT",
    "DEVICE",
    "DTYPE",
    "GRAMMAR_MEMORY",
    "GRAMMAR_SECONDS",
    "KV_DTYPE",
    "KV_SCALES",
    "LOAD_FORMAT",
    "LOAD_FORMATS",
    "MODEL",
    "POOL",
    "SERVER",
    "THREADS",
    "TIER",
    "Parser",
    "device",
    "dtype",
    "interpreter",
    "number",
    "parse_size",
    "progress_bar",
    "said",
    "server",
    "size",
    "token_ids",
    "whole",
]

BATCH_INVARIANT = "the same tokens for the same seed on a GPU, too, whatever runs beside; slower"
DEVICE = "cpu, cuda or cuda:N (default: a GPU if there is one)"
DTYPE = "of the weights: bfloat16, float16 or float32 (default: auto, their own)"
KV_DTYPE = "bf16, fp16, fp32, int8 or fp8 (default: the model's own); by kind of layers: fp8,sliding=bf16"
KV_SCALES = "scales of int8 and fp8: dynamic (default), checkpoint, or a file of `kvloom calibrate`"
MODEL = "a folder with a Hugging Face model, its hub id, or one that comes along: kvloom-llama, kvloom-hybrid"
POOL = "memory for the cache (default: 1GiB; on a GPU what is left)"
LOAD_FORMAT = (
    "'random' makes the weights up: MODEL may be a config.json or a name of `kvloom plan --list`, too"
)
LOAD_FORMATS = ("auto", "random")
SERVER = "the server, like 127.0.0.1:8000 or https://host/path (default: http://127.0.0.1:8000)"
THREADS = "CPU threads of the model (default: $KVLOOM_THREADS, $OMP_NUM_THREADS, or all cores but one)"
TIER = (
    "a place for pages below the pool, nearest first: host:64GiB, disk:/path:1TiB, or redis://, mooncake://, nixl://, s3:// and "
    "peer:// with an address and ?capacity=64GiB&…; repeatable (docs/tiers.md)"
)
GRAMMAR_SECONDS = "CPU time that one grammar may take to compile, and again for each step (default: 2)"
GRAMMAR_MEMORY = "memory that one grammar may take; all together may take eight times that (default: 256MiB)"
MOST = 10**12
DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    """argparse's, for every command: what is wrong is told in one line, with the way out."""

    def error(self, message: str) -> NoReturn:
        said = re.sub(r"^argument (\S+): ", r"\1: ", message)
        said = re.sub(r"^the following arguments are required: (.*)", r"\1 must be given", said)
        if choice := re.fullmatch(r"(.*)invalid choice: (.*) \(choose from (.*)\)", said):
            said = f"{choice[1]}{choice[2]} is none of {choice[3].replace(chr(39), '')}"
        unknown = re.fullmatch(r"unrecognized arguments: (.*)", said)
        if unknown is not None:
            flags = [flag for action in self._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[1].split()[0].partition("=")[0], flags, n=1)
            said = f"{unknown[1]} is not understood" + (f"; did you mean {close[0]}?" if close else "")
        self.exit(BAD_INPUT, f"{self.prog}: {said} (`{self.prog} --help` tells more)\n")


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is out of range; it must be {least} to {most:,}")
        return value

    return parse


def number(least: float, most: float = MOST, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a number from `least` (with `above`: more than that) to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most or (above and value == least):
            said = f"above {least:g}" if above else f"{least:g} or more"
            said += "" if most == MOST else f", and {most:g} at most"
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {said}")
        return value

    return parse


def size(text: str) -> int:
    """An argparse type: bytes, as people write them."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def dtype(text: str) -> str:
    """An argparse type: what weights are kept in, by torch's name; the short names of --kv-dtype are understood."""
    found = DTYPES.get(text.lower(), text.lower())
    if found not in DTYPES.values():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not known; give bfloat16, float16, float32 or auto (the checkpoint's own)"
        )
    return found


def server(text: str) -> str:
    """An argparse type: where a server is. Without a scheme it is http."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        fine = False
    if not fine or re.search(r"\s", url):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address of a server; give one like http://127.0.0.1:8000"
        )
    return url.rstrip("/")


def interpreter(text: str) -> str:
    """An argparse type: a Python that has what is measured beside kvloom."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(
            f"there is no interpreter {text!r}; give the path of a python, like PEERS/bin/python"
        )
    return text


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


def said(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install 'kvloom[engine,serve,grammar]' has what commands need"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


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
