"""LoRA adapters on several ranks: greedy tokens equal those of a plain model with the adapter merged into its weights. The
ranks divide the weights, the context, or both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.engine import LLM, Engine, SamplingParams
from kvloom.engine.parallel.rank_adapters import adapter_messages
from kvloom.models.lora import AdapterError, read_adapter
from kvloom.models.paged import divided_step
from tests.engine.test_lora import TARGETS, Adapters, drawn, params
from tests.engine.test_offload import PATIENT
from tests.engine.thread_ranks import ThreadRanks, grid_engine, parallel_engine
from tests.engines import make_engine
from tests.models.lora_adapters import greedy, merged, write_adapter
from tests.models.zoo import tiny

POOL = 1 << 22
WEIGHTS, CONTEXT, BOTH = (2, 1), (1, 2), (2, 2)
"""The number of parts of the weights and of the context."""


def ranks(adapters: Adapters, parts: tuple[int, int], **settings: Any) -> Engine:
    settings.setdefault("lora", adapters.paths)
    return grid_engine(copy.deepcopy(adapters.plain), *parts, pool_bytes=POOL, **settings)


def closed(engine: Engine) -> None:
    assert isinstance(engine.group, ThreadRanks)
    assert not engine.group.errors
    engine.cache.take_copies()
    engine.cache.check()
    engine.close()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "parts", "least"),
    [
        ("phi3", WEIGHTS, 1),
        ("mamba", WEIGHTS, 1),
        ("llama", WEIGHTS, 1),
        ("llama", (4, 1), 1),
        ("llama", CONTEXT, 10**6),
        ("gemma3_text", CONTEXT, 1),
        ("bamba", CONTEXT, 10**6),
        ("bamba", CONTEXT, 1),
        ("bamba", (4, 1), 1),
        ("bamba", BOTH, 1),
        ("qwen3_next", BOTH, 1),
        ("llama", BOTH, 1),
        ("deepseek_v3", BOTH, 1),
        ("gpt_oss", BOTH, 1),
    ],
    ids=str,
)
def test_ranks_compute_a_batch_of_base_and_three_adapters(
    family: str, parts: tuple[int, int], least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In divided steps, the tokens of a rank may have several adapters, or none. Four ranks share KV heads."""
    monkeypatch.setattr(divided_step, "MIN_TOKENS", least)
    adapters = Adapters(tmp_path, family)
    engine = ranks(adapters, parts, token_budget=32)
    prompts = drawn(family, 20, 40, 33, 50)
    names = [None, *adapters.paths]
    requests = [engine.add(p, params(), lora=name) for p, name in zip(prompts, names, strict=True)]
    engine.run()
    adapters.check(requests)
    closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "parts"), [("llama", WEIGHTS), ("bamba", CONTEXT)])
def test_more_adapters_than_slots_take_turns_on_all_ranks(
    family: str, parts: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter is sent in several messages. An adapter that loses its slot is sent again."""
    monkeypatch.setattr("kvloom.engine.parallel.rank_adapters.MESSAGE_BYTES", 2048)
    adapters = Adapters(tmp_path, family)
    assert len(list(adapter_messages(1, read_adapter(adapters.paths["a0"])))) > 3
    engine = ranks(adapters, parts, max_loras=1, ahead=True)
    requests = []
    for round_ in range(2):
        for name in (*adapters.paths, None):
            requests += [engine.add(p, params(4), lora=name) for p in drawn((round_, name), 20, 35)]
    engine.run()
    adapters.check(requests)
    closed(engine)


@pytest.mark.slow
def test_adapter_pages_come_from_tiers_on_all_ranks(tmp_path: Path) -> None:
    """Ranks that divide the context load what ranks that divide the weights stored, and the other way round."""
    adapters = Adapters(tmp_path / "adapters", "llama")
    prompts = drawn("tiers", 70, 50)
    tiers = [f"disk:{tmp_path / 'tier'}:64MiB"]
    for asked, parts, cached in (
        (prompts[:1], WEIGHTS, [0, 0]),
        (prompts, CONTEXT, [64, 64, 0, 0]),
        (prompts[1:], WEIGHTS, [48, 48]),
    ):
        engine = ranks(adapters, parts, tiers=tiers, offload=PATIENT)
        requests = [engine.add(prompt, params(), lora=name) for prompt in asked for name in ("a0", None)]
        engine.run()
        adapters.check(requests)
        assert [request.cached_tokens for request in requests] == cached
        closed(engine)


@pytest.mark.slow
def test_an_activated_adapter_applies_from_its_tokens_on_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks before the invocation tokens have the values of the base model."""
    monkeypatch.setattr(divided_step, "MIN_TOKENS", 8)
    model = tiny("llama")
    path = write_adapter(tmp_path / "a", model, TARGETS["llama"], alora_invocation_tokens=[7, 8])
    prompt = [*drawn("activated", 37)[0], 7, 8, 9]
    found = []
    for parts in ((1, 1), WEIGHTS, CONTEXT):
        if parts == (1, 1):
            engine = make_engine(copy.deepcopy(model), POOL, lora={"a": str(path)})
        else:
            engine = grid_engine(copy.deepcopy(model), *parts, pool_bytes=POOL, lora={"a": str(path)})
        request = engine.add(prompt, params(), lora="a")
        engine.run()
        found.append(request.output)
        engine.close()
    assert found[0] == found[1] == found[2]
    assert found[0] != greedy(model, prompt, len(found[0]))
    assert found[0] != greedy(merged(model, path), prompt, len(found[0]))


def test_an_adapter_of_another_model_is_refused_with_whole_sizes(tmp_path: Path) -> None:
    model = tiny("llama")
    part = copy.deepcopy(model)
    layer = part.model.layers[0].self_attn.q_proj
    part.model.layers[0].self_attn.q_proj = torch.nn.Linear(layer.in_features, layer.out_features // 2)
    path = write_adapter(tmp_path / "a", part, ("q_proj",))
    with pytest.raises(AdapterError, match=f"the model's layer has .* and {layer.out_features}:"):
        parallel_engine(model, 2, pool_bytes=POOL, lora={"a": str(path)})


@pytest.mark.slow
def test_processes_that_divide_weights_and_context_load_an_adapter_while_they_serve(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    path = write_adapter(tmp_path / "a", model, TARGETS["llama"], rank=8)
    prompts = drawn("processes", 70, 40)
    sampling = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    llm = LLM(
        str(tmp_path / "model"),
        tensor_parallel=2,
        context_parallel=2,
        device="cpu",
        dtype="float32",
        pool_bytes=POOL,
        max_loras=2,
    )
    try:
        llm.engine.load_lora("a", str(path))
        found = llm.generate(prompts, sampling, lora=["a", None])
    finally:
        llm.close()
    wanted = [greedy(merged(model, path), prompts[0], 10), greedy(model, prompts[1], 10)]
    assert [list(one.outputs[0].token_ids) for one in found] == wanted
