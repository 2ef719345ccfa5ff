"""Mixers on packed rows: whose functions they call, and when."""

from __future__ import annotations

import sys

import pytest
import torch

from kvloom.models.paged import install
from kvloom.models.paged.mixers import is_mixer, wrap_mixer
from kvloom.models.paged.scans import takes_packed_rows
from kvloom.models.specs import ModelError

from .tiny import TINY
from .zoo import tiny

RECURRENT = {
    "mamba": "mamba_selective_scan",
    "falcon_mamba": "mamba_selective_scan",
    "jamba": "mamba_selective_scan",
    "mamba2": "mamba2_chunk_scan",
    "bamba": "mamba2_chunk_scan",
    "granitemoehybrid": "mamba2_chunk_scan",
    "falcon_h1": "mamba2_chunk_scan",
    "nemotron_h": "mamba2_chunk_scan",
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "qwen3_5_text": "torch_chunk_gated_delta_rule",
    "qwen3_5_moe_text": "torch_chunk_gated_delta_rule",
    "olmo_hybrid": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
    "lfm2": "causal_conv1d_fn",
    "lfm2_moe": "causal_conv1d_fn",
    "minimax": None,
}


@pytest.mark.parametrize("family", RECURRENT)
def test_what_runs_along_the_tokens_is_replaced_for_us_alone(family: str) -> None:
    model = tiny(family)
    ids = torch.arange(3, 25)[None]
    with torch.inference_mode():
        before = model(ids).logits
    mixers = [module for module in model.modules() if is_mixer(module)]
    assert mixers
    name = RECURRENT[family]
    assert all(takes_packed_rows(mixer) == (name is not None) for mixer in mixers)
    install(model)
    install(model)  # nothing is wrapped twice
    if name is not None:
        function = vars(sys.modules[type(mixers[0]).__module__])[name]
        assert not hasattr(function.replaced, "replaced")
    other = tiny(family)  # of the same code, not ours
    with torch.inference_mode():
        torch.testing.assert_close(other(ids).logits, before, rtol=0, atol=0)


def test_attention_is_no_mixer() -> None:
    plain = [
        name
        for name in TINY
        if name not in RECURRENT and TINY[name]["model_type"] in ("llama", "gpt2", "gpt_oss")
    ]
    assert not any(is_mixer(module) for name in plain for module in tiny(name).modules())


def test_a_mixer_of_no_known_kind_is_refused_by_its_name_and_left_as_it_is() -> None:
    class Odd(torch.nn.Module):
        layer_idx = 3

        def __init__(self) -> None:
            super().__init__()
            self.conv1d = torch.nn.Conv1d(4, 4, 2, groups=4)

        def forward(self, hidden_states: torch.Tensor, past_key_values: object = None) -> torch.Tensor:
            return hidden_states

    module = Odd()
    assert is_mixer(module)
    with pytest.raises(ModelError, match=r"layer 3 is a Odd, .* docs/models\.md"):
        wrap_mixer(module)
    assert "forward" not in vars(module)
