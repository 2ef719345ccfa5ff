"""LoRA adapters under the engine: greedy tokens equal those of a plain model with the adapter merged into its weights,
whatever the batch, the cache and the tiers do; and no version of an adapter hits pages of another."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.core import CacheControl, Tenant
from kvloom.engine import LLM, Engine, Request, SamplingParams
from kvloom.models.lora import AdapterError
from tests.engines import PATIENT, make_engine
from tests.models.lora_adapters import greedy, merged, write_adapter
from tests.models.test_cross_attention import crossing
from tests.models.zoo import tiny

POOL = 1 << 22
NEW = 10
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {
    "llama": LLAMA,
    "gemma3_text": ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    "qwen3_next": ("q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "down_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "bamba": ("in_proj", "out_proj", "q_proj", "gate_proj", "down_proj"),
    "mamba": ("in_proj", "x_proj", "out_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt_oss": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "kimi_linear": ("q_proj", "o_proj", "b_proj", "up_proj"),
    "minimax": ("q_proj", "qkv_proj", "out_proj", "output_gate"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "w1", "w2", "w3"),
}


def params(new: int = NEW, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, **fields)


def drawn(seed: object, *sizes: int) -> list[list[int]]:
    rng = random.Random(str(seed))
    return [[rng.randrange(3, 64) for _ in range(size)] for size in sizes]


class Adapters:
    """A tiny base model, three adapters, and the plain models that they give."""

    def __init__(self, folder: Path, family: str, count: int = 3) -> None:
        self.plain = tiny(family)
        self.paths: dict[str, str] = {}
        self.models: dict[str | None, Any] = {None: self.plain}
        for place in range(count):
            path = write_adapter(
                folder / f"a{place}", self.plain, TARGETS[family], seed=place, rank=(4, 16, 3)[place % 3]
            )
            self.paths[f"a{place}"] = str(path)
            self.models[f"a{place}"] = merged(self.plain, path)

    def engine(self, **settings: Any) -> Engine:
        settings.setdefault("lora", self.paths)
        return make_engine(copy.deepcopy(self.plain), settings.pop("pool_bytes", POOL), **settings)

    def wanted(self, name: str | None, prompt: list[int], new: int = NEW) -> list[int]:
        return greedy(self.models[name], prompt, new)

    def check(self, requests: list[Request]) -> None:
        """Compare the outputs of finished requests with the plain models."""
        for request in requests:
            name = None if request.adapter is None else request.adapter.name
            assert request.output == self.wanted(name, list(request.prompt), request.output_count), name


def finished(engine: Engine) -> None:
    engine.cache.take_copies()
    engine.cache.check()
    assert engine.cache.stats()["in_use_pages"] == 0
    engine.close()


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.few(2)
def test_a_batch_of_base_and_three_adapters(family: str, tmp_path: Path) -> None:
    own = Adapters(tmp_path, family)
    engine = own.engine(token_budget=24)
    names = [None, *own.paths]
    prompts = drawn(family, 40, 33, 20, 5)
    requests = [engine.add(prompt, params(), lora=name) for prompt in prompts[:2] for name in names]
    requests += [engine.add(prompt, params(), lora=name) for prompt, name in zip(prompts, names, strict=True)]
    engine.run()
    own.check(requests)
    assert len({tuple(request.output) for request in requests[:4]}) == 4  # every adapter has an effect
    finished(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.few(1)
def test_each_adapter_hits_only_its_own_pages(family: str, tmp_path: Path) -> None:
    own = Adapters(tmp_path, family)
    engine = own.engine()
    [prompt] = drawn(family, 48)
    for round_ in range(2):
        for name in (None, *own.paths):
            request = engine.add(prompt, params(), lora=name)
            engine.run()
            own.check([request])
            assert (request.cached_tokens or 0) == 0 if round_ == 0 else (request.cached_tokens or 0) > 0
    finished(engine)


@pytest.mark.parametrize("family", ["llama", "bamba"])
@pytest.mark.few(1)
def test_more_adapters_than_slots_take_turns(family: str, tmp_path: Path) -> None:
    own = Adapters(tmp_path, family, count=5)
    engine = own.engine(max_loras=2, token_budget=32)
    rng = random.Random(family)
    names = [rng.choice([None, *own.paths]) for _ in range(24)]
    requests = [
        engine.add(prompt, params(rng.randrange(2, 9)), lora=name)
        for prompt, name in zip(drawn(family, *(rng.randrange(4, 30) for _ in names)), names, strict=True)
    ]
    most = 0
    while engine.busy:
        engine.step()
        running = {one.adapter.digest for one in engine.scheduler.running if one.adapter is not None}
        most = max(most, len(running))
    assert most == 2
    own.check(requests)
    finished(engine)


@pytest.mark.slow
def test_a_waiting_adapter_gets_a_slot_although_others_keep_coming(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama")
    engine = own.engine(max_loras=1)
    engine.add(drawn("first", 8)[0], params(6), lora="a0")
    engine.step()
    waiting = engine.add(drawn("waiting", 8)[0], params(4), lora="a1")
    steps = 0
    while waiting.finish_reason is None:
        engine.add(drawn(steps, 8)[0], params(6), lora="a0")
        engine.step()
        steps += 1
        assert steps < 40, "requests of the other adapter pass it"
    own.check([waiting])
    engine.run()
    finished(engine)


def test_preempted_requests_keep_their_adapter(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama")
    engine = own.engine(pool_bytes=60_000, max_loras=2, token_budget=64)
    engine.scheduler.admission = None  # admits requests that later lack pages
    names = [None, "a0", "a1", "a2"] * 2
    requests = [
        engine.add(prompt, params(20), lora=name)
        for prompt, name in zip(drawn("preempted", *(20 + 3 * i for i in range(8))), names, strict=True)
    ]
    engine.run()
    assert sum(request.preemptions for request in requests) > 0
    own.check(requests)
    finished(engine)


@pytest.mark.parametrize("settings", [{"n": 3}, {"beam_width": 3, "n": 3}])
@pytest.mark.few(1)
def test_samples_and_beams_use_the_adapter_of_their_prompt(settings: dict[str, Any], tmp_path: Path) -> None:
    """The same seeds on an engine of the merged model give the same samples."""
    own = Adapters(tmp_path, "llama")
    [prompt] = drawn("samples", 30)
    temperature = 0.0 if "beam_width" in settings else 0.8
    chosen = SamplingParams(max_tokens=8, temperature=temperature, seed=3, ignore_eos=True, **settings)
    found = []
    for engine, name in ((own.engine(), "a1"), (make_engine(own.models["a1"], POOL), None)):
        request = engine.add(prompt, chosen, lora=name)
        other = engine.add(prompt, params(), lora=None)
        engine.run()
        found.append([one.output for one in request.returned_samples])
        assert other.output
        finished(engine)
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.few(1)
def test_restart_loads_pages_of_the_same_version_from_disk(family: str, tmp_path: Path) -> None:
    own = Adapters(tmp_path, family)
    prompts = drawn(family, 70, 50)
    for round_ in range(2):
        engine = own.engine(tiers=["host:8MiB", f"disk:{tmp_path / 'kv'}:64MiB"], offload=PATIENT)
        requests = [engine.add(p, params(4), lora=name) for p in prompts for name in (None, "a0", "a1")]
        engine.run()
        own.check(requests)
        assert all(bool(request.cached_tokens) == bool(round_) for request in requests)
        finished(engine)


@pytest.mark.parametrize("tiers", [[], ["host:8MiB"], ["host:8MiB", "disk"]])
@pytest.mark.few(1)
def test_a_reloaded_name_never_hits_pages_of_the_old_version(tiers: list[str], tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama")
    settings: dict[str, Any] = {}
    if tiers:
        urls = [f"disk:{tmp_path / 'kv'}:64MiB" if tier == "disk" else tier for tier in tiers]
        settings = {"tiers": urls, "offload": PATIENT}
    engine = own.engine(lora={}, max_loras=2, **settings)
    [prompt] = drawn("reload", 64)

    def run(path: str) -> Request:
        engine.load_lora("name", path, replace=True)
        request = engine.add(prompt, params(), lora="name")
        engine.run()
        return request

    first, second = run(own.paths["a0"]), run(own.paths["a1"])
    assert first.output == own.wanted("a0", prompt)
    assert second.output == own.wanted("a1", prompt)
    assert second.cached_tokens == 0
    again = run(own.paths["a0"])
    assert again.output == first.output
    assert (again.cached_tokens or 0) > 0  # the same version hits its pages
    engine.unload_lora("name")
    same = run(own.paths["a1"])
    assert same.output == second.output
    assert (same.cached_tokens or 0) > 0
    finished(engine)


def test_requests_in_flight_keep_an_unloaded_or_replaced_adapter(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama")
    engine = own.engine(lora={}, max_loras=1)
    engine.load_lora("name", own.paths["a0"])
    [prompt] = drawn("in flight", 20)
    old = engine.add(prompt, params(20), lora="name")
    for _ in range(4):
        engine.step()
    with pytest.raises(AdapterError, match="another version of adapter 'name' is already loaded"):
        engine.load_lora("name", own.paths["a1"])
    engine.load_lora("name", own.paths["a1"], replace=True)
    new = engine.add(prompt, params(20), lora="name")
    queued = engine.add(prompt, params(5), lora="name")
    engine.unload_lora("name")
    with pytest.raises(AdapterError, match="there is no adapter 'name': loaded are none"):
        engine.add(prompt, params(), lora="name")
    engine.run()
    assert old.output == own.wanted("a0", prompt, 20)
    assert new.output == own.wanted("a1", prompt, 20)
    assert queued.output == new.output[:5]
    finished(engine)


def test_tenants_with_the_same_adapter_share_no_pages(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama", count=1)
    engine = own.engine(tenants=[Tenant("one"), Tenant("two")])
    [prompt] = drawn("tenants", 40)
    for round_ in range(2):
        for tenant in ("one", "two"):
            request = engine.add(prompt, params(), CacheControl(tenant=tenant), lora="a0")
            engine.run()
            own.check([request])
            assert bool(request.cached_tokens) == bool(round_)
    finished(engine)


@pytest.mark.parametrize(
    ("family", "how"), [("llama", "ngram"), ("llama", "suffix"), ("qwen3_next", "suffix")]
)
@pytest.mark.few(1)
def test_speculation_verifies_with_the_adapter(family: str, how: str, tmp_path: Path) -> None:
    own = Adapters(tmp_path, family)
    engine = own.engine(speculate=how, draft_tokens=4)
    assert engine.speculation is not None
    engine.speculation.controller = None  # every draft has its full length
    pattern = drawn(family, 6)[0]
    prompts = [(pattern * 8)[: 30 + i] for i in range(4)]
    names = [None, *own.paths]
    for _ in range(2):
        requests = [engine.add(p, params(16), lora=name) for p, name in zip(prompts, names, strict=True)]
        engine.run()
        own.check(requests)
    assert sum(request.draft_tokens for request in requests) > 0
    finished(engine)


@pytest.mark.slow
def test_a_draft_model_without_the_adapter_changes_no_token(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama")
    tiny("llama", num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    engine = own.engine(speculate=f"draft={tmp_path / 'draft'}", pool_bytes=1 << 24)
    assert engine.speculation is not None
    engine.speculation.controller = None
    names = [None, *own.paths]
    requests = [
        engine.add(prompt, params(12), lora=name)
        for prompt, name in zip(drawn("draft", 20, 21, 30, 9), names, strict=True)
    ]
    engine.run()
    assert sum(request.draft_tokens for request in requests) > 0
    own.check(requests)
    finished(engine)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.few(1)
def test_quantised_pages(kv_dtype: str, tmp_path: Path) -> None:
    """The same pages on an engine of the merged model give the same tokens."""
    own = Adapters(tmp_path, "llama")
    prompts, names = drawn(kv_dtype, 40, 20, 30), ["a0", "a1", "a2"]
    engine = own.engine(kv_dtype=kv_dtype)
    requests = [engine.add(p, params(), lora=name) for p, name in zip(prompts, names, strict=True)]
    engine.run()
    for request, prompt, name in zip(requests, prompts, names, strict=True):
        alone = make_engine(own.models[name], POOL, kv_dtype)
        wanted = alone.add(prompt, params())
        alone.run()
        assert request.output == wanted.output
        alone.close()
    finished(engine)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.few(1)
def test_chunked_prompts_and_steps_ahead(ahead: bool, tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama")
    engine = own.engine(token_budget=7, ahead=ahead)
    names = [None, *own.paths]
    requests = [
        engine.add(prompt, params(), lora=name)
        for prompt, name in zip(drawn(ahead, 40, 25, 33, 12), names, strict=True)
    ]
    engine.run()
    own.check(requests)
    finished(engine)


@pytest.mark.slow
def test_embeddings_use_the_adapter(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama", count=1)
    [prompt] = drawn("embed", 20)
    llm = LLM(copy.deepcopy(own.plain), pool_bytes=POOL, lora=own.paths)
    found = torch.from_numpy(llm.embed([prompt, prompt], lora=["a0", None]))
    for row, name in zip(found, ("a0", None), strict=True):
        with torch.inference_mode():
            states = own.models[name].model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        assert torch.allclose(row, states / states.norm(), atol=1e-5)
    llm.close()


def test_the_offline_api_takes_one_adapter_for_each_prompt(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama")
    llm = LLM(copy.deepcopy(own.plain), pool_bytes=POOL, lora=[f"a0={own.paths['a0']}"], max_loras=2)
    [prompt] = drawn("llm", 20)
    results = llm.generate([prompt, prompt], params(), lora=[None, "a0"])
    assert [one.outputs[0].token_ids for one in results] == [
        own.wanted(name, prompt) for name in (None, "a0")
    ]
    llm.load_lora("later", own.paths["a1"])
    assert [delta.token_ids[0] for delta in llm.stream(prompt, params(), lora="later")] == own.wanted(
        "a1", prompt
    )
    with pytest.raises(ValueError, match="1 adapters do not match 2 prompts"):
        llm.generate([prompt, prompt], params(), lora=["a0"])
    llm.unload_lora("later")
    with pytest.raises(ValueError, match="there is no adapter 'later': loaded are a0"):
        llm.generate(prompt, params(), lora="later")
    llm.close()


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama", count=1)
    engine = make_engine(copy.deepcopy(own.plain), POOL)
    with pytest.raises(ValueError, match="adapter 'a0' needs an engine with adapters"):
        engine.add([3, 4, 5], params(), lora="a0")
    with pytest.raises(ValueError, match="needs an engine with slots for adapters"):
        engine.load_lora("a0", own.paths["a0"])
    with pytest.raises(ValueError, match="is not NAME=FOLDER"):
        own.engine(lora=["a0"])
    with pytest.raises(ValueError, match="is given twice"):
        own.engine(lora=["a=x", "a=y"])
    with pytest.raises(AdapterError, match="raise max_lora_rank"):
        own.engine(
            lora={"large": str(write_adapter(tmp_path / "r", own.plain, LLAMA, rank=32))}, max_lora_rank=16
        )


def test_layers_that_modeling_code_does_not_call_are_refused(tmp_path: Path) -> None:
    model = tiny("mamba")
    folder = write_adapter(tmp_path / "dt", model, ("dt_proj",))
    with pytest.raises(AdapterError, match="dt_proj is never called as a layer"):
        make_engine(model, POOL, lora={"dt": str(folder)})


def test_layers_of_cross_attention_are_refused(tmp_path: Path) -> None:
    model = crossing()
    for name, reason in (("q_proj", "only the tokens that see an image"), ("v_proj", "reads images")):
        folder = write_adapter(tmp_path / name, model, (name,), below="model.language_model.layers.1.")
        with pytest.raises(AdapterError, match=reason):
            make_engine(copy.deepcopy(model), POOL, lora={"one": str(folder)})


# -- activated LoRA -----------------------------------------------------------------------------------

INVOCATION = [60, 61]


class Activated(Adapters):
    """Adapters that apply from the last occurrence of INVOCATION on."""

    def __init__(self, folder: Path, family: str) -> None:
        super().__init__(folder, family, count=2)
        for name in self.paths:
            path = write_adapter(
                folder / f"act-{name}",
                self.plain,
                TARGETS[family],
                seed=int(name[1]),
                rank=4,
                alora_invocation_tokens=INVOCATION,
            )
            self.paths[name] = str(path)

    def wanted(self, name: str | None, prompt: list[int], new: int = NEW) -> list[int]:
        """Greedy tokens of the plain model, whose linear layers add the term only from the activation on."""
        starts = [i for i in range(len(prompt) - 1) if prompt[i : i + 2] == INVOCATION]
        if name is None or not starts:
            return greedy(self.plain, prompt, new)
        return _activated_greedy(self.plain, Path(self.paths[name]), prompt, starts[-1], new)


def _activated_greedy(plain: Any, folder: Path, prompt: list[int], start: int, new: int) -> list[int]:
    from safetensors.torch import load_file

    model, tensors = copy.deepcopy(plain), load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())

    def hook(name: str) -> Any:
        a, b = (tensors[f"{name}.lora_{which}.weight"] for which in "AB")

        def add(_: Any, given: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            changed = out.clone()
            changed[:, start:] += given[0][:, start:] @ a.t() @ b.t() * (8.0 / 4)
            return changed

        return add

    for name in {key.partition(".lora_")[0] for key in tensors}:
        modules[name.removeprefix("base_model.model.")].register_forward_hook(hook(name))
    tokens = list(prompt)
    for _ in range(new):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
@pytest.mark.few(1)
def test_an_activated_adapter_applies_from_its_invocation_tokens_on(family: str, tmp_path: Path) -> None:
    own = Activated(tmp_path, family)
    engine = own.engine(token_budget=16)
    [head, tail] = drawn(family, 37, 7)
    prompts = [
        [*head, *INVOCATION, *tail],
        [*INVOCATION, *head[:9], *INVOCATION],  # the last occurrence counts
        [*INVOCATION, *head],
        head,  # without the tokens it does not apply
    ]
    requests = [(engine.add(p, params(), lora=name), name) for p in prompts for name in ("a0", "a1", None)]
    engine.run()
    for request, name in requests:
        assert request.output == own.wanted(name, list(request.prompt)), (name, request.prompt)
    assert len({tuple(request.output) for request, _ in requests[:3]}) == 3
    finished(engine)


@pytest.mark.parametrize("tiers", [[], ["host:8MiB"]])
@pytest.mark.few(1)
def test_blocks_before_the_activation_are_shared_with_the_base(tiers: list[str], tmp_path: Path) -> None:
    own = Activated(tmp_path, "llama")
    [head, tail] = drawn("shared", 53, 20)
    prompt = [*head, *INVOCATION, *tail]
    for first, second in ((None, "a0"), ("a0", None), ("a0", "a1"), ("a1", "a1")):
        engine = own.engine(**({"tiers": tiers, "offload": PATIENT} if tiers else {}))
        for name in (first, second):
            request = engine.add(prompt, params(), lora=name)
            engine.run()
            assert request.output == own.wanted(name, prompt)
        # The tree compares single tokens, so the hit ends exactly at the activation.
        assert request.cached_tokens == (len(prompt) - 1 if first == second else len(head))
        finished(engine)


@pytest.mark.slow
def test_base_blocks_of_an_activated_adapter_are_loaded_after_a_restart(tmp_path: Path) -> None:
    own = Activated(tmp_path, "llama")
    [head, tail] = drawn("restart", 53, 20)
    prompt = [*head, *INVOCATION, *tail]
    for name, cached in (("a0", 0), (None, 48), ("a1", 48), ("a0", 64)):
        engine = own.engine(tiers=[f"disk:{tmp_path / 'kv'}:64MiB"], offload=PATIENT)
        request = engine.add(prompt, params(1), lora=name)
        engine.run()
        assert request.output == own.wanted(name, prompt, 1)
        assert request.cached_tokens == cached
        finished(engine)


@pytest.mark.slow
def test_a_new_version_of_an_activated_adapter_hits_only_base_blocks(tmp_path: Path) -> None:
    own = Activated(tmp_path, "llama")
    engine = own.engine(lora={}, max_loras=1)
    [head, tail] = drawn("version", 40, 20)
    prompt = [*head, *INVOCATION, *tail]
    for name, cached in (("a0", 0), ("a1", 40), ("a0", 61)):
        engine.load_lora("name", own.paths[name], replace=True)
        request = engine.add(prompt, params(), lora="name")
        engine.run()
        assert request.output == own.wanted(name, prompt)
        assert request.cached_tokens == cached
    finished(engine)


def test_events_name_the_adapter(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    from kvloom.events_wire import BlockStored, EventDecoder

    own = Adapters(tmp_path, "llama", count=1)
    engine = own.engine(kv_events=f"ipc://{tmp_path}/events")
    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"ipc://{tmp_path}/events")
        found: dict[str | None, int] = {}
        tries = 0
        while found.keys() != {"a0", None}:  # a subscription needs some time
            tries += 1
            assert tries < 100
            for name in (None, "a0"):
                engine.add(drawn(tries, 40)[0], params(1), lora=name)
            engine.run()
            while socket.poll(100):
                for event in EventDecoder().decode(socket.recv_multipart()[-1]).events:
                    if isinstance(event, BlockStored):
                        found[event.lora_name] = found.get(event.lora_name, 0) + len(event.block_hashes)
        assert found["a0"] >= 2
    finally:
        context.destroy(linger=0)
        finished(engine)


@pytest.mark.slow
def test_engines_on_one_model_have_their_own_adapters(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama")
    model = copy.deepcopy(own.plain)
    engines = [
        make_engine(model, POOL, lora={"name": own.paths["a0"]}),
        make_engine(model, POOL),
        make_engine(model, POOL, lora={"name": own.paths["a1"]}),
    ]
    [prompt] = drawn("engines", 30)
    requests = [
        engine.add(prompt, params(), lora=name)
        for engine, name in zip(engines, ("name", None, "name"), strict=True)
    ]
    while any(engine.busy for engine in engines):
        for engine in engines:
            if engine.busy:
                engine.step()
    assert [one.output for one in requests] == [own.wanted(name, prompt) for name in ("a0", None, "a1")]
    for engine in engines:
        finished(engine)


@pytest.mark.slow
def test_a_prefill_worker_hands_over_pages_of_an_adapter(tmp_path: Path) -> None:
    """Both workers have the same version, under different names."""
    own = Adapters(tmp_path, "llama")
    [prompt] = drawn("hand-over", 110)
    first = own.engine(tiers=["host:16MiB?share=0&checked=1"], offload=PATIENT, token_budget=32)
    assert first.peer_address is not None
    address = "{}:{}".format(*first.peer_address)
    renamed = {"other": own.paths["a1"], "wrong": own.paths["a0"]}
    second = own.engine(lora=renamed, tiers=[f"peer://{address}?timeout=2"], offload=PATIENT)
    given = first.add(prompt, params(1), offers_pages=True, lora="a1")
    first.run()
    got = second.add(prompt, params(), awaits_peer=address, lora="other")
    limit = time.monotonic() + 60
    while got.finish_reason is None:
        assert time.monotonic() < limit
        second.step()
        first.step()
    assert got.output == own.wanted("a1", prompt)
    assert got.output[:1] == given.output
    assert got.cached_tokens == 96
    other = second.add(prompt, params(), lora="wrong")
    second.run()
    assert other.output == own.wanted("a0", prompt)
    assert other.cached_tokens == 0
    finished(second)
    finished(first)


@pytest.mark.slow
def test_a_request_longer_than_the_pool_uses_its_adapter(tmp_path: Path) -> None:
    own = Adapters(tmp_path, "llama", count=2)
    own.plain.config.max_position_embeddings = 1024
    sizes = own.engine()
    pool = 6 * sizes.layout.slab_bytes
    sizes.close()
    engine = own.engine(pool_bytes=pool, tiers=["host:8MiB"], max_context=400)
    prompts = drawn("long", 300, 20)
    requests = [engine.add(p, params(), lora=name) for p, name in zip(prompts, ("a0", "a1"), strict=True)]
    engine.run()
    assert requests[0].is_long
    assert engine.offload is not None
    assert engine.offload.stats.cold_pages > 0
    own.check(requests)
    engine.offload.flush()
    finished(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_prompts_with_images_use_their_adapter(family: str, tmp_path: Path) -> None:
    from tests.models import image_prompts as pictures

    plain = pictures.vision_model(family)
    decoder = next(name for name, module in plain.named_modules() if module is plain.get_decoder())
    layers = ("q_proj", "v_proj", "down_proj")
    path = write_adapter(tmp_path / "a", plain, layers, below=f"{decoder}.")
    both = write_adapter(tmp_path / "both", plain, ("q_proj", "qkv"))
    with pytest.raises(AdapterError, match="is not part of the text model"):
        make_engine(copy.deepcopy(plain), 8 << 20, lora={"both": str(both)})
    image = pictures.image_of(family, 1)
    prompt = pictures.prompt_of(family, pictures.words(1, 9), image, pictures.words(2, 7))
    models = {None: plain, "a": merged(plain, path)}
    wanted = {name: pictures.expected(family, model, prompt, [image], 6) for name, model in models.items()}
    engine = make_engine(copy.deepcopy(plain), 8 << 20, lora={"a": str(path)})
    for _ in range(2):
        requests = [engine.add(prompt, params(6), images=[image], lora=name) for name in (None, "a")]
        engine.run()
        for request, name in zip(requests, (None, "a"), strict=True):
            assert request.tokens == wanted[name]
    assert all(request.cached_tokens for request in requests)
    assert wanted[None] != wanted["a"]
    finished(engine)


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.few(1)
def test_a_pin_keeps_the_pages_of_an_adapter(activated: bool, tmp_path: Path) -> None:
    own = Activated(tmp_path, "llama") if activated else Adapters(tmp_path, "llama")
    llm = LLM(copy.deepcopy(own.plain), pool_bytes=POOL, lora=own.paths)
    [head, tail] = drawn("pin", 40, 30)
    prompt = [*head, *INVOCATION, *tail]
    llm.generate(prompt, params(1), lora="a0")
    pins = [llm.pin(prompt, 60.0, lora=name) for name in ("a0", "a1", None)]
    shared = len(head) if activated else 0
    assert [pin.length for pin in pins] == [len(prompt), shared, shared]
    for pin in pins:
        llm.unpin(pin)
    llm.close()


@pytest.mark.parametrize("settings", [{"lora": {"a": "missing"}}, {"max_loras": 2}])
@pytest.mark.few(1)
def test_a_model_with_its_own_cache_refuses_adapters(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one sequence after the other"):
        make_engine(tiny("bloom"), POOL, **settings)
