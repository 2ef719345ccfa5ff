"""Lets SGLang be imported beside a torch without CUDA.

SGLang imports torchvision for images. torchvision's wheels need the libraries of a torch with CUDA, and without them
its import fails, because its operators are missing. Nothing here calls them, so empty definitions are enough.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

__all__ = ["define_operators"]

_library: Any = None


def define_operators() -> None:
    """Define torchvision's operators, if its own library cannot be loaded."""
    global _library  # noqa: PLW0603  the definitions live as long as this object
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _library is not None:
        return
    try:
        ctypes.CDLL(str(Path(spec.origin).parent / "_C.so"))
    except OSError:
        _library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
