"""Attention modules and decoder layers in few calls, on a CPU: taken where they do the same, and used where they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvloom.engine import SamplingParams
from kvloom.kernels import cpu
from kvloom.models.fusion import fuse, fused_attention
from kvloom.models.fusion.cpu_decoder_layer import CpuDecoderLayer
from kvloom.models.fusion.fused_attention import FusedAttention, GpuFusedAttention, fuse_attention
from kvloom.models.fusion.modules import _fuse_norm, _fuse_projections
from kvloom.models.paged import BatchBuilder, Pages, Work, install
from tests.engines import make_engine

from .test_attention import tiny

pytestmark = pytest.mark.skipif(not cpu.IS_BUILT, reason="built without a compiler")


@pytest.mark.parametrize(
    ("family", "attentions", "lean"),
    [
        ("llama", 4, True), ("mistral", 4, True), ("qwen2", 4, False), ("qwen3", 4, False), ("qwen3_moe", 4, False),
        ("gemma2", 0, False), ("gpt_oss", 0, False), ("qwen3_next", 0, False), ("phi3", 0, False),
    ],
)  # fmt: skip
def test_modules_are_taken_that_hand_pages_the_same(family: str, attentions: int, lean: bool) -> None:
    model = tiny(family)
    install(model)
    assert fuse(model)["attentions"] == attentions
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert sum(isinstance(forward, FusedAttention) for forward in forwards) == attentions
    assert sum(isinstance(forward, CpuDecoderLayer) for forward in forwards) == (attentions if lean else 0)


def test_a_module_that_does_more_stays_as_it_is() -> None:
    model = tiny("llama")
    install(model)
    odd = model.model.layers[1].self_attn
    own = odd.forward

    def forward(*given: Any, **named: Any) -> Any:
        out, rest = own(*given, **named)
        return 1.01 * out, rest

    odd.forward = forward
    assert fuse(model)["attentions"] == 3
    assert not isinstance(model.model.layers[1].forward, CpuDecoderLayer)


def test_without_pages_a_model_computes_what_it_did() -> None:
    model, ids = tiny("llama"), torch.arange(3, 33)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
        install(model)
        fuse(model)
        model.config._attn_implementation = "sdpa"
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "called"), [("llama", True), ("qwen3", False)])
def test_single_token_steps_use_the_fused_cpu_layer(
    family: str, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """…and prompts do not; both give the tokens of `generate()`."""
    model = tiny(family)
    prompts = [list(range(5, 45)), [7, 8, 9]]
    wanted = [
        model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        for prompt in prompts
    ]
    sizes: list[int] = []
    step = cpu.attention_step
    monkeypatch.setattr(
        cpu, "attention_step", lambda joined, *rest: (sizes.append(len(joined)), step(joined, *rest))[1]
    )
    # Otherwise native code would compute all layers of such a small model in one call.
    monkeypatch.setattr("kvloom.engine.execution.model_runner.small_model", lambda *_: None)
    engine = make_engine(model, 1 << 24)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    for request, prompt, whole in zip(requests, prompts, wanted, strict=True):
        assert list(request.output) == whole[0, len(prompt) :].tolist()
    assert sizes == ([2] * 4 * 5 if called else [])


@pytest.mark.parametrize(
    ("family", "normed"),
    [
        ("llama", False), ("qwen2", False), ("qwen3", False), ("qwen3", True), ("gemma3_text", True), ("mistral", False),
    ],
)  # fmt: skip
def test_replayed_single_tokens_are_rotated_by_the_write(
    family: str, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's way, on a CPU: the same logits as a step that is laid out, and the same pages."""
    model = tiny(family)
    install(model)
    attentions = [module for module in model.modules() if hasattr(module, "q_proj")]
    for module in model.modules() if normed else ():
        module.is_fused = _fuse_norm(module)
    for module in attentions:
        assert _fuse_projections(module)
        assert fuse_attention(module, GpuFusedAttention)
        module.is_fused = True
    engine = make_engine(model, 1 << 24)
    works = []
    for i, size in enumerate((40, 3, 17)):
        prompt = np.arange(5 + i, 5 + i + size)
        sequence = engine.cache.open(engine.cache.match(prompt.astype(np.int32)))
        assert not sequence.extend(size)
        engine.runner.run([Work(sequence, prompt)])
        sequence.commit(prompt.astype(np.int32))
        assert not sequence.extend(1)
        works.append(Work(sequence, np.array([9 + i])))
    before = engine.buffer.clone()
    wanted = engine.runner.run(works).clone()
    pool = engine.buffer.clone()
    engine.buffer.copy_(before)
    turned: list[int] = []
    own = Pages._write_rotated
    monkeypatch.setattr(
        Pages, "_write_rotated", lambda self, *given: (turned.append(1), own(self, *given))[1]
    )
    stage = BatchBuilder(engine.cache, "cpu", 16, 8, mirrored=True)
    stage.send_singles(works, 3)
    found = engine.runner._forward(stage.replayed(3, torch.zeros(8, dtype=torch.int64)), None)
    assert len(turned) == len(attentions)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(engine.buffer.view(torch.float32), pool.view(torch.float32), equal_nan=True)


class Splitting:
    """Attends where it is asked to cut, into a place of its own."""

    def __init__(self) -> None:
        self.cuts = 0

    def split_at(self, call: Any, query: torch.Tensor, *new: Any) -> torch.Tensor:
        self.cuts += 1
        out = query.new_full((*query.shape[:2], new[-1]), torch.nan)
        call(query, *new[:-1], out=out)
        return out


@pytest.mark.parametrize(
    ("family", "turned"), [("qwen3", True), ("qwen3_moe", True), ("gemma3_text", True), ("llama", False)]
)
@pytest.mark.parametrize("cut", [False, True])
def test_prompts_are_rotated_by_the_norm_launch(
    family: str, turned: bool, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's way, on a CPU: the bits that modules hand to pages themselves, and those that pages hold then."""
    calls: list[int] = []
    own = fused_attention.norm_and_rotate
    monkeypatch.setattr(
        fused_attention,
        "norm_and_rotate",
        lambda q, *rest, **named: (calls.append(q.shape[2]), own(q, *rest, **named))[1],
    )
    found = []
    for implementation in (None, GpuFusedAttention):
        model = tiny(family)
        install(model)
        for module in model.modules():
            module.is_fused = _fuse_norm(module)
        attentions = [module for module in model.modules() if hasattr(module, "q_proj")]
        for module in attentions:
            assert _fuse_projections(module)
            assert implementation is None or fuse_attention(module, implementation)
            module.is_fused = True
        calls.clear()
        engine = make_engine(model, 1 << 24)
        engine.buffer.zero_()
        works = []
        for i, size in enumerate((40, 1, 17)):
            prompt = np.arange(5 + i, 5 + i + size)
            sequence = engine.cache.open(engine.cache.match(prompt.astype(np.int32)))
            assert not sequence.extend(size)
            works.append(Work(sequence, prompt))
        batch = engine.runner.stage.lay_out(works, engine.runner.chosen)
        cutter = Splitting() if cut else None
        logits = engine.runner._forward(batch, None, cutter)
        assert cutter is None or cutter.cuts == len(attentions)
        assert calls == ([58] * len(attentions) if turned and implementation is GpuFusedAttention else [])
        found.append((logits.clone(), engine.buffer.clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
