"""Argmax of each row, for greedy sampling. CPU tensors run in torch (the oracle), CUDA tensors in Triton."""

from __future__ import annotations

import torch

__all__ = ["row_argmax"]


def row_argmax(rows: torch.Tensor) -> torch.Tensor:
    """Return the first position of the largest value of each row ([rows], int64). For a row with NaN, the result is
    any valid position.
    """
    if rows.is_cuda and rows.dim() == 2 and rows.stride(1) == 1 and rows.numel():
        from . import triton_argmax

        return triton_argmax.row_argmax(rows)
    return rows.argmax(-1)
