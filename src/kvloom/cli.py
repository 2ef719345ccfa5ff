"""The `kvloom` command: the table of its subcommands, and what is the same for all of them.

A subcommand's arguments and body are `arguments(parser)` and `run(args)` of the module in its row, which is imported when it
is asked for.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

__all__ = ["main"]

BAD_INPUT = 2
INTERRUPTED = 130
"""What a shell makes of a command that Ctrl-C ended."""
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("kvloom.plan.command", "Memory of a model and a load under three schemes."),
    "generate": ("kvloom.engine.generate_command", "Let a model go on from prompts, once."),
    "calibrate": ("kvloom.engine.calibrate_command", "Make static scales for a quantised KV cache."),
    "serve": ("kvloom.serve.serve_command", "An OpenAI-compatible server."),
    "explain": ("kvloom.serve.explain_command", "Why a request hit the cache or missed it."),
    "top": (
        "kvloom.serve.dashboard.command",
        "A server's cache, live in this terminal; the same is at /dashboard.",
    ),
    "share": (
        "kvloom.tiers.peer.share_command",
        "Host memory for the servers of a machine: --tier peer://HOST:PORT.",
    ),
    "replay": ("kvloom.replay.command", "Recorded traffic through the cache: hit rates, sizes."),
    "bench": ("kvloom.bench.command", "Measure kvloom beside its peers."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 on input that makes no sense, which is told in one line; 130 where
    Ctrl-C ended it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    name, *argv = (sys.argv[1:] if argv is None else list(argv)) or [""]
    # Of transformers' remarks only errors: the others are about code that is not run here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from kvloom.arguments import Parser  # numpy comes with it: Ctrl-C may come meanwhile

        if name not in COMMANDS:
            _tell(name)
        command = import_module(COMMANDS[name][0])
        parser = Parser(prog=f"kvloom {name}", description=COMMANDS[name][1])
        command.arguments(parser)
        code = int(command.run(parser.parse_args(argv)) or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left (`| head`): what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "kvloom").startswith("kvloom"):
            raise
        from kvloom.arguments import said

        print(f"kvloom {name}: {said(error)}", file=sys.stderr)
        return BAD_INPUT
    except SystemExit as ended:  # argparse has said what is to be said
        return int(ended.code or 0)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell's next line begins on its own
        return INTERRUPTED
    return code


def _tell(word: str) -> NoReturn:
    """Answer to what is no command, and end: help, the version, or which commands there are."""
    from argparse import RawDescriptionHelpFormatter
    from difflib import get_close_matches
    from importlib.metadata import version

    from kvloom.arguments import Parser

    lines = "\n".join(f"  {name:10} {words}" for name, (_, words) in COMMANDS.items())
    parser = Parser(
        prog="kvloom",
        usage="kvloom COMMAND ...",
        description="One KV-cache system for LLM inference.",
        epilog=f"commands:\n{lines}\n\n`kvloom COMMAND --help` tells what each can be told.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show kvloom's version and exit")
    if not word:
        parser.print_help(sys.stderr)
        parser.exit(BAD_INPUT)
    if word.startswith("-"):
        parser.parse_args([word])
        print(f"kvloom {version('kvloom')}")
        parser.exit()
    close = get_close_matches(word, COMMANDS, n=1)
    said = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
    parser.error(f"there is no command {word!r}; {said}")


if __name__ == "__main__":
    sys.exit(main())
