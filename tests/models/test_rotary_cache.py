"""Rotary embeddings by table: the same numbers, where a position alone decides them."""

from __future__ import annotations

import pytest
import torch

from kvloom.models.fusion.rotary_cache import RotaryCache, fuse_rotary_embedding

from .test_attention import tiny


def rotary_of(model: torch.nn.Module) -> torch.nn.Module:
    return next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_a_table_gives_what_the_module_gives(family: str) -> None:
    model, ids = tiny(family), torch.arange(3, 40)[None]
    rotary, like = rotary_of(model), torch.zeros(1, 1)
    with torch.inference_mode():
        wanted = model(ids).logits
        assert fuse_rotary_embedding(rotary, 100, like)
        assert isinstance(rotary.forward, RotaryCache)
        assert torch.equal(model(ids).logits, wanted)
        assert not fuse_rotary_embedding(rotary, 64, like)
        assert fuse_rotary_embedding(rotary, 128, like)  # a longer one
        assert rotary.forward.limit == 128
        assert torch.equal(model(ids).logits, wanted)


def test_angles_that_hang_on_more_than_a_position_stay_as_they_are() -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = rotary_of(tiny("llama", rope_parameters=parameters))
    assert not fuse_rotary_embedding(dynamic, 100, torch.zeros(1, 1))

    class OddRotaryEmbedding(torch.nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos = (position_ids + position_ids.shape[1])[..., None].to(x.dtype)
            return cos, cos

    assert not fuse_rotary_embedding(OddRotaryEmbedding(), 100, torch.zeros(1, 1))
    assert not fuse_rotary_embedding(torch.nn.Linear(2, 2), 100, torch.zeros(1, 1))


def test_another_dtype_or_several_rows_use_the_module() -> None:
    rotary = rotary_of(tiny("llama"))
    wanted = [
        rotary(torch.zeros(1, dtype=kind), torch.arange(6).view(2, 3))
        for kind in (torch.float32, torch.float64)
    ]
    assert fuse_rotary_embedding(rotary, 100, torch.zeros(1, 1))
    for kind, (cos, sin) in zip((torch.float32, torch.float64), wanted, strict=True):
        found = rotary(torch.zeros(1, dtype=kind), torch.arange(6).view(2, 3))
        assert torch.equal(found[0], cos)
        assert torch.equal(found[1], sin)
        assert found[0].dtype == kind
