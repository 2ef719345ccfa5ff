"""Writes the reference pages from the parsers and docstrings: `python tools/reference.py`.

docs/reference-cli.md has the arguments of every command, with their key in a configuration file and their environment
variable. docs/reference-python.md has the public names of the packages. A test compares both pages with the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from kvloom.arguments import Parser
from kvloom.bench.command import BENCHMARKS
from kvloom.cli import COMMANDS
from kvloom.config_file import CONFIGURABLE

__all__ = ["PAGES", "cli_page", "main", "python_page"]

DOCS = Path(__file__).parent.parent / "docs"
GENERATED = "`python tools/reference.py` writes this page from the code.\n"
PACKAGES = {
    "kvloom.core": "Bookkeeping of the cache, for other engines. See [library.md](library.md).",
    "kvloom.tiers": "Tiers, transfers and encodings. See [tiers.md](tiers.md).",
    "kvloom.engine": "The engine and its configuration. See [engine.md](engine.md).",
}
ENGINE_COMMANDS = ("generate", "chat", "serve")
"""Commands that share the arguments of an engine."""


# -- commands ---------------------------------------------------------------------------------------


def cli_page() -> str:
    """Return the page of all commands and their arguments."""
    parts = [
        "# Reference: commands\n",
        GENERATED,
        (
            f"The commands {', '.join(f'`{name}`' for name in CONFIGURABLE)} also read a configuration file and the environment: "
            "the argument `--pool` is the key `pool` in the file and the variable `KVLOOM_POOL`. `kvloom config` shows "
            "each value and where it is from.\n"
        ),
        "| command | what it does |\n|---|---|\n"
        + "\n".join(f"| [`kvloom {name}`](#kvloom-{name}) | {what} |" for name, (_, what) in COMMANDS.items())
        + "\n",
    ]
    tables = {name: _argument_rows(_parser(name)) for name in COMMANDS}
    shared = [row for row in tables["generate"] if all(row in tables[name] for name in ENGINE_COMMANDS)]
    for name, (_, what) in COMMANDS.items():
        parts.append(f"## kvloom {name}\n\n{what}\n")
        rows = tables[name]
        if name in ENGINE_COMMANDS:
            rows = [row for row in rows if row not in shared]
            parts.append("The command also has the [arguments of an engine](#arguments-of-an-engine).\n")
        if name == "bench":
            listed = "\n".join(f"| `{bench}` | {about} |" for bench, about in BENCHMARKS.items())
            parts.append(f"| benchmark | measures |\n|---|---|\n{listed}\n")
            parts.append("`kvloom bench BENCHMARK --help` lists the arguments of a benchmark.\n")
        elif name == "tiers":
            parts += _subcommands(_parser(name))
        elif rows:
            parts.append(_table(rows))
    commands = ", ".join(f"`kvloom {name}`" for name in ENGINE_COMMANDS)
    parts.append(f"## Arguments of an engine\n\n{commands} have these arguments, too.\n\n{_table(shared)}")
    return "\n".join(parts)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"kvloom {name}")
    import_module(COMMANDS[name][0]).arguments(parser)
    return parser


def _subcommands(parser: argparse.ArgumentParser) -> list[str]:
    """Return a heading, a description and a table for each subcommand of a parser."""
    (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return [
        f"### {verb.prog}\n\n{verb.description}\n\n{_table(_argument_rows(verb))}"
        for verb in action.choices.values()
    ]


def _table(rows: list[str]) -> str:
    return "| argument | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


def _argument_rows(parser: argparse.ArgumentParser) -> list[str]:
    rows = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        values = action.metavar or (
            "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        )
        value = " ".join(values) if isinstance(values, tuple) else str(values)
        takes_value = action.nargs != 0
        if not names:
            names, takes_value = f"`{value}`", False
        shown = f"{names} `{value}`" if takes_value else names
        words = (action.help or "") % {
            "default": action.default,
            "prog": parser.prog,
            **{k: v for k, v in vars(action).items() if k not in ("default",)},
        }
        rows.append(f"| {shown.replace('|', chr(92) + '|')} | {_cell(words)} |")
    return rows


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


# -- Python -----------------------------------------------------------------------------------------


def python_page() -> str:
    """Return the page of the public names: `kvloom` with its methods, then a table for each package."""
    parts = ["# Reference: Python\n", GENERATED, "## kvloom\n"]
    package: Any = import_module("kvloom")
    for name in package.__all__:
        parts += _described(name, getattr(package, name))
    for name, about in PACKAGES.items():
        module: Any = import_module(name)
        rows = [f"| `{one}` | {_summary(getattr(module, one))} |" for one in sorted(module.__all__)]
        parts.append(f"## {name}\n\n{about}\n\n| name | what |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _described(name: str, found: Any) -> list[str]:
    """Return heading, signature and docstring of a class, and a table of its methods."""
    signature = _signature(found)
    parts = [f"### kvloom.{name}\n", f"```\n{name}{signature}\n```\n", _prose(inspect.getdoc(found) or "")]
    methods = [
        (method, value)
        for method, value in vars(found).items()
        if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    ]
    if methods:
        rows = [
            f"| `{method}{_signature(value) if inspect.isfunction(value) else ''}` | {_summary(value)} |"
            for method, value in methods
        ]
        parts.append("| method or property | what |\n|---|---|\n" + "\n".join(rows) + "\n")
    return parts


def _signature(found: Any) -> str:
    """Return the names of the parameters, without types: `(prompts, params=…, *, tenant=…)`."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return ""
    words, star = [], False
    for one in parameters:
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        prefix = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        words.append(prefix + one.name + ("" if one.default is one.empty else "=…"))
    return f"({', '.join(words)})"


def _prose(text: str) -> str:
    """Return a docstring as Markdown. An indented block becomes a code block of the page."""
    return text.replace("<", "&lt;") + "\n"


def _summary(found: Any) -> str:
    """Return the first sentence of a docstring, or the kind of a value without one."""
    own = inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, property)
    text = (inspect.getdoc(found) or "") if own else ""
    if not own:
        return "a value or type"
    sentence = re.split(r"(?<=\.)\s", text.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[0]
    return _cell(sentence)


PAGES = {"reference-cli.md": cli_page, "reference-python.md": python_page}


def main() -> int:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
