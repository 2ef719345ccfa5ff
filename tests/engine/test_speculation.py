"""Speculation: the tokens are those of plain decoding, for every layer type and with every feature of the cache."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.engine import Engine, SamplingParams
from kvloom.engine.speculation import (
    Controller,
    DraftedRequest,
    Estimate,
    NGramProposer,
    Speculation,
    SuffixProposer,
    TokenIndex,
)
from kvloom.kernels import cpu
from kvloom.models.fusion import small_model
from kvloom.models.paged import Work
from kvloom.tiers import HostConfig, HostTier
from kvloom.tiers.host import SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer
from tests.engine.made_tokenizers import byte_level
from tests.engines import PATIENT, make_engine
from tests.models.zoo import expected, tiny

FAMILIES = [
    "llama",
    "gemma3_text",
    "llama4_text",
    "deepseek_v3",
    "mamba",
    "mamba2",
    "bamba",
    "qwen3_next",
    "jamba",
]


class Oracle:
    """Proposes the right tokens with a given chance each, else wrong ones."""

    name = "oracle"
    is_lookup = False

    def __init__(self, answers: dict[tuple[int, ...], list[int]], chance: float = 0.7) -> None:
        self.answers, self.chance, self.rng = answers, chance, random.Random(1)

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            answer = self.answers.get(request.prompt, [])
            draft = answer[len(request.tokens) : len(request.tokens) + self.rng.randint(0, count)]
            drafts.append([t if self.rng.random() < self.chance else 3 + (t + 1) % 60 for t in draft])
        return drafts

    def request_finished(self, request: DraftedRequest) -> None:
        pass

    def step_computed(self, work: Sequence[tuple[DraftedRequest, Work]], own: Set[int]) -> None:
        pass

    def draft_verified(self, request: DraftedRequest, drafted: int, accepted: int, own: bool) -> None:
        pass


def speculating(
    model: Any, pool: int, answers: dict[tuple[int, ...], list[int]], chance: float = 0.7, **settings: Any
) -> Engine:
    engine = make_engine(model, pool, speculate="ngram", draft_tokens=5, **settings)
    assert engine.speculation is not None
    engine.speculation.proposers, engine.speculation.controller = [Oracle(answers, chance)], None
    return engine


def fixed(engine: Engine) -> Engine:
    """Let every draft have its full length, whatever it costs."""
    assert engine.speculation is not None
    engine.speculation.controller = None
    return engine


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(2)
def test_greedy_tokens_match_generate(family: str, ahead: bool) -> None:
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(8)]
    wanted = expected(model, prompts, 30)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted, strict=True)}
    engine = speculating(model, 1 << 24, answers, token_budget=24, max_running=8, ahead=ahead)
    requests = []
    for prompt in prompts:
        requests.append(engine.add(prompt, SamplingParams(max_tokens=30, temperature=0)))
        engine.step()
        engine.cache.check()
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert sum(request.accepted_tokens for request in requests) > 40
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("how", ["ngram", "suffix"])
def test_lookup_proposes_what_followed(how: str) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    prompt = [5, 9, 11, 13, 17] * 6
    (wanted,) = expected(model, [prompt], 60)
    engine = fixed(make_engine(model, 1 << 22, speculate=how))
    assert engine.speculation is not None
    request = engine.add(prompt, SamplingParams(max_tokens=60, temperature=0))
    engine.run()
    assert request.tokens == wanted
    again = engine.add(prompt, SamplingParams(max_tokens=60, temperature=0))
    before = engine.speculation.stats.steps
    engine.run()
    assert again.tokens == wanted
    if how == "suffix":  # the past answer is the draft
        assert again.accepted_tokens > 40
        assert engine.speculation.stats.steps - before < 15


def test_past_answers_stay_with_their_tenant_and_salt_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvloom.engine.speculation.lookup.MOST_TOTAL_TOKENS", 200)
    proposer = SuffixProposer()

    def request(prompt: list[int], output: list[int], tenant: str = "", salt: str = "") -> Any:
        control = SimpleNamespace(tenant=tenant, adapter="", salt=salt, store=True)
        return SimpleNamespace(
            prompt=prompt, tokens=prompt + output, output_count=len(output), control=control, token_index=None
        )

    prompt = [5, 6, 7, 8, 9, 10]
    proposer.request_finished(request(prompt, [11, 12, 13, 14], "a", "s"))
    found = [
        proposer._longest(request(prompt, [], tenant, salt), 4)
        for tenant, salt in (("a", "s"), ("a", ""), ("b", "s"))
    ]
    assert found == [[11, 12, 13, 14], [], []]
    for number in range(100):
        proposer.request_finished(request(prompt, [11, 12, 13, 14], f"tenant {number}"))
    assert proposer._past_tokens == sum(len(one[0].tokens) for one in proposer._past.values()) <= 200
    assert proposer._longest(request(prompt, [], "tenant 99"), 4) == [11, 12, 13, 14]
    assert proposer._longest(request(prompt, [], "a", "s"), 4) == []


def test_index_finds_the_longest_match_in_bulk_and_token_by_token() -> None:
    rng = random.Random(0)
    for _ in range(30):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(3, 300))]
        bulk, single = TokenIndex(), TokenIndex()
        cut = rng.randrange(len(tokens))
        bulk.add(tokens[:cut])
        bulk.add(tokens[cut:])
        for token in tokens:
            single.add([token])
        assert bulk._earlier == single._earlier
        assert bulk._last == single._last
        at, length = bulk.longest_match(tokens[-24:], own=True)
        if length:
            assert tokens[at - length : at] == tokens[-length:]
            assert at < len(tokens)


ALL_KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.8, "n": 2},
    {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.0, "logit_bias": {7: 3.0, 9: -5.0}, "min_tokens": 12, "stop_token_ids": (7, 11)},
    {"temperature": 0, "bad_token_ids": ((5,), (9, 10)), "logprobs": 1},
    {"temperature": 0.9, "stop_token_ids": (7, 12, 13, 20, 33, 41)},
    {"temperature": 0.9, "allowed_token_ids": tuple(range(3, 30)), "presence_penalty": 0.5},
    {"temperature": 0, "beam_width": 2},
]


class SeedOracle(Oracle):
    """Like `Oracle`, for answers by prompt and seed."""

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for request, count in zip(requests, counts, strict=True):
            self.answers = {request.prompt: self.by_seed.get((request.prompt, request.seed), [])}
            found += super().propose([request], [count])
        return found

    by_seed: dict[tuple[tuple[int, ...], int], list[int]]


def results(requests: list[Any]) -> list[Any]:
    return [
        (one.tokens, one.finish_reason, one.stop_reason, [list(found) for found in one.logprobs])
        for request in requests
        for one in request.family
    ]


def hits(engine: Engine, requests: list[Any]) -> list[int | None]:
    """Return the cached tokens of prompts that continue each result."""
    found = []
    for request in requests:
        for one in request.family:
            again = engine.add([*one.tokens, 3], SamplingParams(max_tokens=1, temperature=0))
            engine.run()
            found.append(again.cached_tokens)
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(1)
def test_random_requests_are_the_same_with_and_without_speculation(family: str, ahead: bool) -> None:
    """All sampling parameters together, prompts that share prefixes, requests that arrive while others run."""
    rng = random.Random(f"{family} {ahead}")
    model = tiny(family)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in ALL_KINDS]
    for i in range(3):
        prompts[3 * i + 1] = prompts[3 * i][:20] + prompts[3 * i + 1]
    every = [
        SamplingParams(max_tokens=rng.randrange(1, 40), seed=10 * i, **{"min_tokens": 0, **kind})
        if kind.get("min_tokens", 0) == 0
        else SamplingParams(max_tokens=30, seed=10 * i, **kind)
        for i, kind in enumerate(ALL_KINDS)
    ]
    settings: dict[str, Any] = {"token_budget": 24, "max_running": 8, "ahead": ahead}
    plain = make_engine(model, 1 << 24, **settings)
    wanted = [plain.add(prompt, params) for prompt, params in zip(prompts, every, strict=True)]
    plain.run()
    engine = make_engine(model, 1 << 24, speculate="ngram", draft_tokens=6, **settings)
    oracle = SeedOracle({}, 0.8)
    oracle.by_seed = {(one.prompt, one.seed): one.tokens for request in wanted for one in request.family}
    assert engine.speculation is not None
    engine.speculation.proposers, engine.speculation.controller = [oracle], None
    requests = []
    for prompt, params in zip(prompts, every, strict=True):
        requests.append(engine.add(prompt, params))
        engine.step()
        engine.cache.check()
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert results(requests) == results(wanted)
    assert engine.speculation.stats.tokens > engine.speculation.stats.rows * 1.5
    oracle.by_seed = {}
    found, without = hits(engine, requests), hits(plain, wanted)
    if ahead:  # a plain step that ran ahead computed the last token, too
        assert all(
            a is not None and b is not None and b - a in (0, 1) for a, b in zip(found, without, strict=True)
        )
    else:
        assert found == without
    engine.cache.take_copies()
    engine.cache.check()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("family", "slabs"), [("llama", 0), ("gemma3_text", 0), ("qwen3_next", 4), ("bamba", 6)]
)
@pytest.mark.few(1)
def test_preemption_and_cancel_in_a_small_pool(family: str, slabs: int, ahead: bool) -> None:
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(16)]
    wanted = expected(model, prompts, 16)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted, strict=True)}
    layout = make_engine(model, 1 << 24).layout
    room = slabs * layout.slab_bytes or 3 * layout.slab_bytes_for(max(map(len, prompts)) + 16)
    engine = speculating(model, room, answers, 0.8, token_budget=24, max_running=8, ahead=ahead)
    engine.scheduler.admission = None
    params = SamplingParams(max_tokens=16, temperature=0)
    requests = [engine.add(prompt, params, priority=i % 3) for i, prompt in enumerate(prompts)]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps % 9 == 0 and (victim := rng.choice(requests)).finish_reason is None:
            engine.cancel(victim)
        engine.cache.check()
        assert steps < 2000
    for request, tokens in zip(requests, wanted, strict=True):
        assert request.tokens == tokens[: len(request.tokens)]
        assert request.finish_reason == "cancelled" or request.tokens == tokens
    assert sum(request.preemptions for request in requests)
    assert sum(request.accepted_tokens for request in requests) > 20
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


def test_a_failed_step_is_computed_again() -> None:
    model = tiny("qwen3_next")
    model.set_attn_implementation("eager")
    prompts = [[5, 9, 11, 30 + i] for i in range(4)]
    wanted = expected(model, prompts, 20)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted, strict=True)}
    engine = speculating(model, 1 << 24, answers)
    requests = [engine.add(prompt, SamplingParams(max_tokens=20, temperature=0)) for prompt in prompts]
    run, calls = engine.runner.run, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            raise RuntimeError("out of memory")
        return run(*args)

    engine.runner.run = failing  # type: ignore[assignment]
    while engine.busy:
        with contextlib.suppress(RuntimeError):
            engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "mamba"])
def test_hits_from_tiers_are_the_same(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    model = tiny(family)
    prompts = [[rng.randrange(3, 64) for _ in range(size)] for size in (30, 37)]
    params = SamplingParams(max_tokens=34, temperature=0, stop_token_ids=(7, 12, 30))
    seen: dict[str, list[Any]] = {}
    answers: dict[tuple[int, ...], list[int]] = {}
    for how in ("off", "ngram"):
        settings: dict[str, Any] = {"speculate": how, "offload": PATIENT}
        tiers = [f"disk:{tmp_path / how}:64MiB"]
        engine = make_engine(model, 1 << 22, tiers=["host:8MiB", *tiers], **settings)
        if engine.speculation is not None:
            engine.speculation.proposers, engine.speculation.controller = [Oracle(answers, 0.8)], None
        first = [engine.add(prompt, params) for prompt in prompts]
        engine.run()
        answers |= {one.prompt: one.tokens for one in first}
        engine.close()
        engine = make_engine(model, 1 << 22, tiers=tiers, **settings)
        again = [engine.add([*one.tokens, 3], SamplingParams(max_tokens=9, temperature=0)) for one in first]
        engine.run()
        seen[how] = [[one.tokens, one.cached_tokens, one.hits] for one in (*first, *again)]
        engine.close()
        assert any(one.hits.get("disk") for one in again)
    assert seen["ngram"] == seen["off"]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_pages(kv_dtype: str) -> None:
    model = tiny("llama")
    prompt = list(range(3, 40))
    plain = make_engine(model, 1 << 22, kv_dtype)
    wanted = plain.add(prompt, SamplingParams(max_tokens=30, temperature=0))
    plain.run()
    engine = speculating(model, 1 << 22, {tuple(prompt): wanted.tokens}, kv_dtype=kv_dtype)
    request = engine.add(prompt, SamplingParams(max_tokens=30, temperature=0))
    engine.run()
    assert request.tokens == wanted.tokens
    assert request.accepted_tokens > 8


def test_structured_output_and_stop_texts() -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    tokenizer = byte_level('"name"', '": "', "true", "false", " the", "123")
    model = tiny("llama", vocab_size=len(tokenizer), eos_token_id=2, bos_token_id=1)
    model.generation_config.eos_token_id = 2
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    asked = [
        SamplingParams(max_tokens=60, temperature=0.9, seed=1, json_schema=schema),
        SamplingParams(max_tokens=60, temperature=0, json_schema=schema),
        SamplingParams(max_tokens=60, temperature=1.0, seed=2, regex="[a-c]{20,30}"),
        SamplingParams(max_tokens=60, temperature=1.0, seed=3, stop=["a", "b", "e"], min_tokens=9),
    ]
    plain = make_engine(model, 1 << 22, tokenizer=tokenizer)
    wanted = [plain.add([9, 20, 30 + i], params, text=True) for i, params in enumerate(asked)]
    plain.run()
    engine = speculating(model, 1 << 22, {one.prompt: one.tokens for one in wanted}, 0.8, tokenizer=tokenizer)
    requests = [engine.add(one.prompt, one.params, text=True) for one in wanted]
    engine.run()
    for one, other in zip(requests, wanted, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        assert one.text is not None
        assert other.text is not None
        assert one.text.text == other.text.text
    assert all(one.accepted_tokens for one in requests)
    plain.close()
    engine.close()


def test_sampled_tokens_follow_the_target_distribution() -> None:
    """Chi-square of the second token of many seeds, verified after a draft, against the exact distribution."""
    model = tiny("llama", vocab_size=16, initializer_range=0.3)
    model.set_attn_implementation("eager")
    prompt, seeds = [3, 5, 9, 11], 2000
    with torch.inference_mode():
        first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
        share = torch.softmax(model(torch.tensor([[*prompt, first]])).logits[0, -1].double(), -1).numpy()
    drafts = {tuple(prompt): [*prompt, first, int(share.argmax()), first, first]}
    engine = speculating(model, 1 << 24, drafts, 1.0, max_running=16)
    requests = [engine.add(prompt, SamplingParams(max_tokens=4, seed=i)) for i in range(seeds)]
    engine.run()
    second = [request.output[1] for request in requests if request.output[0] == first]
    wanted = share * len(second)
    enough = wanted > 5
    counts = np.bincount(second, minlength=16)
    chi = float(((counts - wanted)[enough] ** 2 / wanted[enough]).sum())
    degrees = int(enough.sum()) - 1
    assert degrees >= 3
    assert chi < degrees + 4 * (2 * degrees) ** 0.5 + 4  # about 1 in 10,000
    assert sum(request.accepted_tokens for request in requests) > 100


def save_draft(path: Path, family: str = "llama", **changes: Any) -> str:
    """Save a tiny draft model and return the setting that loads it."""
    tiny(family, **changes).save_pretrained(path)
    return f"draft={path}"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "bamba", "qwen3_next", "mamba"])
@pytest.mark.few(1)
def test_draft_model_beside_every_kind_of_target(family: str, ahead: bool, tmp_path: Path) -> None:
    """The draft shares no weight with most targets: drafts are wrong, tokens are not. Preemption and cancel, too."""
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(8)]
    wanted = expected(model, prompts, 20)
    how = save_draft(tmp_path, "gemma3_text" if family == "llama" else "llama")
    engine = fixed(make_engine(model, 1 << 22, speculate=how, token_budget=24, max_running=6, ahead=ahead))
    requests = []
    for prompt in prompts:
        requests.append(engine.add(prompt, SamplingParams(max_tokens=20, temperature=0)))
        engine.step()
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert all(request.draft_tokens for request in requests)
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}]
)
def test_a_draft_model_equal_to_the_target_is_always_accepted(params: dict[str, Any], tmp_path: Path) -> None:
    """Only if its pages are right: after prompts in chunks, hits, accepted drafts and samples with shared pages."""
    model = tiny("llama")
    engine = fixed(make_engine(model, 1 << 24, speculate=save_draft(tmp_path), token_budget=16))
    plain = make_engine(model, 1 << 24)
    prompts = [list(range(3, 40)), [*range(3, 36), 9, 9], list(range(3, 40))]
    samples = 2 if params["temperature"] else 1
    for seed, prompt in enumerate(prompts):
        asked = SamplingParams(max_tokens=30, seed=seed, n=samples, **params)
        one, other = engine.add(prompt, asked), plain.add(prompt, asked)
        engine.run()
        plain.run()
        assert results([one]) == results([other])
        for sample in one.family:
            assert sample.accepted_tokens == sample.draft_tokens > 20


@pytest.mark.skipif(not cpu.IS_BUILT, reason="the package was built without a compiler, or earlier")
@pytest.mark.parametrize("tiers", [[], ["host:16MiB"]])
def test_native_steps_give_the_tokens_of_the_model(
    tiers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, how = tiny("llama"), save_draft(tmp_path, num_hidden_layers=3)
    found = []
    for native in (True, False):
        made: list[Any] = []

        def recorded(*given: Any, native: bool = native, made: list[Any] = made) -> Any:
            made.append(small_model(*given) if native else None)
            return made[-1]

        monkeypatch.setattr("kvloom.engine.execution.model_runner.small_model", recorded)
        engine = fixed(make_engine(model, 1 << 24, speculate=how, token_budget=16, tiers=tiers))
        assert [one is not None for one in made] == [native, native]  # the target, and the draft model
        requests = [
            engine.add(list(range(3, 5 + i)), SamplingParams(max_tokens=30, temperature=i % 2, seed=i))
            for i in range(6)
        ]
        engine.run()
        engine.cache.check()
        found.append([(one.tokens, one.draft_tokens, one.accepted_tokens) for one in requests])
        engine.close()
    assert found[0] == found[1]
    assert sum(accepted for _, _, accepted in found[0])


@pytest.mark.parametrize("tier", ["host", "disk", "peer"])
def test_acceptance_after_a_hit_from_a_tier_equals_that_after_computing(tier: str, tmp_path: Path) -> None:
    model, how = tiny("llama"), save_draft(tmp_path / "draft")
    urls = {"host": "host:16MiB", "disk": f"disk:{tmp_path / 'disk'}:64MiB"}
    memory = SharedMemory(16 << 20)
    peer = PeerServer(
        HostTier(HostConfig(memory.size, 1 << 20), buffer=memory.buffer), PeerConfig(), memory
    )  # the memory of another process, as far as the engine can tell
    url = urls.get(tier, "peer://{}:{}".format(*peer.address))
    room = 2 * make_engine(model, 1 << 22, speculate=how).layout.slab_bytes_for(128)
    engine = fixed(make_engine(model, room, speculate=how, tiers=[url], offload=PATIENT))
    prompt, params = list(range(3, 40)), SamplingParams(max_tokens=40, temperature=0)
    first = engine.add(prompt, params)
    engine.run()
    if tier != "host":
        engine.close()
        engine = fixed(make_engine(model, room, speculate=how, tiers=[url], offload=PATIENT))
    else:
        for i in range(8):  # other prompts evict its pages
            engine.add([10 + i, *range(3, 60), *range(3, 50)], SamplingParams(max_tokens=1))
            engine.run()
    again = engine.add([*first.tokens, 5], params)
    engine.run()
    assert again.hits.get(tier, 0) >= 64
    assert again.accepted_tokens == again.draft_tokens > 20
    engine.close()
    peer.close()


def test_draft_models_that_cannot_work_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="recurrent layers"):
        make_engine(model, 1 << 22, speculate=save_draft(tmp_path / "a", "mamba"))
    with pytest.raises(ValueError, match="32 tokens in its vocabulary, the target 64"):
        make_engine(model, 1 << 22, speculate=save_draft(tmp_path / "b", vocab_size=32))
    with pytest.raises(ValueError, match="speculate 'sometimes' is not off, auto"):
        make_engine(model, 1 << 22, speculate="sometimes")


def decided(slope: float, chance: float, requests: int, steps: int = 400) -> tuple[Controller, float, int]:
    """Return a controller, the drafts per request and the steps with drafts, after steps that take 1 + slope * tokens ms."""
    rng, controller = random.Random(1), Controller()
    known: list[dict[str, Estimate]] = [{} for _ in range(requests)]
    drafts = with_drafts = 0
    for _ in range(steps):
        controller.step_begins(known)
        lengths, waited = [0] * requests, controller.wants_drafts
        if waited:
            estimates = [controller.acceptance.of(one, "x") for one in known]
            lengths = controller.lengths("x", estimates, [16] * requests, 512, 0)
        for one, length in zip(known, lengths, strict=True):
            accepted = next((i for i in range(length) if rng.random() > chance), length)
            if length:
                controller.acceptance.observe(one, "x", length, accepted)
        size = requests + sum(lengths)
        controller.observe_step(size, 1e-3 * (1 + slope * size), waited)
        drafts += sum(lengths)
        with_drafts += any(lengths)
    return controller, drafts / (steps * requests), with_drafts


def test_the_controller_follows_acceptance_and_cost() -> None:
    cheap, many, _ = decided(slope=0.02, chance=0.95, requests=1)
    assert many > 8
    assert cheap.reasons["x"].startswith("on: ")
    _, few, _ = decided(slope=0.02, chance=0.5, requests=1)
    assert 0.5 < few < many / 2
    saturated, _, tried = decided(slope=1.0, chance=0.6, requests=64)
    assert saturated.reasons["x"].startswith("off: 64 requests")
    assert tried < 15
    useless, _, tried = decided(slope=0.3, chance=0.02, requests=4)
    assert useless.reasons["x"].startswith("off: ")
    assert tried < 40


def off_after(requests: int) -> tuple[Controller, list[int]]:
    """Return a controller that keeps a proposer off, because a token more costs as much as a step. Also return the steps
    before each of its first probes."""
    controller, waits = Controller(), []
    for size in (1, 2, 4, 8, 16, 32, 64):
        controller.observe_step(size, 1e-3 * size)
    known: list[dict[str, Estimate]] = [{"x": Estimate(0.5)}] * requests
    assert controller.lengths("x", [Estimate(0.5)] * requests, [4] * requests, 512, 0) == [0] * requests
    for _ in range(7):
        waits.append(0)
        while not controller.wants_drafts:
            controller.step_begins(known)
            waits[-1] += 1
        assert sum(controller.lengths("x", [Estimate(0.5)] * requests, [4] * requests, 512, 0))
    assert not controller.wants_drafts
    return controller, waits


def test_probes_that_fail_become_rare() -> None:
    assert off_after(requests=1)[1] == [4, 8, 16, 32, 64, 100, 100]


def test_a_time_that_was_measured_too_high_is_measured_again() -> None:
    """Steps of 8 tokens are as fast as others, but a pause of the machine made the first one slow."""
    controller, lengths = Controller(), set()
    controller.observe_step(1, 1e-3)
    for size, seconds in ((2, 1.05e-3), (4, 1.1e-3), (8, 4e-3)):
        controller.observe_step(size, seconds, waited=True)
    for _ in range(1000):
        [length] = controller.lengths("x", [Estimate(0.9, later=0.9)], [7], 512, 0)
        lengths.add(length)
        controller.observe_step(1 + length, 1.2e-3, waited=True)
    assert min(lengths) < 7
    assert length == 7


def test_the_first_drafts_after_plain_steps_do_not_count_as_slow() -> None:
    """These also compute the tokens of the plain steps."""
    controller = Controller()
    known: list[dict[str, Estimate]] = [{"x": Estimate(0.5)}]
    for size, seconds in ((1, 1e-3), (2, 1.1e-3), (4, 1.2e-3)):
        controller.observe_step(size, seconds)
    controller.observe_proposal("x", 1, 2, 0.2e-3)
    expected = controller.lengths("x", [Estimate(0.8)], [4], 512, 0)
    for is_slower in (False, True):
        controller.step_begins(known)
        for _ in range(40):
            controller.observe_proposal("x", 1, 2, 20e-3)
        assert (controller.lengths("x", [Estimate(0.8)], [4], 512, 0) < expected) == is_slower


def test_the_controller_decides_again_if_the_requests_change() -> None:
    controller, _ = off_after(requests=4)
    for count in (4, 5, 8, 2):
        controller.step_begins([{"x": Estimate(0.5)}] * count)
        assert not controller.wants_drafts, count
    controller.step_begins([{"x": Estimate(0.5)}] * 9)
    assert controller.wants_drafts
    controller, _ = off_after(requests=4)
    controller.step_begins([{"x": Estimate(0.5)}])
    assert controller.wants_drafts


def test_the_controller_decides_again_if_acceptance_rises() -> None:
    controller, _ = off_after(requests=1)
    for _ in range(20):
        controller.step_begins([{"x": Estimate(0.55)}])
    assert not controller.wants_drafts
    for _ in range(8):
        controller.step_begins([{"x": Estimate(0.7)}])
    assert controller.wants_drafts


def test_the_controller_turns_off_a_proposer_without_drafts() -> None:
    """Waiting for each step costs 10 %. The proposer has a draft for 1 request in 20, then for 1 in 2."""
    controller = Controller(["x"])
    for size in (1, 2, 4, 8):
        controller.observe_step(size, 1e-3 * (1 + 0.02 * size))
        controller.observe_step(size, 1.1e-3 * (1 + 0.02 * size), waited=True)
    assert controller.lengths("x", [Estimate(0.7, 0.05)], [4], 64, 0) == [0]
    assert not controller.wants_drafts
    assert "5% of them have a draft" in controller.reasons["x"]
    for _ in range(200):
        controller.step_begins([{"x": Estimate(0.7, 0.05)}])
        assert not controller.wants_drafts, "a lookup is not probed"
    controller.review("x", 0.4)
    assert controller.wants_drafts
    assert controller.lengths("x", [Estimate(0.7, 0.5)], [4], 64, 0)[0] > 1


def test_a_proposer_that_is_off_is_reviewed_without_steps() -> None:
    """The drafts of a lookup that is off are compared with the output. When the output repeats, it is turned on."""
    speculation = Speculation([NGramProposer()], 4, [], 64)
    controller, rng = speculation.controller, random.Random(1)
    assert controller is not None
    controller.observe_step(1, 1e-3)
    assert controller.lengths("ngram", [Estimate(0.7, 0.0)], [4], 64, 0) == [0]
    request: Any = SimpleNamespace(
        tokens=[rng.randrange(1 << 16) for _ in range(50)], output_count=1, is_long=False, token_index=None,
        params=SamplingParams(), sequence=None, estimates={"ngram": Estimate(0.7, 0.0)}, pending=1,
    )  # fmt: skip
    for _ in range(100):
        speculation.propose([request])
        request.tokens.append(rng.randrange(1 << 16))
        assert not controller.wants_drafts
    steps = 0
    while not controller.wants_drafts and steps < 100:
        speculation.propose([request])
        request.tokens.append(request.tokens[-10])
        steps += 1
    assert 10 < steps < 40
    assert request.estimates["ngram"].found > 0.1


def test_replayed_tokens_count_as_tokens_of_the_step() -> None:
    controller = Controller()
    for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        controller.observe_step(size, 1e-3 * (1 + 0.3 * size))
    without, replayed = (
        controller.lengths("x", [Estimate(0.9)], [16], 64, 0, replays) for replays in (False, True)
    )
    assert 0 < replayed[0] < without[0]


def test_requests_longer_than_the_pool_run_beside_drafts() -> None:
    model = tiny("llama", max_position_embeddings=512)
    model.set_attn_implementation("eager")
    prompts = [[3 + i * 7 % 60 for i in range(300)], [5, 9, 11, 13]]
    wanted = expected(model, prompts, 20)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted, strict=True)}
    room = 2 * make_engine(model, 1 << 22).layout.slab_bytes_for(64)
    engine = speculating(model, room, answers, 0.9, token_budget=16, tiers=["host:16MiB"])
    requests = [engine.add(prompt, SamplingParams(max_tokens=20, temperature=0)) for prompt in prompts]
    engine.run()
    assert [request.tokens for request in requests] == wanted
    assert requests[0].is_long
    assert requests[1].accepted_tokens
    engine.cache.check()
    engine.close()
