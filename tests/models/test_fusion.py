"""Fused modules compute what the model's own do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from kvloom.engine import SamplingParams
from kvloom.models.fusion import fuse
from kvloom.models.fusion.delta_mixer import FusedDeltaMixer
from kvloom.models.fusion.modules import _FusedGatedNorm, _FusedNorm
from tests.engines import make_engine

from .test_attention import tiny
from .zoo import NEW, expected, tiny as tiny_model


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 33)[None]
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
        return found


@pytest.mark.parametrize(
    ("family", "norms", "gates", "projections", "layers"),
    [
        ("llama", 9, 4, 4, 4), ("qwen2", 9, 4, 4, 4), ("qwen3", 17, 4, 4, 4), ("gemma2", 17, 4, 4, 4),
        ("gemma3_text", 43, 7, 7, 7), ("olmo2", 17, 4, 4, 0), ("phi3", 9, 0, 0, 0),
    ],
)  # fmt: skip
def test_a_model_is_the_same_with_its_modules_fused(
    family: str, norms: int, gates: int, projections: int, layers: int
) -> None:
    model = tiny(family)
    wanted = logits(model)
    done = fuse(model)
    found = done["norms"], done["gated MLPs"], done["projections"], done["layers"]
    assert found == (norms, gates, projections, layers)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)
    assert not fuse(model), "again there is nothing to do"


@pytest.mark.parametrize(
    ("family", "changes", "mixers"),
    [
        ("qwen3_next", {"linear_key_head_dim": 16, "linear_value_head_dim": 32}, 3),
        (
            "qwen3_next",
            {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            0,
        ),  # too narrow for the kernels
        ("qwen3_5_text", {}, 3),
        ("bamba", {}, 0),
        ("falcon_h1", {"mamba_rms_norm": True}, 0),
    ],
)
def test_recurrent_layers_are_the_same_with_their_modules_fused(
    family: str, changes: dict[str, Any], mixers: int
) -> None:
    model = tiny_model(family, **changes)
    prompts = [[5 + i * j % 50 for i in range(length)] for j, length in ((3, 70), (7, 4))]
    wanted = expected(model, prompts)
    engine = make_engine(model, 16 << 20, token_budget=48)
    greedy = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, greedy) for prompt in prompts]
    engine.run()
    assert [[*request.prompt, *request.output] for request in requests] == wanted
    forwards = [getattr(module, "packed_forward", None) for module in model.modules()]
    assert sum(isinstance(each, FusedDeltaMixer) for each in forwards) == mixers
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNormGated")]
    assert norms
    assert all(isinstance(norm.forward, _FusedGatedNorm) for norm in norms)


def test_layers_that_add_otherwise_stay_as_they_are() -> None:
    model = tiny("granite")
    for layer in model.model.layers:
        layer.residual_multiplier = 0.5
    wanted = logits(model)
    assert fuse(model)["layers"] == 0
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_layer_is_handed_the_norm_that_it_begins_with(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    fuse(model)
    layers = [layer.forward for layer in model.model.layers]
    assert all(one.after is other._pres[0] for one, other in pairwise(layers))
    assert layers[-1].after is None
    firsts = {id(layer._pres[0]): i for i, layer in enumerate(layers)}
    begun: list[int] = []
    own = _FusedNorm.__call__

    def called(self: _FusedNorm, x: torch.Tensor) -> torch.Tensor:
        begun.extend([firsts[id(self)]] if id(self) in firsts else [])
        return own(self, x)

    monkeypatch.setattr(_FusedNorm, "__call__", called)
    found = logits(model)
    assert begun == [0], "the others were given theirs"
    for layer in layers:
        layer.after = None
    begun.clear()
    assert torch.equal(logits(model), found)
    assert begun == [*range(len(layers))]


def test_a_layer_norms_for_itself_what_is_not_what_the_last_one_left() -> None:
    """New hidden states between layers; layers that are run in another order, or not at all."""
    model, other = tiny("gemma3_text"), tiny("gemma3_text")
    fuse(model)

    def changed(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return given[0] * 1.5, *given[1:]

    for each in (model, other):
        each.model.layers[2].register_forward_pre_hook(changed)
        order = [0, 1, 2, 4, 3, 5]
        each.model.layers = torch.nn.ModuleList(each.model.layers[i] for i in order)
        each.config.num_hidden_layers = len(order)
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)


def test_hooks_between_layers_may_change_hidden_states_in_place() -> None:
    model, other = tiny("gemma3_text"), tiny("gemma3_text")
    factor = [1.0]  # while layers are tried, nothing is changed

    def before(_: Any, given: tuple[Any, ...]) -> None:
        given[0].mul_(factor[0])

    def behind(_: Any, given: tuple[Any, ...], out: torch.Tensor) -> None:
        out.mul_(factor[0])

    for each in (model, other):
        each.model.layers[2].register_forward_pre_hook(before)
        each.model.layers[4].register_forward_hook(behind)
    fuse(model)
    factor[0] = 1.5
    handed = [layer.forward.after is not None for layer in model.model.layers]
    assert handed == [True, False, True, True, False, True, False]
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "experts", "routers"),
    [
        ("qwen3_moe", 4, 4), ("mixtral", 4, 4), ("olmoe", 4, 4), ("qwen2_moe", 4, 4), ("granitemoe", 4, None),
        ("phimoe", 4, 0), ("deepseek_v3", 3, 3), ("gpt_oss", 0, 0), ("llama4_text", 0, 0), ("llama", 0, 0),
    ],
)  # fmt: skip
def test_a_mixture_of_experts_is_the_same_in_grouped_products(
    family: str, experts: int, routers: int | None
) -> None:
    model = tiny(family)
    wanted = logits(model)
    done = fuse(model)
    assert done["experts"] == experts
    assert routers is None or done["routers"] == routers  # (None: transformers' versions differ)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)


def test_weights_are_joined_in_place() -> None:
    model = tiny("llama")
    fuse(model)
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    before = logits(model)
    with torch.no_grad():
        attention.v_proj.weight.zero_()
    assert not torch.equal(logits(model), before)


def test_what_computes_something_else_stays_as_it_is() -> None:
    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8))
            self.variance_epsilon = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = OddRMSNorm()
            self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))
            return out

    assert not fuse(Odd())
