"""The same seed gives the same tokens in any batch: on a CPU in float32, and with the GPU's kernels in Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvloom.engine import Engine, Request, SamplingParams
from kvloom.engine.execution import ModelRunner
from kvloom.engine.sampling import Sampler
from tests.engines import make_engine
from tests.models.zoo import tiny

from .invariance import apart, prompts_of, together, told

DRAWN = [
    SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=1, logprobs=3),
    SamplingParams(max_tokens=12, temperature=1.0, seed=2, logprobs=3),
    SamplingParams(max_tokens=12, temperature=0, logprobs=3),
    SamplingParams(
        max_tokens=12, temperature=0.7, top_k=5, min_p=0.05, seed=3, logprobs=3, presence_penalty=0.5
    ),
]


@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
@pytest.mark.slow
def test_cpu_tokens_of_a_seed_do_not_depend_on_the_batch(family: str) -> None:
    model, prompts = tiny(family), prompts_of(8, 64, 40)
    params = [DRAWN[i % len(DRAWN)] for i in range(len(prompts))]

    def tokens(found: list[list[tuple[int, list[float]]]]) -> list[list[int]]:
        return [[token for token, _ in one] for one in found]

    alone = tokens(apart(make_engine(model, 8 << 20, batch_invariant=True), prompts, params))
    assert tokens(together(make_engine(model, 8 << 20), prompts, params)) == alone
    assert (
        tokens(together(make_engine(model, 8 << 20, token_budget=7, max_running=3), prompts, params)) == alone
    )


def test_cpu_batch_invariance_needs_float32() -> None:
    with pytest.raises(
        ValueError, match=r"batch_invariant on a CPU needs dtype float32, not torch\.bfloat16"
    ):
        make_engine(tiny("llama").to(torch.bfloat16), 8 << 20, batch_invariant=True)


def invariant_engine(model: Any, budget: int) -> Engine:
    """Return an engine on a CPU that runs the GPU's kernels."""
    made = make_engine(model, 2 << 20, token_budget=budget, max_running=4)
    made.runner = ModelRunner(model, made.cache, made.buffer, budget, 4, graphs=False, invariant=True)
    return made


@pytest.mark.slow
def test_invariant_kernels_give_equal_bits_for_any_batch_and_chunks() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    model = tiny(
        "qwen2",
        head_dim=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=128,
    )
    prompts = [list(range(3, 22)), [7, 8, 9], list(range(3, 12))]

    params = [SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=i, logprobs=2) for i in range(3)]
    alone = apart(invariant_engine(model, 64), prompts, params)
    crowded = invariant_engine(model, 6)
    found = [crowded.add(prompt, mine) for prompt, mine in zip(prompts, params, strict=True)]
    crowded.run()
    assert [told(request) for request in found] == alone
    plain = make_engine(model, 2 << 20)
    wanted = apart(plain, prompts, params)
    for ours, theirs in zip(alone, wanted, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        np.testing.assert_allclose(ours[0][1], theirs[0][1], rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mamba", {}),
        ("mamba2", {}),
        ("qwen3_5_text", {"layer_types": ["linear_attention"], "linear_value_head_dim": 16}),
        ("minimax", {"layer_types": ["linear_attention"]}),
        ("lfm2", {"layer_types": ["conv"]}),
    ],
)
@pytest.mark.slow
def test_invariant_kernels_give_equal_states_for_any_chunks(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    # A CPU's own round by how many numbers there are, and how they lie (SiLU, too, but for multiples of 32); a GPU's do not.
    monkeypatch.setattr(torch.Tensor, "sigmoid", lambda x: 1 / (1 + torch.exp(-x)))
    monkeypatch.setattr(torch.nn.functional, "softplus", lambda x: torch.log1p(torch.exp(x)))
    model = tiny(family, num_hidden_layers=1, intermediate_size=64, **changes)
    prompts = [list(range(3, 14)), [7, 8], list(range(3, 10))]
    params = [SamplingParams(max_tokens=2, temperature=0.8, seed=i, logprobs=2) for i in range(3)]
    alone = apart(invariant_engine(model, 64), prompts, params)
    crowded = invariant_engine(model, 5)
    found = [crowded.add(prompt, mine) for prompt, mine in zip(prompts, params, strict=True)]
    crowded.run()
    assert [told(request) for request in found] == alone
    wanted = apart(make_engine(model, 2 << 20), prompts, params)
    for ours, theirs in zip(alone, wanted, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        np.testing.assert_allclose(ours[0][1], theirs[0][1], rtol=1e-3)


def test_all_sampling_parameters_run_in_invariant_mode() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvloom.engine.sampling import apply_grammar_mask
    from kvloom.kernels.batch_invariant import BatchInvariant

    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.2},
        {"temperature": 0.5, "logit_bias": {3: 2.0, 7: -5.0}, "min_tokens": 4, "stop_token_ids": (5,)},
    ]
    requests = [
        Request(i, (3, 4, 5), SamplingParams(seed=i, logprobs=2, **way)) for i, way in enumerate(ways)
    ]
    logits = torch.randn(len(ways), 300, generator=torch.Generator().manual_seed(0)) * 3
    wanted = Sampler([2]).choose(logits, requests)
    with BatchInvariant():
        found = Sampler([2]).choose(logits, requests)
        assert torch.equal(found.tokens, wanted.tokens)
        few = Sampler([2]).choose(logits[3:5], requests[3:5])
        assert torch.equal(few.tokens, wanted.tokens[3:5])
        assert found.logprobs is not None
        assert few.logprobs is not None
        assert torch.equal(few.logprobs.values, found.logprobs.values[3:5])
        masked = logits.clone()
        apply_grammar_mask(masked, [0, 2], np.full((2, 10), 0b1010, dtype=np.int32))
    assert torch.isinf(masked[0]).sum() == 300 - 20
