"""The engine compared with generate(): many requests, a pool that is far too small, preemptions, cancels, priorities,
seeds.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import CacheControl
from kvloom.engine import Engine, Request, SamplingParams, default_token_budget
from kvloom.engine.execution import capturable
from kvloom.engine.scheduling import lookahead
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

GREEDY = SamplingParams(max_tokens=10, temperature=0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("family", "slabs"), [("llama", 0), ("gemma3_text", 0), ("qwen3_next", 3), ("bamba", 6)]
)
@pytest.mark.few(1)
def test_random_requests_in_a_small_pool_match_generate(family: str, slabs: int, ahead: bool) -> None:
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(24)]
    for i in range(6):  # some share what comes first
        prompts[4 * i + 1] = prompts[4 * i][:20] + prompts[4 * i + 1]
    wanted = expected(model, prompts, 10)
    layout = make_engine(model, 1 << 24).layout
    room = slabs * layout.slab_bytes or 3 * layout.slab_bytes_for(max(map(len, prompts)) + 10)
    engine = make_engine(model, room, token_budget=24, max_running=8, ahead=ahead)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests = [engine.add(prompt, GREEDY, priority=i % 3) for i, prompt in enumerate(prompts)]
    cancelled: list[Request] = []
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        if steps % 15 == 0:
            victim = rng.choice(requests)
            if victim.finish_reason is None:
                engine.cancel(victim)
                cancelled.append(victim)
        engine.cache.check()
        assert steps < 2000
    for request, tokens in zip(requests, wanted, strict=True):
        if request in cancelled:
            assert request.finish_reason == "cancelled"
            assert request.tokens == tokens[: len(request.tokens)]
        else:
            assert request.finish_reason == "length"
            assert request.tokens == tokens
    assert sum(request.preemptions for request in requests)
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


def test_cached_prefix_is_hit_and_counted() -> None:
    engine = make_engine(tiny("llama"), 1 << 22)
    first = engine.add(range(3, 43), GREEDY)
    engine.run()
    again = engine.add([*range(3, 43), 7], GREEDY)
    engine.run()
    assert first.cached_tokens == 0
    assert again.cached_tokens == 40


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "bamba", "mamba"])
@pytest.mark.parametrize("size", [32, 45])
@pytest.mark.few(3)
def test_repeated_prompt_is_a_hit(family: str, size: int) -> None:
    rng = random.Random(size)
    model = tiny(family)
    prompt, other = ([rng.randrange(3, 64) for _ in range(n)] for n in (size, 23))
    model.set_attn_implementation("eager")
    wanted, others = expected(model, [prompt, other], 10)
    engine = make_engine(model, 1 << 24, token_budget=72)
    beside = engine.add(other, GREEDY)
    first = engine.add(prompt, GREEDY)
    twin = engine.add(prompt, GREEDY)  # waits for the first one's pages, and finds its snapshot
    engine.run()
    second = engine.add(prompt, GREEDY)
    longer = engine.add([*prompt, 7], GREEDY)
    engine.run()
    assert [r.tokens for r in (first, twin, second, beside)] == [wanted, wanted, wanted, others]
    assert (first.cached_tokens, twin.cached_tokens, second.cached_tokens) == (0, size - 1, size - 1)
    assert longer.cached_tokens == (size - 1 if engine.cache.has_states and 7 != wanted[size] else size)


@pytest.mark.parametrize(("size", "steps"), [(16, 1), (17, 2), (40, 2)])
def test_snapshot_costs_one_step_of_one_token(size: int, steps: int) -> None:
    for family, expected_steps in (("qwen3_next", steps), ("llama", 1)):
        engine = make_engine(tiny(family), 1 << 24)
        request = engine.add(range(3, 3 + size), SamplingParams(max_tokens=1))
        seen = []
        while engine.busy:
            before = request.computed
            engine.step()
            seen.append(request.computed - before if request.finish_reason is None else size - before)
        assert len(seen) == expected_steps
        assert seen == [size] if expected_steps == 1 else seen == [size - 1, 1]
        again = engine.add(range(3, 3 + size), SamplingParams(max_tokens=1))
        engine.run()
        assert again.cached_tokens == (0 if family == "qwen3_next" and size == 16 else size - 1)


def test_decodes_precede_prompts_within_the_token_budget() -> None:
    engine = make_engine(tiny("llama"), 1 << 22, token_budget=8)
    early = engine.add([3, 4, 5], GREEDY)
    engine.step()
    engine.add(range(3, 40), GREEDY)
    for _ in range(4):
        work = engine.scheduler.schedule()
        assert sum(len(part.tokens) for _, part in work) == 1 + 8
        assert work[0][0] is early
        assert len(work[0][1].tokens) == 1
        batch = engine.cache.take_copies()
        assert not batch
        engine.scheduler.step_launched(work)
        engine.scheduler.commit_tokens([early], [9], [])


@pytest.mark.parametrize("ahead", [False, True])
def test_stop_tokens_and_eos_finish_a_request(ahead: bool) -> None:
    model = tiny("llama")
    engine = make_engine(model, 1 << 22, ahead=ahead)
    plain = engine.add([5, 6, 7], GREEDY)
    engine.run()
    stop = plain.output[3]
    ended = engine.add([5, 6, 7], SamplingParams(max_tokens=10, temperature=0, stop_token_ids=(stop,)))
    engine.run()
    assert ended.finish_reason == "stop"
    assert ended.output == plain.output[: plain.output.index(stop) + 1]


def test_seed_gives_the_same_tokens_in_any_batch() -> None:
    model = tiny("llama")
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=11)
    alone = make_engine(model, 1 << 22)
    lonely = alone.add([9, 8, 7], params)
    alone.run()
    crowd = make_engine(model, 1 << 22, token_budget=5, ahead=True)
    others = [crowd.add(range(3, 20 + i), SamplingParams(max_tokens=8)) for i in range(4)]
    same = crowd.add([9, 8, 7], params)
    crowd.run()
    assert same.output == lonely.output
    assert all(other.finish_reason == "length" for other in others)


def test_request_without_free_pages_finishes_with_no_room() -> None:
    engine = make_engine(tiny("llama"), 1 << 22)
    slab = engine.layout.slab_bytes
    engine = make_engine(tiny("llama"), 4 * slab)
    block = engine.layout.block_tokens
    held = engine.cache.open(engine.cache.match([1, 2, 3]))
    assert not held.extend(block + 1)  # pages in use, which cannot be evicted
    request = engine.add(range(3, 3 + block + 2), SamplingParams(max_tokens=2, temperature=0))
    engine.run()
    assert request.finish_reason == "no_room"
    held.close()
    request = engine.add(range(3, 3 + block + 2), SamplingParams(max_tokens=2, temperature=0))
    engine.run()
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    "form", [list, tuple, iter, np.array, torch.tensor, lambda ids: np.array(ids, np.uint16)]
)
def test_prompt_may_be_any_iterable_of_ids(form: Callable[[list[int]], Any]) -> None:
    ids = [5, 1, 63, 0, 7]
    request = make_engine(tiny("llama"), 1 << 20).add(form(ids))
    assert request.prompt == tuple(ids)
    assert all(type(token) is int for token in request.tokens)
    assert request.prompt_ids.tolist() == request.tokens == ids
    assert request.prompt_ids.dtype == np.int32
    assert request.prompt_ids.flags.writeable, "torch takes it as it is"


def test_infeasible_request_is_refused_with_the_numbers() -> None:
    model = tiny("llama")
    engine = make_engine(model, 1 << 16)
    with pytest.raises(ValueError, match=r"need [\d,]+ bytes of pages, but the pool has"):
        engine.add([3] * 97, SamplingParams(max_tokens=20))
    with pytest.raises(ValueError, match="exceed the model's limit of 128"):
        engine.add([3] * 120, SamplingParams(max_tokens=20))
    with pytest.raises(ValueError, match="at least one token"):
        engine.add([])
    assert engine.add([True, np.int64(5)]).tokens == [1, 5]  # type: ignore[list-item]
    with pytest.raises(TypeError, match="NoneType"):
        engine.add([5, None])  # type: ignore[list-item]
    for token in (64, -1, 2**31, 2**70):
        with pytest.raises(
            ValueError, match=rf"token {token} is outside the vocabulary: give ids from 0 to 63"
        ):
            engine.add([5, token, 6])
    for needs in ({"stop": "x"}, {"regex": "x"}):
        with pytest.raises(ValueError, match="need a tokenizer"):
            engine.add([5], SamplingParams(**needs))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is too small"):
        make_engine(model, 1000)
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"min_p": 2}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SamplingParams(**wrong)  # type: ignore[arg-type]


def test_request_waits_for_a_prefix_that_another_computes() -> None:
    engine = make_engine(tiny("llama"), 1 << 22, token_budget=64)
    shared = [5 + i % 50 for i in range(40)]
    requests = [engine.add([*shared, 7 + i], GREEDY) for i in range(4)]
    other = engine.add(range(9, 29), GREEDY)
    engine.step()
    assert [request.computed for request in requests] == [41, 0, 0, 0]
    assert other.computed == 20, "those behind are not held up"
    engine.run()
    assert [request.cached_tokens for request in requests] == [0, 32, 32, 32]
    apart = [engine.add([*shared[::-1], 7 + i], GREEDY, CacheControl(tenant=str(i))) for i in range(2)]
    engine.step()
    assert [request.computed for request in apart] == [41, 23], "tenants share nothing"
    engine.run()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "mamba"])
@pytest.mark.few(1)
def test_running_request_leaves_checkpoints_for_queued_ones(family: str) -> None:
    shared = [5 + i % 50 for i in range(100)]
    prompts = [[*shared, 7 + i, *range(9, 12 + i)] for i in range(3)] + [shared[:70]]
    wanted = expected(tiny(family), prompts, 10)
    # The pool is full, so that what windows have passed, and no point holds, leaves before the last one's turn.
    size = 5 << 18 if family == "gemma3_text" else 1 << 24
    engine = make_engine(tiny(family), size, token_budget=128)
    fill(engine, 3, 20)
    engine.run()
    requests = [engine.add(prompts[0], GREEDY)]
    fill(engine, 40, 8)
    requests += [engine.add(prompt, GREEDY) for prompt in prompts[1:]]
    engine.run()
    assert [request.tokens for request in requests] == wanted
    parts = (
        96 if engine.cache.has_states else 100
    )  # the windows' pages of a whole prompt are at its end still
    assert [request.cached_tokens for request in requests] == [0, parts, parts, 64]


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "mamba"])
def test_request_waits_for_a_checkpoint_that_another_will_take(family: str) -> None:
    """The prompt takes three steps; the others arrive after the first one. None computes the prefix again."""
    shared = [5 + i % 50 for i in range(80)]
    prompts = [[*shared, 7 + i, *range(9, 12 + i)] for i in range(4)]
    engine = make_engine(tiny(family), 1 << 24, token_budget=32)
    requests = [engine.add(prompts[0], GREEDY)]
    engine.step()
    requests += [engine.add(prompt, GREEDY) for prompt in prompts[1:]]
    other = engine.add(range(9, 19), GREEDY)
    engine.step()
    assert [request.computed for request in requests[1:]] == [0, 0, 0]
    engine.run()
    assert [request.tokens for request in requests] == expected(tiny(family), prompts, 10)
    assert [request.cached_tokens for request in requests] == [0, 80, 80, 80]
    assert other.cached_tokens == 0


def test_a_branch_costs_one_checkpoint_and_one_step() -> None:
    """A prompt takes one more checkpoint and one more step for any number of queued prompts with the same prefix."""
    shared = [5 + i % 50 for i in range(80)]
    found = {}
    for others in (0, 1, 8):
        engine = make_engine(tiny("qwen3_next"), 1 << 24, token_budget=32)
        first = engine.add([*shared, *range(7, 20)], GREEDY)
        for i in range(others):
            engine.add([*shared, 30 + i], GREEDY)
        steps = 0
        while not first.output_count:
            engine.step()
            steps += 1
        (root,) = engine.cache.state.tree.roots.values()
        places = [one.position for node in below(root) for one in node.checkpoints]
        found[others] = steps, sorted(place for place in places if place < 92)
        engine.run()
    assert found[0][1] == []
    assert found[1][1] == found[8][1] == [80]
    assert found[8][0] <= found[0][0] + 1


@pytest.mark.parametrize(("family", "kib"), [("llama", 512), ("gemma3_text", 768), ("qwen3_next", 512)])
@pytest.mark.slow
def test_pages_of_queued_requests_are_evicted_last(
    family: str, kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations take turns in a pool that is too small for all: LRU would evict each one's pages just before its turn."""
    found = {}
    for most in (0, 256):
        monkeypatch.setattr(lookahead, "MAX_PROTECTED", most)
        engine = make_engine(tiny(family), kib << 10, token_budget=128, max_running=2, eviction_policy="lru")
        ended: list[Request] = []
        turn = {engine.add([3 + i, *range(5, 50)], GREEDY): 0 for i in range(12)}
        while turn:
            for request in [request for request in engine.step() if request.finish_reason is not None]:
                ended.append(request)
                before = turn.pop(request)
                if before < 3:
                    turn[engine.add([*request.tokens, 7, 8, 9], GREEDY)] = before + 1
        engine.cache.check()
        found[most] = sum(request.cached_tokens or 0 for request in ended)
        some = ended[::9]
        assert [one.tokens for one in some] == expected(tiny(family), [list(one.prompt) for one in some], 10)
    assert found[256] > 2 * found[0]


