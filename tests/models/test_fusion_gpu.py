"""Fewer launches give the bits of more, in bf16 on a GPU: norms that a rotation takes along, or the sum before them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvloom.engine import Engine
from kvloom.kernels.fused import triton_operations
from kvloom.models.fusion.fused_attention import GpuFusedAttention
from kvloom.models.fusion.modules import _FusedDecoderLayer
from kvloom.models.paged import Work

from .zoo import config_of

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import transformers

from tests.engines import make_engine

SHAPES: list[dict[str, Any]] = [
    {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8},
    {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 8},
    {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1},
]
SIZES = (700, 1, 64, 259)


def engine_of(family: str, shape: dict[str, Any], together: bool) -> Engine:
    """`together`: one launch for norms and rotation; else one for each."""
    torch.manual_seed(0)
    config = config_of(
        family, hidden_size=768, intermediate_size=512, max_position_embeddings=2048, initializer_range=0.05, **shape
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().cuda()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights that do something
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    engine = make_engine(model, 1 << 28, token_budget=2048, max_running=4)
    for module in model.modules() if not together else ():
        forward = vars(module).get("forward")
        if isinstance(forward, GpuFusedAttention):
            forward._fused = False
        if isinstance(forward, _FusedDecoderLayer):
            forward.after = None
    return engine


def run(engine: Engine) -> list[torch.Tensor]:
    """Logits of prompts, then of single tokens, which are replayed."""
    engine.prepare()
    engine.buffer.view(torch.bfloat16).fill_(torch.nan)
    works, later = [], []
    for i, size in enumerate(SIZES):
        prompt = (np.arange(size) * (7 + i)) % 60 + 3
        sequence = engine.cache.open(engine.cache.match(prompt.astype(np.int32)))
        assert not sequence.extend(size)
        works.append(Work(sequence, prompt))
    found = [engine.runner.run(works).clone()]
    for i, work in enumerate(works):
        work.sequence.commit(work.tokens.astype(np.int32))
        assert not work.sequence.extend(1)
        later.append(Work(work.sequence, np.array([9 + i])))
    return [*found, engine.runner.run(later).clone()]


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_the_bits_of_separate_launches(
    family: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOM_ATTENTION_LIBRARIES", "")
    engines = engine_of(family, shape, together=True), engine_of(family, shape, together=False)
    normed: list[int] = []
    own = triton_operations.apply_rotary

    def rotated(q: torch.Tensor, *rest: Any) -> Any:
        normed.extend([q.shape[2]] if len(rest) > 3 and rest[3] is not None else [])
        return own(q, *rest)

    monkeypatch.setattr(triton_operations, "apply_rotary", rotated)
    wanted = run(engines[1])
    assert not normed
    found = run(engines[0])
    assert normed, "norms and rotations were one launch"
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, theirs)
