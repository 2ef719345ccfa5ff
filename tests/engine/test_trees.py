"""Draft trees: every branch is computed as if it were alone, and the tokens are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import CacheControl
from kvloom.engine import Engine, EngineConfig, SamplingParams
from kvloom.engine.speculation import Controller, Draft, DraftedRequest, Estimate
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.memory import layer_views
from kvloom.models.paged import BatchBuilder, Work
from tests.engine.made_tokenizers import byte_level
from tests.engine.test_heads import assert_same_pages, save
from tests.engine.test_speculation import ALL_KINDS, PATIENT, hits, results
from tests.engines import make_engine
from tests.models.heads import EagleReference, Reference, save_eagle, save_mtp
from tests.models.zoo import expected, tiny

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "gemma3_text", "llama4_text", "deepseek_v3"]


def random_parents(count: int, rng: random.Random) -> tuple[int, ...]:
    """A random tree: each node follows an earlier one, or the token before the tree."""
    return tuple(rng.randrange(-1, node) for node in range(count))


def path(parents: tuple[int, ...], node: int) -> list[int]:
    """The nodes from the root of the tree to `node`."""
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(4)
def test_logits_of_a_tree_equal_those_of_each_branch(family: str, kv_dtype: Any) -> None:
    rng = random.Random(family)
    model = tiny(family)
    engine = make_engine(model, 1 << 23, kv_dtype, token_budget=64, max_running=4)
    cache, runner = engine.cache, engine.runner
    prompts = [[rng.randrange(3, 64) for _ in range(length)] for length in (5, 15, 37)]
    parents = [random_parents(count, rng) for count in (12, 20, 5)]
    nodes = [[rng.randrange(3, 64) for _ in part] for part in parents]
    sequences = []
    for prompt in prompts:
        sequence = cache.open(cache.match(np.array(prompt, np.int32)))
        assert not sequence.extend(len(prompt))
        runner.run([Work(sequence, np.array(prompt))])
        sequence.commit(np.array(prompt, np.int32))
        sequences.append(sequence)
    last = [rng.randrange(3, 64) for _ in prompts]

    def alone(i: int, tokens: list[int]) -> torch.Tensor:
        assert not sequences[i].extend(1 + len(tokens))
        return runner.run([Work(sequences[i], np.array([last[i], *tokens]), drafts=len(tokens))])

    wanted = [
        torch.stack(
            [alone(i, [])[-1]]
            + [
                alone(i, [nodes[i][at] for at in path(parents[i], node)])[-1]
                for node in range(len(parents[i]))
            ]
        )
        for i in range(3)
    ]
    works = []
    for i, sequence in enumerate(sequences):
        assert not sequence.extend(1 + len(nodes[i]))
        tokens = np.array([last[i], *nodes[i]])
        works.append(Work(sequence, tokens, drafts=len(nodes[i]), parents=parents[i]))
    found = runner.run(works)
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=1e-4)
    stage = BatchBuilder(
        cache, "cpu", 200, 4, mirrored=True, tree_columns=32
    )  # as for CUDA graphs, with padding
    stage.send_drafted(works, 48)
    replayed = runner._forward(stage.drafted(48, 32, runner.chosen), None)
    torch.testing.assert_close(replayed[: len(found)], found, atol=1e-4, rtol=1e-4)


class TreeOracle:
    """Proposes random trees. Each node continues the right answer with a given chance, if its parent does."""

    name = "oracle"
    is_lookup = False

    def __init__(self, answers: dict[Any, list[int]], chance: float = 0.7, vocabulary: int = 60) -> None:
        self.answers, self.chance, self.rng, self.vocabulary = answers, chance, random.Random(1), vocabulary

    def propose(self, requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[Draft]:
        return [self.tree(request, count) for request, count in zip(requests, counts, strict=True)]

    def tree(self, request: DraftedRequest, count: int) -> Draft:
        answer = self.answers.get((request.prompt, request.seed), self.answers.get(request.prompt, []))
        count = self.rng.randint(0, count)
        parents = random_parents(count, self.rng)
        tokens: list[int] = []
        depths: list[int] = []
        right = {-1}
        for node, parent in enumerate(parents):
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            siblings = {tokens[i] for i in range(node) if parents[i] == parent}
            at = len(request.tokens) + depths[node] - 1
            wanted = answer[at] if at < len(answer) and parent in right else None
            if wanted is not None and wanted not in siblings and self.rng.random() < self.chance:
                right.add(node)
                tokens.append(wanted)
            else:
                others = set(range(3, 3 + self.vocabulary)) - siblings - {wanted}
                tokens.append(self.rng.choice(sorted(others)))
        return Draft(tokens, parents=parents)

    def request_finished(self, request: DraftedRequest) -> None:
        pass

    def step_computed(self, work: Sequence[tuple[DraftedRequest, Work]], own: Set[int]) -> None:
        pass

    def draft_verified(self, request: DraftedRequest, drafted: int, accepted: int, own: bool) -> None:
        pass


def growing(
    model: Any, pool: int, answers: dict[Any, list[int]], chance: float = 0.7, **settings: Any
) -> Engine:
    """Return an engine whose drafts are trees of up to 12 nodes."""
    engine = make_engine(model, pool, speculate="ngram", draft_tokens=12, **settings)
    assert engine.speculation is not None
    engine.speculation.proposers, engine.speculation.controller = [TreeOracle(answers, chance)], None
    return engine


def all_pages(engine: Engine, tokens: list[int]) -> dict[str, tuple[int, torch.Tensor]]:
    """Return every field of every layer for the cached tokens of a prompt that begins with `tokens`, and the first token
    that is still visible."""
    sequence = engine.cache.open(engine.cache.match(np.array([*tokens, 3, 3], np.int32), CacheControl()))
    for batch in engine.cache.take_copies():
        copy_pages(engine.buffer, batch.page_stride, batch.source, batch.target)
    found = {}
    for name, view in layer_views(engine.buffer, engine.layout).items():
        group = engine.layout.groups[view.group]
        if group.spec.unit != "token":
            continue
        table = engine.cache.page_tables[group.column + view.run, sequence.row]
        pages = torch.from_numpy(table.astype(np.int64)).to(engine.device)
        first = group.spec.visibility.first_visible(sequence.length)
        for field, x in view.fields.items():
            found[f"{name} {field}"] = first, x[pages].flatten(0, 1)[: sequence.length].clone()
    sequence.close()
    return found


def assert_pages_of_a_prompt(engine: Engine, tokens: list[int], near: float = 1e-4, **settings: Any) -> None:
    """Check that the pages of `tokens` are those of an engine that computes the tokens as a prompt."""
    plain = make_engine(engine.model, 1 << 26 if engine.device.type == "cuda" else 1 << 23, **settings)
    plain.add([*tokens, 3, 3], SamplingParams(max_tokens=1, temperature=0))
    plain.run()
    ours, theirs = all_pages(engine, tokens), all_pages(plain, tokens)
    assert ours.keys() == theirs.keys()
    for name, (first, x) in ours.items():
        other_first, other = theirs[name]
        seen = slice(max(first, other_first), min(len(x), len(other)))
        if seen.start == seen.stop and first == len(x):
            continue  # a chunk has just ended
        assert seen.start < seen.stop
        torch.testing.assert_close(x[seen].float(), other[seen].float(), atol=near, rtol=near)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_next"])
@pytest.mark.few(4)
def test_greedy_tokens_and_pages_are_those_without_drafts(family: str, ahead: bool) -> None:
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    wanted = expected(model, prompts, 36)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted, strict=True)}
    engine = growing(model, 1 << 24, answers, token_budget=24, max_running=8, ahead=ahead)
    requests = []
    for prompt in prompts:
        requests.append(engine.add(prompt, SamplingParams(max_tokens=36, temperature=0)))
        engine.step()
        engine.cache.check()
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert sum(request.accepted_tokens for request in requests) > 40
    for request in requests[:2]:
        assert_pages_of_a_prompt(engine, request.tokens[:-1])
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.few(2)
def test_random_requests_are_the_same_with_and_without_trees(family: str, ahead: bool) -> None:
    """All sampling parameters together, prompts that share prefixes, requests that arrive while others run."""
    rng = random.Random(f"{family} {ahead}")
    model = tiny(family)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in ALL_KINDS]
    for i in range(3):
        prompts[3 * i + 1] = prompts[3 * i][:20] + prompts[3 * i + 1]
    every = [SamplingParams(max_tokens=40, seed=10 * i, **kind) for i, kind in enumerate(ALL_KINDS)]
    settings: dict[str, Any] = {"token_budget": 24, "max_running": 8, "ahead": ahead}
    plain = make_engine(model, 1 << 24, **settings)
    wanted = [plain.add(prompt, params) for prompt, params in zip(prompts, every, strict=True)]
    plain.run()
    answers = {(one.prompt, one.seed): one.tokens for request in wanted for one in request.family}
    engine = growing(model, 1 << 24, answers, 0.8, **settings)
    requests = []
    for prompt, params in zip(prompts, every, strict=True):
        requests.append(engine.add(prompt, params))
        engine.step()
        engine.cache.check()
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert results(requests) == results(wanted)
    assert engine.speculation is not None
    assert engine.speculation.stats.tokens > engine.speculation.stats.rows * 1.4
    engine.speculation.proposers = []
    if not ahead:  # a plain step that ran ahead computed the last token, too
        assert hits(engine, requests) == hits(plain, wanted)
    engine.cache.take_copies()
    engine.cache.check()
    assert engine.cache.stats()["in_use_pages"] == 0


def test_structured_output_and_stop_texts() -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    tokenizer = byte_level('"name"', '": "', "true", "false", " the", "123")
    model = tiny("llama", vocab_size=len(tokenizer), eos_token_id=2, bos_token_id=1)
    model.generation_config.eos_token_id = 2
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}},
        "required": ["name"],
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
    engine = growing(model, 1 << 22, {one.prompt: one.tokens for one in wanted}, 0.8, tokenizer=tokenizer)
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


class TopTwo(TreeOracle):
    """Proposes the same two tokens, each followed by them."""

    def tree(self, request: DraftedRequest, count: int) -> Draft:
        a, b = self.answers["both"]
        draft = Draft([a, b, a, b, a, b], parents=(-1, -1, 0, 0, 1, 1))
        return draft.select(set(range(count)))


def test_sampled_tokens_follow_the_target_distribution() -> None:
    """Chi-square of the second token of many seeds, verified in a tree, against the exact distribution."""
    model = tiny("llama", vocab_size=16, initializer_range=0.3)
    model.set_attn_implementation("eager")
    prompt, seeds = [3, 5, 9, 11], 800
    with torch.inference_mode():
        first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
        share = torch.softmax(model(torch.tensor([[*prompt, first]])).logits[0, -1].double(), -1)
    engine = growing(model, 1 << 24, {}, max_running=16)
    assert engine.speculation is not None
    engine.speculation.proposers = [TopTwo({"both": share.topk(2).indices.tolist()})]
    requests = [engine.add(prompt, SamplingParams(max_tokens=4, seed=i)) for i in range(seeds)]
    engine.run()
    second = [request.output[1] for request in requests if request.output[0] == first]
    wanted = share.numpy() * len(second)
    enough = wanted > 5
    counts = np.bincount(second, minlength=16)
    chi = float(((counts - wanted)[enough] ** 2 / wanted[enough]).sum())
    degrees = int(enough.sum()) - 1
    assert degrees >= 3
    assert chi < degrees + 4 * (2 * degrees) ** 0.5 + 4  # about 1 in 10,000
    assert sum(request.accepted_tokens for request in requests) > 200


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_pages(kv_dtype: str) -> None:
    model = tiny("llama")
    prompt = list(range(3, 40))
    plain = make_engine(model, 1 << 22, kv_dtype)
    wanted = plain.add(prompt, SamplingParams(max_tokens=30, temperature=0))
    plain.run()
    engine = growing(model, 1 << 22, {tuple(prompt): wanted.tokens}, kv_dtype=kv_dtype)
    request = engine.add(prompt, SamplingParams(max_tokens=30, temperature=0))
    engine.run()
    assert request.tokens == wanted.tokens
    assert request.accepted_tokens > 8
    assert_pages_of_a_prompt(engine, request.tokens[:-1], kv_dtype=kv_dtype)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.few(1)
def test_preemption_and_cancel_in_a_small_pool(family: str) -> None:
    rng = random.Random(family)
    model = tiny(family)
    model.set_attn_implementation("eager")
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(16)]
    wanted = expected(model, prompts, 24)
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted, strict=True)}
    layout = make_engine(model, 1 << 24).layout
    room = 3 * layout.slab_bytes_for(max(map(len, prompts)) + 24)
    engine = growing(model, room, answers, 0.8, token_budget=24, max_running=8)
    engine.scheduler.admission = None
    params = SamplingParams(max_tokens=24, temperature=0)
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


def test_hits_from_tiers_are_the_same(tmp_path: Path) -> None:
    rng = random.Random(7)
    model = tiny("gemma3_text")
    prompts = [[rng.randrange(3, 64) for _ in range(size)] for size in (30, 37)]
    params = SamplingParams(max_tokens=34, temperature=0)
    seen: dict[str, list[Any]] = {}
    answers: dict[Any, list[int]] = {}
    for how in ("off", "ngram"):
        settings: dict[str, Any] = {"speculate": how, "draft_tokens": 12, "offload": PATIENT}
        tiers = [f"disk:{tmp_path / how}:64MiB"]
        engine = make_engine(model, 1 << 22, tiers=["host:8MiB", *tiers], **settings)
        if engine.speculation is not None:
            engine.speculation.proposers, engine.speculation.controller = [TreeOracle(answers, 0.8)], None
        first = [engine.add(prompt, params) for prompt in prompts]
        engine.run()
        answers |= {one.prompt: one.tokens for one in first}
        assert how == "off" or sum(one.accepted_tokens for one in first) > 20
        engine.close()
        engine = make_engine(model, 1 << 22, tiers=tiers, **settings)
        again = [engine.add([*one.tokens, 3], SamplingParams(max_tokens=9, temperature=0)) for one in first]
        engine.run()
        seen[how] = [[one.tokens, one.cached_tokens, one.hits] for one in (*first, *again)]
        engine.close()
        assert any(one.hits.get("disk") for one in again)
    assert seen["ngram"] == seen["off"]


def test_the_best_path_and_selections_of_a_tree() -> None:
    draft = Draft([5, 6, 7, 8, 9], parents=(-1, -1, 1, 0, 2), chances=(0.6, 0.3, 0.2, 0.1, 0.1))
    assert draft.depths == [1, 1, 2, 2, 3]
    assert draft.path(4) == [1, 2, 4]
    assert draft.best_path() == Draft([5, 8], chances=(0.6, 0.1))
    assert draft.select({0, 2, 3, 4}) == Draft([5, 8], parents=(-1, 0), chances=(0.6, 0.1))
    assert draft.follow([6, 1, 7, 9, 1, 3]) == [1, 2, 4]
    assert draft.follow([1, 1, 7, 9, 1, 3]) == []


def trees_of(engine: Engine) -> list[tuple[list[int], Draft]]:
    """Record every draft of the engine's head, with the tokens before it."""
    assert engine.speculation is not None
    engine.speculation.controller = None
    proposer, found = engine.speculation.proposers[-1], []
    propose = proposer.propose

    def recording(requests: Sequence[DraftedRequest], counts: Sequence[int]) -> Sequence[list[int] | Draft]:
        drafts = propose(requests, counts)
        for request, draft in zip(requests, drafts, strict=True):
            assert isinstance(draft, Draft)
            found.append((list(request.tokens), draft))
        return drafts

    proposer.propose = recording  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.few(2)
