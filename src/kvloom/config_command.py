"""`kvloom config show`: prints the arguments of a command with their values, and the source of each value."""

from __future__ import annotations

import argparse
import json
from importlib import import_module

from kvloom.arguments import Parser
from kvloom.config_file import CONFIGURABLE, apply_configuration, model_tables

__all__ = ["arguments", "run"]

EPILOG = """\
A TOML file sets arguments by their names; [engine] is for every command that runs an engine:

  [engine]
  eviction-policy = "adaptive"
  tier = ["host:8GiB", "disk:/var/kvloom:100GiB"]
  [serve]
  model = "path/to/model"
  port = 8001
  [models.qwen]                  # one of several models of `kvloom serve`, by its name
  model = "path/to/qwen"
  kv-dtype = "fp8"

  kvloom serve --config kvloom.toml        or KVLOOM_CONFIG=kvloom.toml

An environment variable sets one argument: KVLOOM_PORT=8001, KVLOOM_EVICTION_POLICY=lru, KVLOOM_TIER="host:8GiB disk:/a:1TiB".
Arguments win over environment variables, those over [COMMAND], that over [engine]. [models.NAME] wins over all of them;
it has the arguments of an engine, and the chat template and parsers of a model."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("action", choices=("show",), help="show: print every argument of a command with its value and source")
    add("command", nargs="?", choices=CONFIGURABLE, default="serve", help="the command (default: serve)")
    add("--config", metavar="FILE", help="TOML file to read (default: $KVLOOM_CONFIG)")
    add("--changed", action="store_true", help="show only values that are not the defaults")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from kvloom.cli import COMMANDS

    parser = Parser(prog=f"kvloom {args.command}")
    import_module(COMMANDS[args.command][0]).arguments(parser)
    argv = [] if args.config is None else [f"--config={args.config}"]
    words, found = apply_configuration(args.command, parser, argv)
    values = vars(parser.parse_known_args([*words, *_required(parser)])[0])
    rows = [
        (name, values[name], found[name].origin if name in found else "default")
        for name in values
        if name in {action.dest for action in parser._actions if action.option_strings or action.nargs == "?"}
        and name not in ("help", "config", "json")
        and (name in found or not args.changed)
    ]
    if args.command == "serve":
        for model, (origin, entries) in model_tables(args.config).items():
            rows += [(f"{model}.{key.replace('-', '_')}", value, origin) for key, value in entries.items()]
    if args.json:
        print(json.dumps({name: {"value": value, "from": origin} for name, value, origin in rows}, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("argument", "value", "from", box=None, pad_edge=False)
    for name, value, origin in rows:
        table.add_row(name.replace("_", "-"), "" if value is None else str(value), Text(origin))
    Console(soft_wrap=True, markup=False).print(table)
    return 0


def _required(parser: argparse.ArgumentParser) -> list[str]:
    """Return a dummy value for each required positional argument. Without these values, the parser would refuse the
    other arguments."""
    return ["-" for action in parser._actions if not action.option_strings and action.nargs is None]
