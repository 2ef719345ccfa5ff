"""Values for command-line arguments from a TOML file and from environment variables.

    default  <  [engine] in the file  <  [COMMAND] in the file  <  KVLOOM_NAME in the environment  <  argument

    [engine]                          # every command that runs an engine
    eviction-policy = "adaptive"
    tier = ["host:8GiB"]
    [serve]                           # `kvloom serve` alone
    port = 8001
    [models.qwen]                     # one model of `kvloom serve`; overrides all other values
    model = "Qwen/Qwen3-8B"
    kv-dtype = "fp8"

In the first line, a value overrides all values to its left. Keys are argument names without the dashes. The values are
inserted before the given arguments, so argparse checks all of them.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

__all__ = [
    "CONFIGURABLE",
    "Source",
    "add_config_argument",
    "apply_configuration",
    "configured_models",
    "model_tables",
]

CONFIGURABLE = ("serve", "generate", "chat", "route")
"""Commands that read configuration files and environment variables."""
SHARED = "engine"
"""The table of the file whose values apply to all commands that run an engine."""
MODELS = "models"
"""The table of the file that contains one table per model: [models.NAME]."""
PREFIX = "KVLOOM_"
READ_BY_COMMANDS = ("api_key",)
"""Arguments that this module does not set from the environment. Their commands read the variable themselves."""
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_HELP = "TOML file with values for these arguments (default: $KVLOOM_CONFIG; see `kvloom config --help`)"


@dataclass(frozen=True, slots=True)
class Source:
    """The value of one argument, from a configuration file or an environment variable. `words` are the command-line
    arguments that set the same value. `origin` names the file or variable in errors."""

    words: tuple[str, ...]
    origin: str


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE`."""
    parser.add_argument("--config", metavar="FILE", help=_HELP)


def apply_configuration(
    command: str, parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[str], dict[str, Source]]:
    """Return `argv`, preceded by options with the values from the file and the environment. Also return these values as
    a dictionary. Its keys are the destinations of the arguments in argparse.

    Positional arguments are not inserted. Their configured values become defaults in `parser`.
    """
    found = configured_arguments(command, parser, argv, os.environ)
    flags = {action.dest for action in parser._actions if action.option_strings}
    parser.set_defaults(**{name: source.words[0] for name, source in found.items() if name not in flags})
    words = [word for name, source in found.items() if name in flags for word in source.words]
    return [*words, *argv], found


def configured_models(
    path: str | None, parser: argparse.ArgumentParser, given: argparse.Namespace
) -> dict[str, argparse.Namespace]:
    """Return the arguments of each model that has a table [models.NAME] in the file, by the name of the model.

    The arguments of a model are those in `given`, overridden by its table. `parser` has the arguments that a table may
    contain. If the table does not set `model`, the argument `model` is None in the result.
    """
    actions = {_key(action): action for action in parser._actions if _is_configurable(action)}
    found = {}
    for name, (origin, entries) in model_tables(path).items():
        values = argparse.Namespace(**{**vars(given), "model": None})
        words: list[str] = []
        for key, value in entries.items():
            action = actions[_known(key, actions, origin, "a model")]
            words += _words(action, value, key)
            if isinstance(action, argparse._AppendAction) or action.nargs == 0:
                setattr(values, action.dest, [] if action.nargs != 0 else False)
        found[name] = parser.parse_args(words, values)
    return found