def test_trees_of_heads_have_the_draft_of_the_reference(family: str, tmp_path: Path) -> None:
    if family == "deepseek_v3":
        model, how = save_mtp(tmp_path, family), "mtp"
        reference: Reference | EagleReference = Reference(tmp_path, family)
    else:
        model, how = save_eagle(tmp_path, family), f"eagle={tmp_path / 'eagle'}"
        reference = EagleReference(tmp_path)
    rng = random.Random(family)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(3)]
    wanted = expected(reference.target, prompts, 20)
    settings: dict[str, Any] = {"token_budget": 16, "max_running": 6, "draft_tokens": 3}
    engine = make_engine(model, 1 << 23, speculate=f"{how},tree=10", **settings)
    drafts = trees_of(engine)
    requests = []
    for prompt in prompts:
        requests.append(engine.add(prompt, SamplingParams(max_tokens=20, temperature=0)))
        engine.step()
        engine.cache.check()
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    for tokens, draft in drafts[::5]:
        path = draft.best_path().tokens
        assert path == reference.drafts(tokens, len(path))
        assert list(draft.chances) == sorted(draft.chances, reverse=True)
    assert any(len(draft.tokens) == 10 and draft.parents for _, draft in drafts)
    assert max(max(draft.depths) for _, draft in drafts) > 1
    chain = make_engine(model, 1 << 23, speculate=how, **settings)
    assert chain.speculation is not None
    chain.speculation.controller = None
    for prompt in prompts:
        chain.add(prompt, SamplingParams(max_tokens=20, temperature=0))
    chain.run()
    assert engine.speculation is not None
    ours, theirs = engine.speculation.stats, chain.speculation.stats
    if family != "gemma3_text":  # the made head guesses nothing for this target
        assert ours.tokens / ours.rows > theirs.tokens / theirs.rows, "the tree contains the chain"
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.few(2)
def test_pages_of_a_head_depend_on_the_tokens_alone(family: str, tier: bool, tmp_path: Path) -> None:
    """With trees, whose nodes move, as without. With a tier, the head computes the whole tree."""
    model, how = save(tmp_path / "model", family)
    settings: dict[str, Any] = {"tiers": ["host:16MiB"], "offload": PATIENT} if tier else {}
    engine = make_engine(model, 1 << 23, speculate=f"{how},tree=12", **settings)
    trees_of(engine)
    request = engine.add(list(range(3, 40)), SamplingParams(max_tokens=45, temperature=0))
    engine.run()
    assert request.accepted_tokens > 4
    plain = make_engine(model, 1 << 23, speculate=how, token_budget=19)  # computes all of it as a prompt
    plain.add([*request.tokens, 3], SamplingParams(max_tokens=1))
    plain.run()
    assert_same_pages(engine, plain, request.tokens, 75 if tier else 64)
    engine.close()


