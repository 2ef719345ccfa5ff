"""Shared parts of the command line: the parser, argument types, help texts, a progress bar.

Commands import this module. This module imports no command.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from kvloom.combinations import refused
from kvloom.core import parse_size

__all__ = [
    "DEVICE",
    "DTYPE",
    "KV_DTYPE",
    "MODEL",
    "SERVER",
    "THREADS",
    "Parser",
    "device",
    "dtype",
    "elapsed",
    "error_text",
    "interpreter",
    "memory",
    "number",
    "parse_size",
    "progress_bar",
    "server",
    "size",
    "token_ids",
    "whole",
]

DEVICE = "cpu, cuda or cuda:N (default: a GPU if there is one)"
DTYPE = "dtype of the weights: bfloat16, float16 or float32 (default: auto, the checkpoint's)"
KV_DTYPE = "dtype of the KV cache: bf16, fp16, fp32, int8 or fp8 (default: the model's); per kind of layer: fp8,sliding=bf16"
MODEL = "folder of a Hugging Face model, its hub id, or an embedded model: kvloom-llama, kvloom-draft; kvloom-hybrid in a source checkout"
SERVER = "address of the server, such as 127.0.0.1:8000 or https://host/path (default: http://127.0.0.1:8000)"
THREADS = "CPU threads for the model (default: $KVLOOM_THREADS, $OMP_NUM_THREADS, or all cores but one)"
MAX_NUMBER = 10**12
DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
BAD_INPUT = 2
PIPELINES = ("--pipeline-parallel", "--pipeline-parallel-size", "--pp-size", "--pp")
"""Arguments of other engines that divide a model by layers. Their error states the reason why kvloom has none."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that prints errors in one line."""

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument (\S+): ", r"\1: ", message)
        text = re.sub(r"^the following arguments are required: (.*)", r"\1 must be given", text)
        if choice := re.fullmatch(r"(.*)invalid choice: (.*) \(choose from (.*)\)", text):
            text = f"{choice[1]}{choice[2]} is not one of {choice[3].replace(chr(39), '')}"
        unknown = re.fullmatch(r"unrecognized arguments: (.*)", text)
        if unknown is not None:
            given = unknown[1].split()[0].partition("=")[0]
            if given in PIPELINES:
                self.exit(BAD_INPUT, f"{self.prog}: {refused('pipeline parallel')}\n")
            flags = [flag for action in self._actions for flag in action.option_strings]
            close = difflib.get_close_matches(given, flags, n=1)
            text = f"{unknown[1]} is not a known argument" + (f"; did you mean {close[0]}?" if close else "")
        self.exit(BAD_INPUT, f"{self.prog}: {text} (see `{self.prog} --help`)\n")


def whole(least: int, most: int = MAX_NUMBER) -> Callable[[str], int]:
    """Return an argparse type for an integer from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is out of range; it must be {least} to {most:,}")
        return value

    return parse


def number(least: float, most: float = MAX_NUMBER, above: bool = False) -> Callable[[str], float]:
    """Return an argparse type for a number from `least` to `most`. With `above`, the number must be greater than
    `least`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most or (above and value == least):
            range_ = f"above {least:g}" if above else f"{least:g} or more"
            range_ += "" if most == MAX_NUMBER else f", and {most:g} at most"
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {range_}")
        return value

    return parse


def size(text: str) -> int:
    """An argparse type for a size in bytes, such as 64GiB."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def memory(text: str) -> int:
    """An argparse type for a size of at least 1 MiB. A smaller number is refused, because its unit was probably
    forgotten."""
    found = size(text)
    if found < 1 << 20:
        hint = f"; did you mean {text}GiB?" if text.isdigit() else ""
        raise argparse.ArgumentTypeError(f"{text} is {found:,} bytes{hint}")
    return found


def dtype(text: str) -> str:
    """An argparse type for a weight dtype: auto, a name of torch such as bfloat16, or a short name such as bf16.
    Return auto or torch's name."""
    found = DTYPES.get(text.lower(), text.lower())
    if found not in DTYPES.values():
        raise argparse.ArgumentTypeError(
            f"unknown dtype {text!r}; use bfloat16, float16, float32 or auto (the checkpoint's)"
        )
    return found


def server(text: str) -> str:
    """An argparse type for the address of a server. The default scheme is http."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port
        fine = False
    if not fine or re.search(r"\s", url):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the address of a server; use one like http://127.0.0.1:8000"
        )
    return url.rstrip("/")


def interpreter(text: str) -> str:
    """An argparse type for a Python interpreter. Returns an absolute path, which is valid in every working directory."""
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"no interpreter {text!r}; use the path of a python, such as PEERS/bin/python"
        )
    return str(Path(found).absolute())  # not resolved: the link in a virtual environment selects its packages


def device(text: str) -> str:
    """An argparse type for a device: cpu, cuda or cuda:N."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use cpu, cuda or cuda:N")
    return text


def token_ids(text: str) -> list[int]:
    """An argparse type for token ids, separated by blanks or commas."""
    try:
        return [int(token) for token in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f'--tokens {text!r} must be integers, such as "5 6 7"') from None


def error_text(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install 'kvloom[engine,serve,grammar]'"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextmanager
def elapsed(words: str, shown: bool) -> Iterator[None]:
    """If `shown`, show `words` and the elapsed seconds on stderr until the `with` statement ends."""
    done = threading.Event()

    def show() -> None:
        began = time.monotonic()
        while not done.wait(0.5):
            print(
                f"\r\x1b[K{words} ... {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True
            )

    thread = threading.Thread(target=show, daemon=True)
    if shown:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if shown:
            thread.join()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(words: str, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """If `shown`, show a progress bar on stderr, and yield a function that sets its done and total counts. Otherwise
    yield None."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(words, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
