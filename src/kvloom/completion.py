"""`kvloom completion`: prints a script that completes kvloom's commands and options in a shell."""

from __future__ import annotations

import argparse
from importlib import import_module

from kvloom.arguments import Parser

__all__ = ["arguments", "full_parser", "run"]

SHELLS = ("bash", "zsh", "fish")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    parser.epilog = (
        "bash: kvloom completion bash > ~/.local/share/bash-completion/completions/kvloom; "
        "zsh: kvloom completion zsh > DIR/_kvloom, where DIR is in $fpath; "
        "fish: kvloom completion fish > ~/.config/fish/completions/kvloom.fish"
    )


def run(args: argparse.Namespace) -> int:
    """Print the script. Return the exit status."""
    import shtab

    parser = full_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        for action in command._actions:
            if action.metavar in ("FILE", "TRACE"):
                action.complete = shtab.FILE
            elif action.metavar == "MODEL":
                action.complete = shtab.DIRECTORY
    print(shtab.complete(parser, shell=args.shell))
    return 0


def full_parser() -> argparse.ArgumentParser:
    """Return one parser with all commands. Imports the module of each command."""
    from kvloom.cli import COMMANDS

    parser = Parser(prog="kvloom", description="One KV-cache system for LLM inference.")
    parser.add_argument("--version", action="store_true", help="show kvloom's version and exit")
    commands = parser.add_subparsers(dest="command", parser_class=Parser)
    for name, (module, words) in COMMANDS.items():
        import_module(module).arguments(commands.add_parser(name, description=words, help=words))
    return parser
