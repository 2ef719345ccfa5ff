"""The first place of each row's largest number, by the kernel and by torch."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels.fused import row_argmax

pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.fused import triton_argmax

from .batches import DEVICE


@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 17), (2, 2048), (5, 10_001), (1, 150_000), (70, 3000)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.few(4)
def test_it_is_what_torch_finds(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wide = torch.randn(shape[0], shape[1] + 8, generator=torch.Generator().manual_seed(shape[1])).to(dtype)
    rows = wide[:, 4 : 4 + shape[1]]  # not dense
    assert torch.equal(triton_argmax.row_argmax(rows.to(DEVICE)).cpu(), rows.argmax(-1))


def test_of_equal_ones_it_is_the_first_and_of_none_some_place_inside() -> None:
    rows = torch.zeros(4, 9000)
    rows[0, [5, 8999]] = 3.0
    rows[1, [4100, 4099, 2051]] = 3.0
    rows[2] = -torch.inf
    rows[3] = torch.nan
    found = triton_argmax.row_argmax(rows.to(DEVICE)).tolist()
    assert found[:3] == [5, 2051, 0]
    assert 0 <= found[3] < 9000


def test_argmax_runs_on_any_device() -> None:
    rows = torch.randn(3, 100, device=DEVICE)
    assert torch.equal(row_argmax(rows), rows.argmax(-1))
    assert torch.equal(row_argmax(rows.T), rows.T.argmax(-1))
