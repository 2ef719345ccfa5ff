"""MLA modules in few calls: replaced if they do the same, with the same tokens as Hugging Face's `generate()`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvloom.engine import SamplingParams
from kvloom.models.fusion.latent_attention import FusedLatentAttention, fuse_latent_attention
from kvloom.models.fusion.modules import _fuse_norm
from kvloom.models.fusion.product import registered
from kvloom.models.paged import Pages, install
from tests.engines import make_engine
from tests.models.lora_adapters import greedy, merged, write_adapter
from tests.models.zoo import config_of, prompts_of

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v2", {"q_lora_rank": None}, "pairs"),
    ("deepseek_v2", {"q_lora_rank": 24}, "pairs"),
    ("deepseek_v3", {}, "unpaired"),
    ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}, "halves"),
]


def build(family: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = config_of(family, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def fuse_all(model: Any) -> list[Any]:
    """Fuse norms and MLA modules as on a GPU. Return the MLA modules."""
    install(model)
    with torch.no_grad():
        for module in model.modules():
            _fuse_norm(module)
        modules = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
        assert all(fuse_latent_attention(module) for module in modules)
    return modules


@pytest.mark.parametrize(("family", "changes", "form"), CASES)
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.few(3)
def test_tokens_are_those_of_generate(
    family: str, changes: dict[str, Any], form: str, kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = build(family, changes)
    model = copy.deepcopy(own)
    modules = fuse_all(model)
    assert {module.forward._form for module in modules} == {form}
    calls: list[int] = []
    attend = Pages.attend_latents
    monkeypatch.setattr(
        Pages, "attend_latents", lambda self, *given: (calls.append(given[0]), attend(self, *given))[1]
    )
    engine = make_engine(model, 1 << 24, kv_dtype=kv_dtype, token_budget=32)
    prompts = prompts_of(0, (5, 70, 33))
    requests = [engine.add(prompt, SamplingParams(max_tokens=12, temperature=0)) for prompt in prompts]
    engine.run()
    assert set(calls) == {module.forward.layer for module in modules}
    for request, prompt in zip(requests, prompts, strict=True):
        wanted = own.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        same = request.output == wanted.tolist()
        assert same or kv_dtype is not None  # rounded keys may choose another token
    engine.cache.check()


def test_a_module_that_does_more_stays_as_it_is() -> None:
    model = build("deepseek_v3", {})
    install(model)
    attention = model.model.layers[0].self_attn
    own = attention.forward

    def forward(*given: Any, **named: Any) -> Any:
        out, rest = own(*given, **named)
        return 1.01 * out, rest

    with torch.no_grad():
        assert _fuse_norm(attention.kv_a_layernorm)
        attention.forward = forward
        assert not fuse_latent_attention(attention)
    assert attention.forward is forward


def test_a_call_without_pages_runs_the_own_forward() -> None:
    model, ids = build("deepseek_v3", {}), torch.arange(3, 33)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
    modules = fuse_all(model)
    assert all(isinstance(module.forward, FusedLatentAttention) for module in modules)
    for module in modules:
        del module.expand_kv  # a cache without pages needs keys and values
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "changes", "form"), CASES[1:3])
@pytest.mark.few(1)
def test_adapters_change_fused_projections(
    family: str, changes: dict[str, Any], form: str, tmp_path: Path
) -> None:
    """A LoRA adapter of all projections gives the tokens of a model with merged weights."""
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    own = build(family, changes)
    path = write_adapter(tmp_path / "a", own, targets)
    model = copy.deepcopy(own)
    modules = fuse_all(model)
    assert all(registered(module.q_a_proj) is registered(module.kv_a_proj_with_mqa) for module in modules)
    engine = make_engine(model, 1 << 24, token_budget=32, lora={"a": str(path)})
    params, prompts = SamplingParams(max_tokens=12, temperature=0), prompts_of(0, (5, 40))
    names = [name for _ in prompts for name in (None, "a")]
    requests = [engine.add(prompts[i // 2], params, lora=name) for i, name in enumerate(names)]
    engine.run()
    changed = merged(own, path)
    for request, name in zip(requests, names, strict=True):
        assert request.output == greedy(own if name is None else changed, list(request.prompt), 12)
    assert requests[2].output != requests[3].output
