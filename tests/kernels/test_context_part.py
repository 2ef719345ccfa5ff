"""Attention over pages that contain a part of each block: every part equals the oracle, and all parts together, merged
by their log-sum-exps, equal attention over whole blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import WHOLE, ContextPart, Visibility
from kvloom.kernels.attention import Mask, Shape, merge_many

triton = pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.attention import DecodePlan, PrefillPlan  # noqa: E402
from kvloom.kernels.attention.prefill_backends import BlockTile  # noqa: E402

from .batches import DEVICE, TOLERANCE, Batch, relative  # noqa: E402

TINY = BlockTile(16, 16, 4, 2)
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def parts_of(batch: Batch, count: int) -> list[Batch]:
    """The pages of each rank, whose blocks are the pages of `batch`."""
    found = []
    for rank in range(count):
        size = batch.shape.page_tokens // count
        shape = Shape(
            *(batch.shape.heads, batch.shape.kv_heads, batch.shape.k_dim, batch.shape.v_dim),
            *(size, batch.shape.dtype),
        )
        own = object.__new__(Batch)
        own.__dict__.update(batch.__dict__, shape=shape)
        for name in ("k", "v", "k_scale", "v_scale"):
            pages = getattr(batch, name)
            if pages is not None:
                setattr(own, name, pages[:, rank * size : (rank + 1) * size])
        found.append(own)
    return found


def attend(kind: str, batch: Batch, part: ContextPart, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    plan: Any
    if kind == "decode":
        plan = DecodePlan(batch.shape, len(batch.lengths) + 2, max(batch.queries), device=DEVICE, part=part)
        plan.make(batch.starts, batch.lengths_)
    else:
        tile = TINY if DEVICE == "cpu" else None
        plan = PrefillPlan(batch.shape, device=DEVICE, tile=tile, min_decode_rows=2, part=part)
        plan.make(batch.starts.tolist(), batch.lengths)
    found: tuple[torch.Tensor, torch.Tensor] = plan.attend(
        batch.q, batch.k, batch.v, batch.tables, mask, None, batch.k_scale, batch.v_scale
    )
    return found


def check(kind: str, batch: Batch, count: int, softcap: float | None = None, sinks: bool = False) -> None:
    """Sinks count on rank 0 only."""
    logits = torch.randn(batch.shape.heads, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    outs, logs = [], []
    for rank, own in enumerate(parts_of(batch, count)):
        part = ContextPart(rank, count)
        mask = Mask(Visibility("full"), softcap, logits if sinks and not rank else None, part=part)
        out, lse = attend(kind, own, part, mask)
        exact, exact_lse = own.expected(mask)
        assert not torch.isnan(lse).any()
        lse = lse.double().cpu()
        torch.testing.assert_close(lse.isinf(), exact_lse.isinf())
        torch.testing.assert_close(lse[~lse.isinf()], exact_lse[~lse.isinf()], atol=2e-2, rtol=2e-3)
        assert not out[lse.isinf().to(DEVICE)].any(), "queries that see no token of this rank get zeros"
        assert relative(out, exact) < TOLERANCE[batch.q.dtype]
        outs.append(out.double().cpu())
        logs.append(lse)
    whole, _ = batch.expected(Mask(Visibility("full"), softcap, logits if sinks else None))
    assert relative(merge_many(torch.stack(outs), torch.stack(logs)), whole) < 2 * TOLERANCE[batch.q.dtype]


@pytest.mark.few(1)
@pytest.mark.parametrize(("queries", "count"), [(1, 2), (1, 4), (5, 2), (5, 4)])
def test_decode_over_a_part_of_each_block(queries: int, count: int) -> None:
    """Some sequences have no token on the last rank, and some queries see none."""
    shape = Shape(2, 1, 64, 64, 16 * count, torch.float32)
    lengths = [7, 16 * count + 19, 16, 16 * count]
    check("decode", Batch(shape, lengths, [min(queries, n) for n in lengths]), count)


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [4, 2])
def test_prefill_over_a_part_of_each_block(count: int) -> None:
    """The first sequences have one query, and run in the decode kernels."""
    shape = Shape(2, 1, 64, 64, 16 * count, torch.float32)
    check("prefill", Batch(shape, [40, 3, 50, 33, 16 * count], [1, 1, 30, 20, 16 * count]), count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_softcap_and_sinks_over_a_part_of_each_block(kind: str) -> None:
    shape = Shape(2, 1, 64, 64, 32, torch.float32)
    check(kind, Batch(shape, [40, 9], [3, 9]), 2, softcap=5.0, sinks=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.int8, HALF], ids=str)
def test_dtypes_over_a_part_of_each_block(kind: str, dtype: torch.dtype) -> None:
    shape = Shape(2, 1, 64, 64, 32, dtype)
    check(kind, Batch(shape, [50], [4], dtype=HALF), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_latents_over_a_part_of_each_block(kind: str) -> None:
    check(kind, Batch(Shape(2, 1, 576, 512, 32, torch.float32), [50], [3]), 2)


def test_a_plan_and_its_mask_must_have_the_same_part() -> None:
    batch = Batch(Shape(2, 1, 64, 64, 32, torch.float32), [16], [1])
    part = ContextPart(1, 2)
    (_, own) = parts_of(batch, 2)
    for kind in ("decode", "prefill"):
        with pytest.raises(ValueError, match=r"the plan is for .*rank=1.*: make a plan for the mask's part"):
            attend(kind, own, part, Mask())
        with pytest.raises(ValueError, match="make a plan for the mask's part"):
            attend(kind, own, WHOLE, Mask(part=part))
    with pytest.raises(ValueError, match="need full attention, not sliding"):
        PrefillPlan(own.shape, Visibility("sliding", 20), DEVICE, part=part)


@pytest.mark.parametrize("rank", range(4))
def test_kernels_and_core_count_the_same_tokens(rank: int) -> None:
    part, ends = ContextPart(rank, 4), np.arange(300)
    stored = [int((part.places(np.arange(end), 64) >= 0).sum()) for end in ends]
    assert part.stored(ends, 16).tolist() == stored
