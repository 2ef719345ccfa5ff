"""Context parallelism: ranks that divide the context generate the tokens of one rank, which are those of Hugging Face."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.core import ContextPart, Visibility
from kvloom.engine import LLM, Engine, EngineConfig, Request, SamplingParams
from kvloom.engine.parallel import RankGroup, group
from kvloom.kernels.attention import Shape
from kvloom.models.paged import BatchBuilder, divided_step, pages as paged
from kvloom.models.sharding import RankError
from kvloom.models.specs import ModelError
from tests.engine.test_heads import recorded, save as save_head
from tests.engine.test_offload import PATIENT
from tests.engine.test_quantised import calibrated
from tests.engine.test_rank_tiers import closed
from tests.engine.test_speculation import fixed
from tests.engine.test_tensor_parallel import GREEDY, POOL, generate, made
from tests.engine.thread_ranks import context_engine, grid_engine
from tests.engines import make_engine
from tests.models.zoo import NEW, expected, prompts_of, tiny

FAMILIES = (
    *("llama", "gemma3_text", "qwen3_next", "bamba", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text"),
    *("gemma2", "qwen2 with windows", "cohere2", "qwen3_moe", "jamba", "falcon_h1", "nemotron_h", "mamba2"),
    "modernbert-decoder",
)


@contextmanager
def ranks(model: Any, count: int, pool_bytes: int = POOL, **settings: Any) -> Iterator[Engine]:
    engine = context_engine(model, count, pool_bytes=pool_bytes, **settings)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_generate_the_tokens_of_hugging_face(family: str) -> None:
    model, prompts = made(family), prompts_of(3, (40, 33, 7))
    wanted = expected(model, prompts)
    with ranks(model, 2, token_budget=16) as engine:
        assert generate(engine, prompts) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss", "bamba"])
def test_four_ranks_generate_the_tokens_of_hugging_face(family: str) -> None:
    model, prompts = made(family), prompts_of(4, (70, 33, 7))
    wanted = expected(model, prompts)
    with ranks(model, 4, token_budget=24) as engine:
        assert generate(engine, prompts) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_dtype": "int8"},
        {"speculate": "ngram"},
        {"ahead": True},
        {"token_budget": 16, "max_running": 2, "block_tokens": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("least", [1, 10**6], ids=["divided steps", "whole steps"])
@pytest.mark.parametrize("family", ["llama", "bamba", "gpt_oss"])
def test_settings_give_the_tokens_of_one_rank(
    family: str, least: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divided_step, "MIN_TOKENS", least)
    model, prompts = made(family), prompts_of(5, (40, 18, 3)) * 2
    one = make_engine(made(family), POOL, **settings)
    wanted = generate(one, prompts)
    with ranks(model, 2, **settings) as engine:
        assert generate(engine, prompts) == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "speculate"),
    [
        ("llama", "suffix"),
        ("gemma3_text", "ngram"),
        ("gemma3_text", "suffix"),
        ("qwen3_next", "suffix"),
        ("deepseek_v3", "suffix"),
    ],
)
def test_drafts_from_earlier_tokens_give_the_tokens_of_hugging_face(family: str, speculate: str) -> None:
    model, prompts = made(family), [prompt * 3 for prompt in prompts_of(5, (20, 12))]
    wanted = expected(model, prompts)
    with ranks(model, 2, speculate=speculate) as engine:
        requests = [*run_all(fixed(engine), prompts), *run_all(engine, prompts)]
        assert [request.tokens for request in requests] == wanted * 2
        if speculate == "suffix":  # the second run drafts from the answers of the first
            assert all(request.accepted_tokens for request in requests[len(prompts) :])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "tiers"), [("llama", True), ("deepseek_v3", True), ("qwen3_next", False), ("glm4_moe", False)]
)
def test_a_head_on_rank_0_gives_the_tokens_of_hugging_face(
    family: str, tiers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EAGLE head for llama, MTP heads for the others. Prompts are divided between ranks."""
    monkeypatch.setattr(divided_step, "MIN_TOKENS", 8)
    model, speculate = save_head(tmp_path / "model", family)
    prompts = prompts_of(5, (40, 33, 50))
    wanted = expected(model, prompts)
    drafts = recorded(one := fixed(make_engine(copy.deepcopy(model), POOL, speculate=speculate)))
    assert any(request.accepted_tokens for request in run_all(one, prompts))
    settings: dict[str, Any] = {"speculate": speculate}
    if tiers:
        settings |= {"tiers": ["host:4MiB", f"disk:{tmp_path / 'tier'}:64MiB"], "offload": PATIENT}
    for round_ in range(1 + tiers):
        with ranks(model, 2, **settings) as engine:
            found = recorded(fixed(engine))
            requests = run_all(engine, prompts)
            assert [request.tokens for request in requests] == wanted
            assert sorted(found) == sorted(drafts)
            assert sum(request.cached_tokens or 0 for request in requests) >= 96 * round_


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "parts", "settings"),
    [
        ("llama", (1, 4), {}),
        ("llama", (2, 2), {"kv_dtype": "int8"}),
        ("deepseek_v3", (1, 2), {"block_tokens": 32}),
        ("glm4_moe", (1, 2), {}),
    ],
    ids=str,
)
def test_draft_trees_give_the_tokens_of_one_rank(
    family: str, parts: tuple[int, int], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Accepted tokens of a tree move to other slots, which another rank may have. Later prompts read the moved tokens:
    they continue the answers."""
    model, speculate = save_head(tmp_path / "model", family)
    prompts, more = prompts_of(5, (40, 33, 50)), prompts_of(6, (5, 9, 7))
    settings = {**settings, "speculate": f"{speculate},tree=8"}
    found = []
    for one in (True, False):
        if one:
            engine = make_engine(copy.deepcopy(model), POOL, **settings)
        else:
            engine = grid_engine(model, *parts, pool_bytes=POOL, **settings)
        moves: list[Any] = []
        mover = engine._token_mover
        engine._token_mover = Recorded(mover, moves)  # type: ignore[assignment]
        first = run_all(fixed(engine), prompts)
        again = run_all(engine, [[*r.tokens, *end] for r, end in zip(first, more, strict=True)])
        assert sum(request.accepted_tokens for request in first) > 0
        assert all((request.cached_tokens or 0) >= 32 for request in again)
        found.append([request.tokens for request in (*first, *again)])
        sizes = {group.index: group.page_tokens for group in engine.layout.groups if group.parts > 1}
        crossed = [(a // sizes[0] != b // sizes[0]).any() for _, a, _, b in moves] if sizes else [False]
        assert any(crossed) != one, "no token moved to another rank"
        engine.close()
    assert found[0] == found[1]
    if "kv_dtype" not in settings:
        assert found[0][: len(prompts)] == expected(model, prompts)


class Recorded:
    """Records the places of the first group in each move of tokens."""

    def __init__(self, mover: Any, moves: list[Any]) -> None:
        self.places, self._mover, self._moves = mover.places, mover, moves

    def move(self, places: Any) -> None:
        self._moves.append(places[0])
        self._mover.move(places)


def run_all(engine: Engine, prompts: list[list[int]]) -> list[Request]:
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    engine.run()
    return requests


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "count", "least"),
    [
        ("bamba", 2, 1),
        ("llama", 2, 10**6),
        ("llama", 4, 1),
        ("gemma3_text", 2, 1),
        ("qwen3_next", 2, 1),
        ("deepseek_v3", 2, 1),
        ("deepseek_v3", 2, 10**6),
        ("gpt_oss", 2, 1),
        ("qwen3_moe", 2, 1),
    ],
)
def test_ranks_divide_weights_and_context(
    family: str, count: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have two parts, and the context `count` parts."""
    monkeypatch.setattr(divided_step, "MIN_TOKENS", least)
    model, prompts = made(family), prompts_of(11, (40, 33, 7))
    wanted = expected(model, prompts)
    engine = grid_engine(model, 2, count, pool_bytes=POOL, token_budget=19)
    try:
        assert engine.layout.part.count == count
        assert generate(engine, prompts) == wanted
        assert generate(engine, prompts) == wanted  # hits of the prefix cache
    finally:
        engine.close()


@pytest.mark.slow
def test_ranks_divide_weights_and_context_with_a_draft_model_and_quantised_pages(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path / "draft")
    prompts = prompts_of(12, (40, 33, 70))
    settings: dict[str, Any] = {"kv_dtype": "int8", "ahead": True}
    settings |= {"speculate": f"draft={tmp_path / 'draft'}", "draft_tokens": 3}
    wanted = generate(make_engine(made("llama"), POOL, **settings), prompts)
    engine = grid_engine(made("llama"), 2, 2, pool_bytes=POOL, **settings)
    try:
        assert generate(engine, prompts) == wanted
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(2, 1), (1, 2), (2, 2)], ids=["tensor", "context", "both"])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "int8"), ("gemma3_text", "fp8"), ("deepseek_v3", "int8")]
)
def test_static_scales_give_the_tokens_of_one_rank(
    family: str, dtype: str, parts: tuple[int, int], tmp_path: Path
) -> None:
    """One rank then loads the pages of the ranks: the block hashes contain the scales of the whole model."""
    prompts = prompts_of(5, (80, 18, 3))
    settings: dict[str, Any] = {"kv_dtype": dtype, "kv_scales": calibrated(made(family), tmp_path, prompts)}
    wanted = generate(make_engine(made(family), POOL, **settings), prompts)
    settings |= {"tiers": ["host:4MiB", f"disk:{tmp_path / 'tier'}:64MiB"], "offload": PATIENT}
    many = grid_engine(made(family), *parts, pool_bytes=POOL, **settings)
    assert generate(many, prompts) == wanted
    closed(many)
    one = make_engine(made(family), POOL, **settings)
    (request,) = [one.add(prompts[0], GREEDY)]
    one.run()
    assert (list(request.tokens), request.hits.get("disk")) == (wanted[0], 79)
    closed(one)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
