"""Argmax of each tensor row, for greedy sampling. CPU tensors run in torch (the oracle), CUDA tensors in Triton."""

from __future__ import annotations

import torch

__all__ = ["row_argmax"]


def row_argmax(rows: torch.Tensor) -> torch.Tensor:
    """Return the column of the largest value in each row of a matrix. The result is [rows], int64. Among equal values,
    the first column is returned. For a row with NaN, the result is any valid column.
    """
    if rows.is_cuda and rows.dim() == 2 and rows.stride(1) == 1 and rows.numel():
        from . import triton_argmax

        return triton_argmax.row_argmax(rows)
    return rows.argmax(-1)
