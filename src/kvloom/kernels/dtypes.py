"""The dtypes of queries, pages and accumulators that the kernels use."""

from __future__ import annotations

import torch

__all__ = [
    "FLOAT_DTYPES",
    "PAGE_DTYPES",
    "QUANTISED_DTYPES",
    "TORCH_DTYPES",
    "accumulator_dtype",
    "quantised_max",
]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int32": torch.int32,
}
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)
PAGE_DTYPES = (*FLOAT_DTYPES, *QUANTISED_DTYPES)


def quantised_max(dtype: torch.dtype) -> float | None:
    """Return the largest value of a quantised page dtype, or None for other dtypes."""
    return {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}.get(dtype)


def accumulator_dtype(q: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 for float64 inputs, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