def test_a_context_that_does_not_fit_the_pool_of_one_rank_runs_on_two(family: str) -> None:
    (prompt,) = prompts_of(7, (900,))

    def model() -> Any:
        return made(family, max_position_embeddings=1024)

    length = len(prompt) + NEW
    whole = make_engine(model(), POOL).layout.slab_bytes_for(length)
    pool = whole * 7 // 8
    with pytest.raises(ValueError, match="pool"):
        make_engine(model(), pool, token_budget=64).add(prompt, GREEDY)
    with ranks(model(), 2, pool, token_budget=64) as engine:
        assert engine.layout.slab_bytes_for(length) <= pool < whole
        assert generate(engine, [prompt]) == expected(model(), [prompt])


def test_a_rank_stores_its_part_of_full_attention_and_all_windows_and_states() -> None:
    for family, divided in (
        ("llama", {"full"}),
        ("gemma3_text", {"full"}),
        ("bamba", {"full"}),
        ("mamba2", set()),
    ):
        whole = make_engine(made(family), POOL).layout
        with ranks(made(family), 2) as engine:
            pairs = list(zip(engine.layout.groups, whole.groups, strict=True))
        halves = {mine.spec.kind for mine, theirs in pairs if mine.layer_bytes * 2 == theirs.layer_bytes}
        equal = {mine.spec.kind for mine, theirs in pairs if mine.layer_bytes == theirs.layer_bytes}
        assert (halves, halves & equal) == (divided, set())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_pool_bytes": 1 << 30}, "one fixed size"),
        ({"batch_invariant": True}, "no batch-invariant kernel"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig(context_parallel=2, **settings)
    EngineConfig(**settings)


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 10**6], ids=["divided steps", "whole steps"])
def test_ranks_with_the_kernels_and_batches_of_a_gpu(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs the kernels. The heads of the model have a size that the kernels support."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvloom.kernels.attention import PrefillPlan
    from kvloom.kernels.attention.prefill_backends import BlockTile

    plans, alone = [], threading.Lock()

    class OneAtATime(PrefillPlan):
        """The interpreter supports one thread, and the ranks are threads."""

        def attend(self, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
            with alone:
                return super().attend(*given, **named)

    def plan(shape: Shape, span: Visibility, _: torch.device, part: ContextPart) -> PrefillPlan:
        tile = BlockTile(16, 16, 4, 2)
        plans.append(OneAtATime(shape, span, "cpu", tile=tile, min_decode_rows=1, part=part))
        return plans[-1]

    def mirrored(stage: BatchBuilder, *given: Any, **named: Any) -> None:
        init(stage, *given, mirrored=True, **named)

    init = BatchBuilder.__init__
    monkeypatch.setattr(BatchBuilder, "__init__", mirrored)
    monkeypatch.setattr(paged, "prefill_plan", plan)
    monkeypatch.setattr(divided_step, "MIN_TOKENS", least)
    model = made("llama", head_dim=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    prompts = prompts_of(8, (37, 7))
    wanted = expected(model, prompts)
    with ranks(model, 2, block_tokens=32, token_budget=40, rank_seconds=600) as engine:
        assert generate(engine, prompts) == wanted
    assert {made.part for made in plans} == {ContextPart(0, 2), ContextPart(1, 2)}


@pytest.mark.parametrize(
    ("gpus", "settings", "reason"),
    [
        (
            2,
            {"block_tokens": 16},
            "pages of 8 tokens, and GPU kernels read 16 tokens or more: set block_tokens",
        ),
        (1, {"block_tokens": 32}, "2 ranks need 2 GPUs, and torch sees 1: .* rank_backend gloo"),
        (1, {"block_tokens": 32, "rank_backend": "gloo"}, None),
        (2, {"block_tokens": 32, "speculate": "mtp,tree=8"}, "no mask for draft trees"),
        (2, {"block_tokens": 32}, None),
    ],
    ids=str,
)
def test_ranks_on_gpus_that_cannot_run_are_refused_before_they_start(
    gpus: int, settings: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config, device = EngineConfig(context_parallel=2, **settings), torch.device("cuda:0")
    if reason is None:
        group._check_gpus(config, device, gpus)
        devices = {str(group.rank_device(device, rank, gpus == 1)) for rank in range(2)}
        assert devices == {f"cuda:{index}" for index in range(gpus)}
    else:
        with pytest.raises(ValueError, match=reason):
            RankGroup("nowhere", config, "bfloat16", device)


def test_an_unknown_way_to_exchange_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="rank_backend 'mpi' is not one of auto, gloo"):
        EngineConfig(context_parallel=2, rank_backend="mpi")  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 3, 32])
def test_the_number_of_ranks_must_divide_a_block(count: int) -> None:
    with pytest.raises(ValueError, match="does not divide block_tokens 16"):
        EngineConfig(context_parallel=count)


def test_models_without_divisible_attention_are_refused() -> None:
    with pytest.raises(ModelError, match="transformers' own cache"):
        context_engine(tiny("rwkv"), 2, pool_bytes=POOL)
    with pytest.raises(ValueError, match="give the model's folder"):
        make_engine(tiny("llama"), POOL, context_parallel=2)


@pytest.mark.slow
def test_a_killed_rank_stops_the_group_with_an_error(tmp_path: Path) -> None:
    """Ranks are processes. They generate with static scales, which every process reads from a file. Then one is
    killed."""
    made("llama").save_pretrained(tmp_path / "model")
    prompts = prompts_of(3, (40, 20, 7))
    settings: dict[str, Any] = {
        "pool_bytes": POOL,
        "kv_dtype": "int8",
        "kv_scales": Path(calibrated(made("llama"), tmp_path, prompts)),
    }
    wanted = generate(make_engine(made("llama"), **settings), prompts)
    llm = LLM(str(tmp_path / "model"), context_parallel=2, device="cpu", dtype="float32", **settings)
    try:
        found = llm.generate(prompts, GREEDY)
        assert [[*p, *r.outputs[0].token_ids] for p, r in zip(prompts, found, strict=True)] == wanted
        assert llm.engine.group is not None
        rank = llm.engine.group.processes[0]
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait(30)
        with pytest.raises(RankError, match=r"has stopped|restart the engine"):
            llm.generate(prompts, GREEDY)
    finally:
        llm.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_divide_the_tokens_of_a_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_step, "MIN_TOKENS", 1)
    model, prompts = made(family), prompts_of(8, (40, 33, 7))
    wanted = expected(model, prompts)
    with ranks(model, 2, token_budget=19) as engine:
        assert generate(engine, prompts) == wanted


