"""The recipes of CONTRIBUTING.md for a layer kind and an architecture, followed from outside the package.

`tests/core/test_policies.py` and `tests/tiers/test_entry_points.py` follow those for a policy and a tier.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvloom.core import KVCache, LayerSpec, PoolLayout, Visibility, attention_fields
from kvloom.core.layout.layer_spec import KINDS, VisibilityKind
from kvloom.engine import Engine, EngineConfig, SamplingParams
from kvloom.kernels.attention import Shape, prefill_plan
from kvloom.kernels.memory import allocate, layer_views
from kvloom.kernels.write import write
from kvloom.models.specs import model_spec
from kvloom.models.specs.config_reading import Config, Family
from kvloom.models.specs.families_table import FAMILIES

Positions = npt.NDArray[np.int64]
WINDOW = 24


class Dilated(VisibilityKind):
    """Every second token of the last `size` tokens, the query included."""

    has_holes = True

    def first_visible(self, position: int, size: int) -> int:
        return max(0, position - size + 1)

    def first_visible_each(self, positions: Positions, size: int) -> Positions:
        return np.maximum(positions - (size - 1), 0)

    def sees_each(self, positions: Positions, tokens: Positions, size: int) -> npt.NDArray[np.bool_]:
        return super().sees_each(positions, tokens, size) & ((positions - tokens) % 2 == 0)


@pytest.fixture
def dilated(monkeypatch: pytest.MonkeyPatch) -> Visibility:
    monkeypatch.setitem(KINDS, "dilated", Dilated())
    return Visibility("dilated", WINDOW)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Dense attention of the queries at positions `at` over all tokens, with the mask written out."""
    tokens = torch.arange(len(k))
    apart = at[:, None] - tokens[None]
    seen = (apart >= 0) & (apart < WINDOW) & (apart % 2 == 0)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,thd->hqt", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def test_a_layer_kind_with_holes_runs_from_the_layout_to_attention(dilated: Visibility) -> None:
    torch.manual_seed(0)
    layout = PoolLayout.build({"0": LayerSpec("token", attention_fields(2, 16, "fp32"), dilated)})
    assert [group.spec.kind for group in layout.groups] == ["dilated"]
    cache, pool = KVCache(layout, slabs=30), allocate(layout, slabs=30)
    fields = layer_views(pool, layout)["0"].fields
    k_pages, v_pages = fields["k"], fields["v"]
    plan = prefill_plan(Shape(heads=4, kv_heads=2, k_dim=16, v_dim=16, dtype=torch.float32), dilated, "cpu")

    k, v = torch.randn(2, 90, 2, 16).unbind()
    q = torch.randn(90, 4, 16)
    sequence = cache.open(cache.match(range(90)))
    for begin, end in ((0, 40), (40, 75), *((t, t + 1) for t in range(75, 90))):  # chunks, then single tokens
        assert sequence.extend(end - begin) == 0
        table = torch.from_numpy(sequence.table(0)[0].copy())[None]
        at = torch.arange(begin, end)
        write(k_pages, v_pages, table[0, at // 16].long() * 16 + at % 16, k[begin:end], v[begin:end])
        plan.make([0, end - begin], [end])
        found, _ = plan.attend(q[begin:end], k_pages, v_pages, table)
        torch.testing.assert_close(found, attended(q[begin:end], k[:end], v[:end], at))
        sequence.commit(range(begin, end))
    assert sequence.table(0)[0][:4].tolist() == [0] * 4  # blocks before the window are released
    sequence.close()
    cache.check()
    again = cache.match(range(90))
    assert again.resume == 89  # the window of the end is still cached


def test_the_gpu_kernels_refuse_a_layer_kind_with_holes(dilated: Visibility) -> None:
    shape = Shape(heads=4, kv_heads=2, k_dim=64, v_dim=64, dtype=torch.float32)
    with pytest.raises(ValueError, match="do not support layers of kind dilated"):
        prefill_plan(shape, dilated, "cuda")


class ToyConfig(Qwen2Config):
    model_type = "toy-window"


class ToyModel(Qwen2ForCausalLM):
    config_class = ToyConfig


def every_third_full(config: Config) -> list[str]:
    return [
        "full_attention" if i % 3 == 2 else "sliding_attention"
        for i in range(config.size("num_hidden_layers"))
    ]


def tiny(config: type[Any], **more: Any) -> Any:
    return config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **more,
    )


def test_an_architecture_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    model = ToyModel(tiny(ToyConfig, use_sliding_window=True, sliding_window=20, layer_types=kinds)).eval()
    published = model.config.to_dict()
    del published["layer_types"]  # as a published config that relies on its family's pattern
    wanted = ["sliding", "sliding", "full"]
    assert [spec.kind for spec in model_spec(published).layers.values()] != wanted  # without the row
    monkeypatch.setitem(FAMILIES, "toy-window", Family(every_third_full, {"sliding_window": 20}))
    assert [spec.kind for spec in model_spec(published).layers.values()] == wanted

    prompt = list(range(3, 53))
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    engine = Engine(model, EngineConfig(pool_bytes=4 << 20))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for _ in range(2):  # a miss, then a hit
        request = engine.add(prompt, params)
        engine.run()
        assert request.output == expected[0, len(prompt) :].tolist()
    assert request.cached_tokens
    engine.close()
