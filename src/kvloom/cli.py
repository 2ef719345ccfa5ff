"""The `kvloom` command: the table of its subcommands, and what is the same for all of them.

A subcommand's arguments and body are `arguments(parser)` and `run(args)` of the module in its row, which is imported when it
is asked for.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]

BAD_INPUT = 2
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("kvloom.plan.command", "Memory of a model and a load under three schemes."),
    "generate": ("kvloom.engine.command", "Let a model go on from prompts, once."),
    "calibrate": ("kvloom.engine.calibrate_command", "Make static scales for a quantised KV cache."),
    "serve": ("kvloom.serve.command", "An OpenAI-compatible server."),
    "explain": ("kvloom.serve.explain_command", "Why a request hit the cache or missed it."),
    "top": (
        "kvloom.serve.dashboard.command",
        "A server's cache, live in this terminal; the same is at /dashboard.",
    ),
    "share": ("kvloom.tiers.command", "Host memory for the servers of a machine: --tier peer://HOST:PORT."),
    "replay": ("kvloom.replay.command", "Recorded traffic through the cache: hit rates, sizes."),
    "bench": ("kvloom.bench.command", "Measure kvloom beside its peers."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 on input that makes no sense, which is told in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    argv = sys.argv[1:] if argv is None else list(argv)
    # Of transformers' remarks only errors: the others are about code that is not run here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        args = _parser(argv[0] if argv else None).parse_args(argv)
        code = int(import_module(COMMANDS[args.command][0]).run(args) or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left (`| head`): what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "kvloom").startswith("kvloom"):
            raise
        print(f"kvloom {argv[0]}: {_said(error)}", file=sys.stderr)
        return BAD_INPUT
    return code


def _said(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install 'kvloom[engine,serve,grammar]' has what commands need"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """All commands, and the arguments of the one that is asked for."""
    parser = argparse.ArgumentParser(prog="kvloom", description="One KV-cache system for LLM inference.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, words) in COMMANDS.items():
        command = commands.add_parser(name, help=words, description=words)
        if name == asked:
            import_module(module).arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