def test_a_rank_computes_its_part_of_the_tokens_of_a_prompt() -> None:
    model, prompts = made("llama"), prompts_of(9, (81, 20))
    wanted, counts = expected(model, prompts), []
    with ranks(model, 2) as engine:
        embedding = engine.model.get_input_embeddings()
        embedding.register_forward_hook(lambda _, args, __: counts.append(args[0].shape[1]))
        assert generate(engine, prompts) == wanted
    assert counts[:2] == [51, 2]  # half of the prompts, then the next token of each


def test_embeddings_and_prompt_logprobs_of_divided_steps_are_those_of_one_rank() -> None:
    prompt = prompts_of(10, (70,))[0]
    pooled = SamplingParams(max_tokens=1, temperature=0, pooling="mean")
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)

    def results(engine: Engine) -> tuple[Any, list[float]]:
        embedding, logprobs = engine.add(prompt, pooled), engine.add(prompt, scored)
        engine.run()
        pairs = zip(prompt[1:], logprobs.prompt_logprobs[1:], strict=True)
        return embedding.embedding, [one[token].logprob for token, one in pairs if one is not None]

    wanted = results(make_engine(made("llama"), POOL))
    with ranks(made("llama"), 2) as engine:
        found = results(engine)
    assert found[0] == pytest.approx(wanted[0], rel=1e-3, abs=1e-4)
    assert found[1] == pytest.approx(wanted[1], rel=1e-3, abs=1e-4)
    assert len(found[1]) == len(prompt) - 1