def test_finished_requests_protect_no_pages() -> None:
    engine = make_engine(tiny("llama"), 1 << 18, token_budget=64, max_running=1)
    fill(engine, 3, 12)
    engine.run()
    running, waiting = (engine.add([3 + i, *range(5, 50)], GREEDY) for i in range(2))
    engine.step()
    assert waiting.queued_prefix is not None
    engine.cancel(waiting)
    engine.run()
    assert running.queued_prefix is waiting.queued_prefix is None
    assert not any(node.wanted_by for root in engine.cache.state.tree.roots.values() for node in below(root))


def below(node: Any) -> list[Any]:
    return [node, *(each for child in node.children.values() for each in below(child))]


def fill(engine: Engine, first: int, count: int) -> None:
    """Run prompts that share nothing with others."""
    for each in range(first, first + count):
        engine.add([each, *(3 + (i * each) % 61 for i in range(90))], GREEDY)


def test_garbage_collection_is_off_during_a_capture() -> None:
    assert gc.isenabled()
    with capturable(torch.device("cpu")):
        assert not gc.isenabled()
        with capturable(torch.device("cpu")):
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_offline_token_budget_needs_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_token_budget(torch.device("cpu")) is None

    class Device:
        total_memory = 24 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    assert default_token_budget(torch.device("cuda")) is None
    Device.total_memory = 80 << 30
    assert default_token_budget(torch.device("cuda")) == 16384


def test_scalars_of_modeling_code_are_created_on_the_device_of_a_capture() -> None:
    """The meta device has no numbers, so a tensor copied from the host would still be on the CPU."""
    with capturable(torch.device("meta")):
        made = [torch.tensor(0.5), torch.tensor(2), torch.tensor(True), torch.tensor(3, dtype=torch.float16)]
        rows = torch.tensor([1.0])
    assert [(each.device.type, each.dtype, each.dim()) for each in made] == [
        ("meta", dtype, 0) for dtype in (torch.float32, torch.int64, torch.bool, torch.float16)
    ]
    assert rows.device.type == "cpu"
