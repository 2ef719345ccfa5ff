"""Models known by name, configs on disk, and embedded models (small models whose weights the package contains). Needs
no network, because names refer to files of this installation."""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from .config_reading import ModelError
from .layer_specs import ModelSpec, model_spec

__all__ = ["embedded", "embedded_models", "folder_of", "is_gguf", "known_models", "load_config", "load_spec"]

_MODELS = "kvloom.models"
"""The package with the folders `configs` and `embedded`."""
PREFIX = "kvloom-"
"""Prefix of the names of embedded models."""


@cache
def known_models() -> tuple[str, ...]:
    """Return the names that `load_config` accepts, sorted."""
    files = resources.files(_MODELS).joinpath("configs").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_config(model: str) -> dict[str, Any]:
    """Return the config of a known model, of a config.json, or of a folder with a config.json."""
    if model.lower() in known_models():
        shipped = resources.files(_MODELS).joinpath("configs", f"{model.lower()}.json")
        return _parse(shipped.read_text(encoding="utf-8"), model)
    path = Path(folder_of(model))
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        raise ModelError(_unknown(model))
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def load_spec(model: str, kv_dtype: str | None = None) -> ModelSpec:
    """Read the config of `model` and return its layer specs, with a readable name."""
    path = Path(model)
    name = path.parent.name or path.stem if path.name == "config.json" else path.name.removesuffix(".json")
    return model_spec(load_config(model), name.lower() if name.lower() in known_models() else name, kv_dtype)


def embedded(name: str = "llama") -> str:
    """Return the folder of an embedded model. Raises ValueError if it is not installed."""
    if PREFIX + name not in embedded_models():
        found = ", ".join(embedded_models()) or "none"
        raise ValueError(
            f"this installation has no embedded model {PREFIX + name!r} (it has {found}): name a MODEL, a folder or hub id; "
            "a source checkout (pip install -e .) has all embedded models"
        )
    return str(_embedded() / name)


def embedded_models() -> tuple[str, ...]:
    """Return the names of the embedded models, sorted."""
    return tuple(PREFIX + path.parent.name for path in sorted(_embedded().glob("*/config.json")))


def _embedded() -> Path:
    return Path(str(resources.files(_MODELS))) / "embedded"


def folder_of(model: str) -> str:
    """Return the folder of the embedded model with this name. If there is no such model, return `model` unchanged."""
    if not model.startswith(PREFIX) or Path(model).exists():
        return model
    return embedded(model.removeprefix(PREFIX))


def is_gguf(model: str) -> bool:
    """Return whether `model` is an existing GGUF file, which has a config, weights and a tokenizer."""
    return Path(model).suffix == ".gguf" and Path(model).is_file()


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{source} holds a {type(config).__name__}; a config is a JSON object")
    return config


def _unknown(model: str) -> str:
    looks_like_path = model.endswith(".json") or model.startswith((".", "/", "~"))
    if looks_like_path:
        return (
            f"there is no file {model!r}; give the path of a config.json, or a name from `kvloom plan --list`"
        )
    short = model.rsplit("/", 1)[-1].lower()
    close = difflib.get_close_matches(short, known_models(), n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    return f"model {model!r} is not known: {hint}`kvloom plan --list` shows all names; a path to a config.json works too"
