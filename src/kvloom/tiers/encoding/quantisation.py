"""Re-encodes layer runs to int8 or fp8, with one float32 scale per 64 values.

    a layer run    values, 1 byte each | scales, float32, one per 64 values

Element types are fp32, fp16 and bf16. This module is independent of layouts and tiers.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvloom.tiers.tier import Form

__all__ = [
    "CODINGS",
    "FP8_MAX",
    "Coding",
    "Floats",
    "decode",
    "encode",
    "fp8_values",
    "from_floats",
    "lossy_form",
    "to_floats",
    "to_fp8",
]

Coding = Literal["int8", "fp8"]
"""Data type of the values in a lossy tier."""
CODINGS: tuple[Coding, ...] = get_args(Coding)
"""All values of `Coding`."""
BLOCK_VALUES = 64
_WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
FP8_MAX = 448.0
Floats = npt.NDArray[np.float32]


def lossy_form(form: Form, coding: Coding) -> Form:
    """Return the form of a re-encoded page. Raises ValueError if the element type cannot be re-encoded."""
    if coding not in CODINGS:
        raise ValueError(f"coding={coding!r} is none of {', '.join(CODINGS)}")
    width = _WIDTH.get(form.dtype)
    if width is None:
        raise ValueError(
            f"dtype={form.dtype!r} is none of {', '.join(_WIDTH)}: pages of this type cannot be re-encoded"
        )
    if form.run_bytes % (width * BLOCK_VALUES):
        raise ValueError(
            f"runs of {form.run_bytes} bytes are not whole blocks of {BLOCK_VALUES} values of {form.dtype}"
        )
    values = form.run_bytes // width
    run = values + values // BLOCK_VALUES * 4
    layout = f"{coding}/{BLOCK_VALUES} of {form.dtype} {form.layout}"
    return Form(coding, form.order, run * form.runs, run, form.shard, layout, exact=False)


def encode(run: memoryview, dtype: str, coding: Coding, into: memoryview) -> None:
    """Encode one or several layer runs as 1-byte values and scales. Infinity is encoded as the largest value, and
    NaN as 0."""
    floats = to_floats(np.frombuffer(run, np.uint8), dtype).reshape(-1, BLOCK_VALUES)
    largest = FP8_MAX if coding == "fp8" else 127.0
    floats = np.nan_to_num(floats, nan=0.0, posinf=3e38, neginf=-3e38)
    scales = np.abs(floats).max(axis=1) / np.float32(largest)
    scales[scales == 0] = 1.0
    scaled = np.clip(floats / scales[:, None], -largest, largest)
    target = np.frombuffer(into, np.uint8)
    values = floats.size
    target[:values] = (
        to_fp8(scaled).ravel() if coding == "fp8" else np.rint(scaled).astype(np.int8).view(np.uint8).ravel()
    )
    target[values : values + 4 * len(scales)] = scales.view(np.uint8)


def decode(data: memoryview, dtype: str, coding: Coding, into: memoryview) -> None:
    """Decode values and scales to the element type of the page."""
    values = len(into) // _WIDTH[dtype]
    coded = np.frombuffer(data, np.uint8, values)
    scales = np.frombuffer(data, np.float32, values // BLOCK_VALUES, values)
    plain = fp8_values()[coded] if coding == "fp8" else coded.view(np.int8).astype(np.float32)
    floats = (plain.reshape(-1, BLOCK_VALUES) * scales[:, None]).ravel()
    np.frombuffer(into, np.uint8)[:] = from_floats(floats, dtype)


def to_floats(data: npt.NDArray[np.uint8], dtype: str) -> Floats:
    if dtype == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float32 if dtype == "fp32" else np.float16).astype(np.float32)


def from_floats(floats: Floats, dtype: str) -> npt.NDArray[np.uint8]:
    if dtype == "bf16":  # round to nearest, ties to even
        bits = floats.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    if dtype == "fp16":
        return np.clip(floats, -65504, 65504).astype(np.float16).view(np.uint8)
    return floats.view(np.uint8)


@cache
def fp8_values() -> Floats:
    """Return the values of the 256 codes of fp8 e4m3, which has no infinities."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(codes & 128, -size, size).astype(np.float32)
    values[[127, 255]] = 0.0  # the code of NaN, which is never written
    return values


@cache
def _fp8_borders() -> Floats:
    """Return the midpoints between adjacent fp8 values, for rounding. Only the 127 values that are not negative are
    considered."""
    values = fp8_values()[:127].astype(np.float64)
    return ((values[1:] + values[:-1]) / 2).astype(np.float32)


def to_fp8(floats: Floats) -> npt.NDArray[np.uint8]:
    codes = np.searchsorted(_fp8_borders(), np.abs(floats), side="left").astype(np.uint8)
    codes[np.signbit(floats)] |= 128
    return codes
