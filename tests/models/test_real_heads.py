"""Heads as large and as many as models have them that people run: prompts in pieces, then single tokens, give the logits of
Hugging Face's own attention. In bf16 on a GPU, where such shapes choose kernels, and without one in float32 and shorter."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvloom.engine import Engine
from kvloom.models.paged import Work
from tests.engines import make_engine

from .zoo import config_of

CUDA = torch.cuda.is_available()
WINDOW = 1024 if CUDA else 40
HEADS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {"family": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "llama-3.1-8b": {"family": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3-30b-a3b": {"family": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    "gemma-3-12b": {
        "family": "gemma3_text", "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma-3-4b": {
        "family": "gemma3_text", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "windows shorter than a block": {
        "family": "gemma3_text", "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip
SIZES = [(2500, 1, 64, 1300, 700), (300, 5, 64, 1, 1200)] if CUDA else [(90, 1, 16, 61, 3), (30, 5, 64, 1, 2)]
"""Tokens of each prompt in one step, and in the next."""
SINGLES = 3


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.few(2)
def test_logits_are_those_of_hugging_faces_own_attention(name: str) -> None:
    options = dict(HEADS[name])
    torch.manual_seed(0)
    config = config_of(
        options.pop("family"), hidden_size=512, intermediate_size=256, num_hidden_layers=3, initializer_range=0.05,
        max_position_embeddings=8192, **options,
    )  # fmt: skip
    kind = torch.bfloat16 if CUDA else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()
    for key, weight in model.named_parameters():
        if "norm" in key:  # weights that do something
            weight.data += 0.3 * torch.randn_like(weight)
    model = model.to("cuda" if CUDA else "cpu")
    model.set_attn_implementation("eager")
    own, true = copy.deepcopy(model), copy.deepcopy(model).float()
    engine = make_engine(model, 1 << 30 if CUDA else 1 << 26, token_budget=8192, max_running=8)
    engine.buffer.view(kind).fill_(torch.nan)
    engine.prepare()
    found, texts = _steps(engine)
    for text, logits in zip(texts, found, strict=True):
        ids = torch.tensor([text], device=model.device)
        with torch.inference_mode():
            wanted, rounded = (m(ids).logits[0, -len(logits) :].float() for m in (true, own))
        spread = wanted.std(-1, keepdim=True)
        mine, theirs = (((x - wanted) / spread).abs().max() for x in (logits, rounded))
        assert mine <= 2 * theirs + 0.02, (
            f"a text of {len(text)}: {mine:.3f} off, its own in {kind} {theirs:.3f}"
        )
    engine.cache.check()


def _steps(engine: Engine) -> tuple[list[torch.Tensor], list[list[int]]]:
    """For every prompt the logits after its second piece and after each single token, and its text."""
    draw, cache = np.random.default_rng(0), engine.cache
    texts = [draw.integers(3, 60, sum(sizes) + SINGLES).tolist() for sizes in zip(*SIZES, strict=True)]
    sequences = [cache.open(cache.match(np.array(text, np.int32))) for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for sizes in [*SIZES, *[(1,) * len(texts)] * SINGLES]:
        works = []
        for sequence, text, size in zip(sequences, texts, sizes, strict=True):
            assert not sequence.extend(size)
            works.append(Work(sequence, np.array(text[sequence.length : sequence.length + size])))
        logits = engine.runner.run(works).float()
        for work, rows, row in zip(works, found, logits, strict=True):
            work.sequence.commit(work.tokens.astype(np.int32))
            rows.append(row.clone())
    for sequence in sequences:
        sequence.close()
    return [torch.stack(rows[1:]) for rows in found], texts