def test_sampled_tokens_with_trees_of_a_head(tmp_path: Path) -> None:
    """Seeds give the same tokens, and a tree that ranks tokens by the same noise finds many of them."""
    model, how = save(tmp_path / "model", "llama")
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in ALL_KINDS]
    every = [SamplingParams(max_tokens=40, seed=10 * i, **kind) for i, kind in enumerate(ALL_KINDS)]
    plain = make_engine(model, 1 << 24, max_running=8)
    wanted = [plain.add(prompt, params) for prompt, params in zip(prompts, every, strict=True)]
    plain.run()
    engine = make_engine(model, 1 << 24, max_running=8, speculate=f"{how},tree=8")
    trees_of(engine)
    requests = [engine.add(prompt, params) for prompt, params in zip(prompts, every, strict=True)]
    engine.run()
    assert results(requests) == results(wanted)
    assert sum(request.accepted_tokens for request in requests if request.params.temperature) > 20


def test_the_controller_sizes_trees_by_their_chances() -> None:
    controller = Controller()
    for tokens in (1, 2, 4, 8, 16, 32):
        for _ in range(30):
            controller.observe_step(tokens, 1.0 + 0.05 * tokens)
    sharp = Draft([5] * 16, parents=(-1,) * 16, chances=(0.9, 0.8, 0.7, 0.02, *(0.01,) * 12))
    known: dict[str, Estimate] = {}
    for _ in range(60):
        controller.observe_chances("eagle", [sharp])
        controller.observe_proposal("eagle", 1, 1, 0.01)
        controller.acceptance.observe_draft(known, "eagle", sharp, 2)
    estimate = controller.acceptance.of(known, "eagle")
    assert 0.75 < estimate.chance < 0.9, "2 of 2.5 expected tokens were accepted"
    assert controller.lengths("eagle", [estimate], [16], 16, 0) == [3]
    assert controller.lengths("eagle", [Estimate(0.0)], [16], 16, 0) == [0]


def test_trees_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for how, reason in (
        ("mtp,tree=1", "from 2 to 63"),
        ("mtp,tree=x", "from 2 to 63"),
        ("mtp,tree=64", "from 2 to 63"),
        ("suffix,tree=8", "only heads"),
        ("tree=8", "only heads"),
    ):
        with pytest.raises(ValueError, match=reason):
            EngineConfig(speculate=how)
    model = save_mtp(tmp_path, "qwen3_next")
    with pytest.raises(ValueError, match="one state per sequence and not one per branch"):
        make_engine(model, 1 << 23, speculate="mtp,tree=8")