def model_tables(path: str | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the tables [models.NAME] of the configuration file, by name. Each is a pair: a text that locates the table
    in error messages, and its entries. If `path` is None, reads the file in $KVLOOM_CONFIG.
    """
    path = path or os.environ.get(f"{PREFIX}CONFIG")
    found = {}
    for name, entries in (_content(path).get(MODELS, {}) if path else {}).items():
        if not isinstance(entries, dict):
            raise ValueError(f"{path}: [{MODELS}] {name!r} must be a table: [{MODELS}.{name}]")
        found[name] = f"{path} [{MODELS}.{name}]", entries
    return found


def configured_arguments(
    command: str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Source]:
    """Return the values from the file and the environment, by the argument's destination in argparse. Raises ValueError
    for unknown keys.

    Arguments that are present in `argv` are left out."""
    given = [word.partition("=")[0] for word in argv if word.startswith("-") and word != "-"]
    actions = {_key(action): action for action in parser._actions if _is_configurable(action)}
    found: dict[str, Source] = {}
    path = _config_path(argv) or environ.get(f"{PREFIX}CONFIG")
    if path:
        for table, key, value in _read(path, command, actions):
            found[actions[key].dest] = Source(_words(actions[key], value, key), f"{path} [{table}]")
    for key, action in actions.items():
        name = PREFIX + key.upper().replace("-", "_")
        if name in environ and action.dest not in READ_BY_COMMANDS:
            found[action.dest] = Source(
                _words(action, _from_text(action, environ[name], name), name), f"${name}"
            )
    for action in actions.values():
        flags = action.option_strings
        if any(len(word) > 2 and flag.startswith(word) for word in given for flag in flags) or any(
            word in flags for word in given
        ):
            found.pop(action.dest, None)
    return found


def _key(action: argparse.Action) -> str:
    longest = max(action.option_strings, key=len, default=action.dest)
    return longest.lstrip("-").replace("_", "-")


def _is_configurable(action: argparse.Action) -> bool:
    if action.dest in ("help", "config"):
        return False
    return bool(action.option_strings) or action.nargs == "?"


def _config_path(argv: Sequence[str]) -> str | None:
    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _read(path: str, command: str, actions: Mapping[str, argparse.Action]) -> list[tuple[str, str, Any]]:
    """Return table, key and value of each entry of the file that applies to `command`."""
    tables = (SHARED, *CONFIGURABLE, MODELS)
    found: list[tuple[str, str, Any]] = []
    for table, entries in _content(path).items():
        if table not in tables or not isinstance(entries, dict):
            raise ValueError(f"{path}: {table!r} is not one of the tables [{'], ['.join(tables)}]")
        if table not in (SHARED, command):
            continue
        for key, value in entries.items():
            found.append((table, _known(key, actions, f"{path}: [{table}]", f"`kvloom {command}`"), value))
    return sorted(found, key=lambda entry: entry[0] != SHARED)


def _content(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def _known(key: str, actions: Mapping[str, argparse.Action], where: str, owner: str) -> str:
    """Return the argument name that a key of the file stands for. Raises ValueError if `owner` has no argument with
    this name."""
    name = key.replace("_", "-")
    if name not in actions:
        close = get_close_matches(name, actions, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f" of {owner}"
        raise ValueError(f"{where} {key!r} is not an argument{hint}")
    return name


def _words(action: argparse.Action, value: Any, name: str) -> tuple[str, ...]:
    """Return the command-line words that set an argument to `value`."""
    flag = max(action.option_strings, key=len, default="")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{name} {value!r} must be true or false")
        return (flag,) if value else ()
    repeatable = isinstance(action, argparse._AppendAction)
    if isinstance(value, list) != repeatable:
        raise ValueError(f"{name} {value!r} must be {'a list' if repeatable else 'one value'}")
    values = value if repeatable else [value]
    if any(isinstance(one, bool | dict | list) for one in values):
        raise ValueError(f"{name} {value!r} must be a text or a number")
    return tuple(f"{flag}={one}" if flag else str(one) for one in values)


def _from_text(action: argparse.Action, text: str, name: str) -> Any:
    """Return the value of an environment variable. The items of a list are separated by blanks."""
    if action.nargs == 0:
        if text.lower() not in (*_YES, *_NO):
            raise ValueError(f"${name} {text!r} must be 1 or 0")
        return text.lower() in _YES
    return text.split() if isinstance(action, argparse._AppendAction) else text
