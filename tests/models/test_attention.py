"""What the seams take and refuse. That their tokens are generate()'s is in `test_zoo`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from kvloom.core import PoolLayout
from kvloom.kernels.memory import allocate
from kvloom.models.paged import Pages
from kvloom.models.specs import ModelError, model_spec

from .tiny import SIZES, TINY
from .zoo import Runner, expected, prompts_of, tiny


def test_what_is_no_layer_of_a_model_is_refused_by_name() -> None:
    config = {**SIZES, **TINY["mllama_text_model"]}
    layers = dict(model_spec(config, kv_dtype="fp32").layers)
    layout = PoolLayout.build(layers)
    assert Pages(layout, allocate(layout, 3)).cross_views.keys() == {1, 3}
    layout = PoolLayout.build({"encoder": layers["layers.0.attention"]})
    with pytest.raises(ModelError, match=r"'encoder'.* is not a layer of a model"):
        Pages(layout, allocate(layout, 3))


def test_pages_want_a_step_first() -> None:
    layout = PoolLayout.build(model_spec(tiny("llama").config.to_dict(), kv_dtype="fp32").layers)
    with pytest.raises(RuntimeError, match="call begin"):
        Pages(layout, allocate(layout, 20)).batch  # noqa: B018


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "deepseek_v3"))],
)
@pytest.mark.slow
def test_a_compiler_sees_one_operation_a_layer(family: str) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3_text" else {}
    model, prompts = tiny(family, num_hidden_layers=2, **kinds), prompts_of(1)
    wanted = expected(model, prompts, 6)
    runner = Runner(model)
    seen: list[torch.fx.GraphModule] = []

    def compiled(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiled, inference_compiler=compiled)
    model.forward = torch.compile(model.forward, backend=backend, dynamic=True, fullgraph=True)
    assert runner.generate(prompts, 6) == wanted
    assert 1 <= len(seen) <= 3  # of any number of tokens, and of one
    for graph in seen:
        calls = [node for node in graph.graph.nodes if "kvloom.attend" in str(node.target)]
        assert len(calls) == model.config.num_hidden_layers
        given = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes = [tensor.untyped_storage().nbytes() for tensor in given if isinstance(tensor, torch.Tensor)]
        assert all(size < runner.buffer.nbytes for size in sizes)  # the pool stays outside


def test_what_attends_without_having_written_is_refused() -> None:
    layout = PoolLayout.build(model_spec(tiny("llama").config.to_dict(), kv_dtype="fp32").layers)
    pages = Pages(layout, allocate(layout, 20))
    pages.update(torch.zeros(1), torch.zeros(1), 1)
    with pytest.raises(ModelError, match="layer 0 attends, but has not written"):
        pages.take(0)
