"""Compares the results of a module and of its fused form."""

from __future__ import annotations

import torch

__all__ = ["differ_by_rounding"]


def differ_by_rounding(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> bool:
    """Return whether two results have the same shape and differ at most by rounding. The allowed relative difference is
    8 times the eps of the dtype of `a`, or `least` if `least` is larger."""
    if a.shape != b.shape:
        return False
    near = max(least, 8 * torch.finfo(a.dtype).eps)
    return bool(torch.dist(a.float(), b.float()) <= near * a.float().norm())
