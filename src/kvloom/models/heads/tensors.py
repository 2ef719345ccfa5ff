"""Reads some tensors of a checkpoint folder. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvloom.models.specs import ModelError

__all__ = ["read_tensors"]


def read_tensors(folder: Path, renamed: Callable[[str], str | None]) -> dict[str, torch.Tensor]:
    """Read the safetensors files of a folder, and return the tensors by their new names. `renamed` returns the new
    name of a tensor, or None if the tensor is not needed. Raises ModelError for files that cannot be read."""
    found: dict[str, torch.Tensor] = {}
    for path in _files(folder, renamed):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if (new := renamed(name)) is not None:
                    found[new] = file.get_tensor(name)
    return found


def _files(folder: Path, renamed: Callable[[str], str | None]) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return sorted({folder / file for name, file in places.items() if renamed(name) is not None})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not an index of shards: {error!r}") from error
    if single.is_file():
        return [single]
    hint = ""
    if any((folder / name).exists() for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        hint = "; pytorch_model.bin is a pickle, which is never read: convert it to safetensors"
    raise ModelError(f"{folder}: the folder has neither {single.name} nor {index.name}{hint}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
