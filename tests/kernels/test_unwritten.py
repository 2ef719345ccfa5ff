"""What the other tests here stand on: an element that a kernel leaves out is NaN, however its output was allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALLOCATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda like: torch.empty(like.shape, dtype=like.dtype, device=like.device),
    "empty_like": lambda like: torch.empty_like(like),  # noqa: PLW0108 (the one of this moment)
    "empty_strided": lambda like: torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=like.device
    ),
    "empty_permuted": lambda like: torch.empty_permuted(
        like.shape, (1, 0), dtype=like.dtype, device=like.device
    ),
    "new_empty": lambda like: like.new_empty(like.shape),
    "new_empty_strided": lambda like: like.new_empty_strided(like.shape, like.stride()),
}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("way", ALLOCATED)
def test_whatever_is_allocated_without_being_written_is_nan_or_wild(way: str) -> None:
    for dtype in FLOATS:
        found = ALLOCATED[way](torch.zeros(3, 5, device=DEVICE).to(dtype))
        assert (found.dtype, found.device.type) == (dtype, DEVICE)
        assert found.float().isnan().all()
    for dtype, value in {torch.int64: 77777, torch.int32: 77777, torch.int8: 127, torch.uint8: 255}.items():
        assert (ALLOCATED[way](torch.zeros(3, 5, dtype=dtype, device=DEVICE)) == value).all()
    page = ALLOCATED[way](torch.zeros(4, 8, dtype=torch.uint8, device=DEVICE)).flatten()
    assert page.view(torch.float32).isnan().all(), "bytes that are read as floats later, as a pool's are"


@triton.jit
def all_but_the_last(out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.zeros((BLOCK,), tl.float32), mask=place < count - 1)


def test_an_element_that_a_kernel_does_not_write_is_detected() -> None:
    out = torch.empty(10, device=DEVICE)
    all_but_the_last[(1,)](out, len(out), BLOCK=16)
    assert out.isnan().tolist() == [False] * 9 + [True]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(out, torch.zeros(10, device=DEVICE))
