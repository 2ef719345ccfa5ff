"""The models that come with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["embedded"]


def embedded(name: str = "llama") -> str:
    """The folder of an embedded model. Raises ValueError where this installation has none of that name."""
    folder = Path(str(resources.files("kvloom.models"))) / "embedded" / name
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"this installation has no embedded model {name!r}: name a MODEL to serve, a folder or hub id"
        )
    return str(folder)
