"""The `kvloom` command: its subcommands, and error handling common to all.

A subcommand is a module with `arguments(parser)` and `run(args)`, imported when it is used.
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
"""The exit code that shells expect after Ctrl-C."""
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("kvloom.plan.command", "Compare the KV memory of a model under three allocation schemes."),
    "generate": ("kvloom.engine.generate_command", "Generate text from prompts offline."),
    "chat": ("kvloom.serve.chat_command", "Chat in the terminal with a local model or a server."),
    "calibrate": ("kvloom.engine.calibrate_command", "Compute static scales for a quantised KV cache."),
    "serve": ("kvloom.serve.serve_command", "Start an OpenAI-compatible server."),
    "route": ("kvloom.cluster.router.command", "Start a router: one endpoint over many workers."),
    "deploy": ("kvloom.cluster.deploy.command", "Start a cluster on Ray Serve from cluster.toml."),
    "explain": ("kvloom.serve.explain_command", "Explain why a request hit or missed the cache."),
    "top": (
        "kvloom.serve.dashboard.command",
        "Show a server's cache or a router's fleet live in the terminal, like /dashboard.",
    ),
    "share": (
        "kvloom.tiers.peer.share_command",
        "Share host memory between servers: --tier peer://HOST:PORT.",
    ),
    "tiers": ("kvloom.tiers.tiers_command", "Show, verify and purge the pages of tiers."),
    "replay": ("kvloom.replay.command", "Replay recorded traffic: hit rates, cache sizes."),
    "config": ("kvloom.config_command", "Show the configuration of a command, and where each value is from."),
    "doctor": ("kvloom.doctor.command", "Check packages, GPU, kernels and limits, and name what to repair."),
    "bench": ("kvloom.bench.command", "Run benchmarks of kvloom and its peers."),
    "completion": ("kvloom.completion", "Print a script that completes commands and options in a shell."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 on success, 2 for invalid input (reported in one line), or 130 after
    Ctrl-C. A command may return other codes: `kvloom doctor` returns 1 if it finds a fault that stops a command from
    working."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    name, *argv = (sys.argv[1:] if argv is None else list(argv)) or [""]
    # Warnings of transformers concern code that kvloom does not run.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from kvloom.arguments import Parser  # imports numpy: inside the try for Ctrl-C
        from kvloom.config_file import CONFIGURABLE, apply_configuration

        if name not in COMMANDS:
            _no_command(name)
        command = import_module(COMMANDS[name][0])
        parser = Parser(prog=f"kvloom {name}", description=COMMANDS[name][1])
        command.arguments(parser)
        if name in CONFIGURABLE:
            argv, _ = apply_configuration(name, parser, argv)
        # Prompts of `generate` and models of `serve` may follow options; `bench` hands its arguments on as they are.
        parse = parser.parse_intermixed_args if name in ("generate", "serve") else parser.parse_args
        code = int(command.run(parse(argv)) or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe (`| head`): discard buffered output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "kvloom").startswith("kvloom"):
            raise
        from kvloom.arguments import error_text

        print(f"kvloom {name}: {error_text(error)}", file=sys.stderr)
        return BAD_INPUT
    except SystemExit as ended:  # argparse has printed the message
        return int(ended.code or 0)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # put the shell's prompt on its own line
        return INTERRUPTED
    return code


def _no_command(word: str) -> NoReturn:
    """Handle a first argument that is not a command, and exit. Prints help, the version, or an error that suggests a
    command or lists all commands."""
    from argparse import RawDescriptionHelpFormatter
    from difflib import get_close_matches
    from importlib.metadata import version

    from kvloom.arguments import Parser

    lines = "\n".join(f"  {name:10} {words}" for name, (_, words) in COMMANDS.items())
    parser = Parser(
        prog="kvloom",
        usage="kvloom COMMAND ...",
        description="One KV-cache system for LLM inference.",
        epilog=f"commands:\n{lines}\n\n`kvloom COMMAND --help` shows the arguments of a command.",
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
    hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
    parser.error(f"unknown command {word!r}; {hint}")


if __name__ == "__main__":
    sys.exit(main())
