"""The models that come with the package, and the names by which commands take them: kvloom-llama, kvloom-hybrid, …"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["embedded", "folder_of"]

PREFIX = "kvloom-"


def embedded(name: str = "llama") -> str:
    """The folder of an embedded model. Raises ValueError where this installation has none of that name."""
    root = Path(str(resources.files("kvloom.models"))) / "embedded"
    if not (root / name / "config.json").is_file():
        found = ", ".join(PREFIX + path.parent.name for path in sorted(root.glob("*/config.json"))) or "none"
        raise ValueError(
            f"this installation has no embedded model {PREFIX + name!r} (it has {found}): name a MODEL, a folder or hub id"
        )
    return str(root / name)


def folder_of(model: str) -> str:
    """Where a model is that may be named as an embedded one; what is a folder, or has no such name, stays as it is."""
    if not model.startswith(PREFIX) or Path(model).exists():
        return model
    return embedded(model.removeprefix(PREFIX))
