"""LoRA adapters with context parallelism: greedy tokens equal those of a plain model with the adapter merged into its
weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvloom.engine import LLM, Engine, SamplingParams
from kvloom.models.paged import divided_step
from tests.engine.test_lora import TARGETS, Adapters, drawn, params
from tests.engine.test_offload import PATIENT
from tests.engine.test_rank_lora import POOL, closed
from tests.engine.thread_ranks import context_engine, grid_engine
from tests.engines import make_engine
from tests.models.lora_adapters import greedy, merged, write_adapter
from tests.models.zoo import tiny

FAMILIES = ("llama", "bamba", "gemma3_text", "qwen3_next", "deepseek_v3", "gpt_oss")


def ranks(adapters: Adapters, count: int = 2, **settings: Any) -> Engine:
    settings.setdefault("lora", adapters.paths)
    return context_engine(copy.deepcopy(adapters.plain), count, pool_bytes=POOL, **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "least"), [*((family, 1) for family in FAMILIES), ("llama", 10**6), ("bamba", 10**6)]
)
def test_two_ranks_compute_a_batch_of_base_and_three_adapters(
    family: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In divided steps, the tokens of a rank may have several adapters, or none."""
    monkeypatch.setattr(divided_step, "MIN_TOKENS", least)
    adapters = Adapters(tmp_path, family)
    engine = ranks(adapters, token_budget=32)
    prompts = drawn(family, 20, 40, 33, 50)
    names = [None, *adapters.paths]
    requests = [engine.add(p, params(), lora=name) for p, name in zip(prompts, names, strict=True)]
    engine.run()
    adapters.check(requests)
    closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_adapters_on_ranks_that_divide_weights_and_context(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divided_step, "MIN_TOKENS", 1)
    adapters = Adapters(tmp_path, family)
    engine = grid_engine(copy.deepcopy(adapters.plain), 2, 2, pool_bytes=POOL, lora=adapters.paths)
    names = [None, *adapters.paths]
    requests = [
        engine.add(p, params(), lora=name)
        for p, name in zip(drawn(family, 20, 40, 33, 50), names, strict=True)
    ]
    engine.run()
    adapters.check(requests)
    closed(engine)


@pytest.mark.slow
def test_more_adapters_than_slots_take_turns_on_all_ranks(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, "bamba")
    engine = ranks(adapters, 4, max_loras=1, ahead=True)
    requests = []
    for round_ in range(2):
        for name in (*adapters.paths, None):
            requests += [engine.add(p, params(4), lora=name) for p in drawn((round_, name), 20, 35)]
    engine.run()
    adapters.check(requests)
    closed(engine)


@pytest.mark.slow
def test_adapter_pages_come_from_tiers_on_all_ranks(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path / "adapters", "llama")
    (prompt,) = drawn("tiers", 70)
    tiers = [f"disk:{tmp_path / 'tier'}:64MiB"]
    for round_ in range(2):
        engine = ranks(adapters, tiers=tiers, offload=PATIENT)
        requests = [engine.add(prompt, params(), lora=name) for name in ("a0", None)]
        engine.run()
        adapters.check(requests)
        assert [request.cached_tokens for request in requests] == ([64, 64] if round_ else [0, 0])
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
    for count in (1, 2):
        if count == 1:
            engine = make_engine(copy.deepcopy(model), POOL, lora={"a": str(path)})
        else:
            engine = context_engine(copy.deepcopy(model), 2, pool_bytes=POOL, lora={"a": str(path)})
        request = engine.add(prompt, params(), lora="a")
        engine.run()
        found.append(request.output)
        engine.close()
    assert found[0] == found[1]
    assert found[0] != greedy(model, prompt, len(found[0]))
    assert found[0] != greedy(merged(model, path), prompt, len(found[0]))


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
