"""Tensor parallelism: several ranks generate the tokens of one rank, which are those of Hugging Face."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.engine import LLM, Engine, EngineConfig, SamplingParams
from kvloom.engine.parallel.messages import StepWriter
from kvloom.models.loading import loader
from kvloom.models.paged import Work
from kvloom.models.sharding import RankError, Shard, find_cuts, shard_config
from kvloom.models.specs import ModelError
from tests.engine.test_heads import recorded, save as save_head
from tests.engine.test_offload import PATIENT
from tests.engine.test_speculation import fixed
from tests.engine.thread_ranks import parallel_engine
from tests.engines import make_engine
from tests.models.image_prompts import vision_model
from tests.models.tiny_families import config_of
from tests.models.zoo import NEW, expected, prompts_of, tiny

POOL = 1 << 22
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
FAMILIES = (
    *("llama", "qwen3_next", "qwen2 with windows", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere2"),
    *("qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "got_ocr2"),
    *("mamba", "mamba2", "jamba", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "longcat_flash"),
)


def made(family: str, **changes: Any) -> Any:
    """A tiny model whose weights are large enough for clear tokens."""
    model = tiny(family, **changes)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw)
            weight.copy_(noise * 0.2 if weight.dim() > 1 else weight + noise * 0.1)
    return model


@contextmanager
def ranks(model: Any, count: int, **settings: Any) -> Iterator[Engine]:
    engine = parallel_engine(model, count, pool_bytes=POOL, **settings)
    try:
        yield engine
    finally:
        engine.close()


def generate(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.run()
    return [list(sample.tokens) for request in requests for sample in request.family]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_generate_the_tokens_of_hugging_face(family: str) -> None:
    model, prompts = made(family), prompts_of(3)
    wanted = expected(model, prompts)
    with ranks(model, 2, token_budget=16) as engine:
        assert generate(engine, prompts) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "bamba"])
def test_four_ranks_share_two_kv_heads(family: str) -> None:
    model, prompts = made(family), prompts_of(4)
    wanted = expected(model, prompts)
    with ranks(model, 4, token_budget=16) as engine:
        assert generate(engine, prompts) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"kv_dtype": "int8"}, {"speculate": "ngram"}, {"ahead": True}, {"token_budget": 16, "max_running": 2}],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_settings_give_the_tokens_of_one_rank(family: str, settings: dict[str, Any]) -> None:
    model, prompts = made(family), prompts_of(5) * 2
    one = make_engine(made(family), POOL, **settings)
    wanted = generate(one, prompts)
    with ranks(model, 2, **settings) as engine:
        assert generate(engine, prompts) == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "settings", "tiers"),
    [
        ("llama", {}, True),
        ("llama", {"context_parallel": 2}, False),
        ("llama", {"speculate": "tree=8"}, False),
        ("deepseek_v3", {}, True),
        ("qwen3_next", {"ahead": True}, False),
        ("glm4_moe", {}, False),
    ],
    ids=str,
)
def test_a_head_on_rank_0_gives_the_tokens_of_hugging_face(
    family: str, settings: dict[str, Any], tiers: bool, tmp_path: Path
) -> None:
    """An EAGLE head for llama, MTP heads for the others. With tiers, an engine of one rank loads the pages of two."""
    model, speculate = save_head(tmp_path / "model", family)
    settings = {**settings, "speculate": ",".join(filter(None, (speculate, settings.get("speculate"))))}
    prompts = prompts_of(5, (40, 33, 50))
    wanted = expected(model, prompts)
    if tiers:
        settings |= {"tiers": ["host:4MiB", f"disk:{tmp_path / 'tier'}:64MiB"], "offload": PATIENT}
    one = {name: value for name, value in settings.items() if name not in ("context_parallel", "tiers")}
    drafts = recorded(alone := fixed(make_engine(copy.deepcopy(model), POOL, **one)))
    assert generate(alone, prompts) == wanted
    for count in (2, 1)[: 1 + tiers]:
        if count == 1:
            engine = fixed(make_engine(copy.deepcopy(model), POOL, **settings))
        else:
            engine = fixed(parallel_engine(model, count, pool_bytes=POOL, **settings))
        found = recorded(engine)
        requests = [engine.add(prompt, GREEDY) for prompt in prompts]
        engine.run()
        assert [request.tokens for request in requests] == wanted
        if "tree" in settings["speculate"]:
            assert sum(request.accepted_tokens for request in requests) > 0
        else:  # sums of ranks have other rounding errors
            assert len(drafts) / 2 < sum(draft in drafts for draft in found)
        assert sum(request.cached_tokens or 0 for request in requests) >= (96 if count == 1 else 0)
        engine.close()


def test_blocks_that_change_before_a_step_of_the_draft_model_are_sent() -> None:
    """On a GPU a step of the draft model clears the record of changed blocks."""
    cache = make_engine(made("llama"), POOL).cache
    writer = StepWriter(cache, keeps_changes=True)
    tokens = np.arange(3, 43)
    sequence = cache.open(cache.match(tokens))
    assert not sequence.extend(40)
    works = [Work(sequence, tokens)]
    pages = np.ascontiguousarray(cache.block_tables.tables[:, sequence.row, :3]).tobytes()
    writer.note_changes(works)
    cache.block_tables.take_changed(np.array([sequence.row]))  # as in the step of the draft model
    assert writer.write(works, None, (), ()).tables == pages
    cache.block_tables.take_changed(np.array([sequence.row]))  # as in the step of the target
    assert not writer.write(works, None, (), ()).tables


def test_a_rank_has_its_part_of_every_page() -> None:
    whole = make_engine(made("llama"), POOL)
    with ranks(made("llama"), 2) as engine:
        assert engine.layout.bytes_per_token() * 2 == whole.layout.bytes_per_token()


def test_weights_with_several_parts_are_cut_part_by_part() -> None:
    """The convolution of Mamba-2 has the channels [x|B|C], of 64, 32 and 32."""
    from transformers import AutoModelForCausalLM

    config = config_of("mamba2")
    with torch.device("meta"):
        whole, part = (AutoModelForCausalLM.from_config(each) for each in (config, shard_config(config, 2)))
    for rank, parts in ((0, [(0, 32), (64, 80), (96, 112)]), (1, [(32, 64), (80, 96), (112, 128)])):
        cuts = find_cuts(whole, part, Shard(rank, 2))
        assert cuts.ranges["backbone.layers.0.mixer.conv1d.weight"] == {0: parts}


@pytest.mark.parametrize(
    ("family", "count", "reason"),
    [
        ("llama", 3, "num_attention_heads 4 is not divisible by tensor_parallel 3"),
        ("gpt2", 2, "no num_attention_heads|head size depends on the number of heads"),
        ("rwkv", 2, "transformers' own cache|no num_attention_heads"),
    ],
)
def test_a_family_that_cannot_be_divided_is_refused_with_a_reason(
    family: str, count: int, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        parallel_engine(tiny(family), count, pool_bytes=POOL)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_pool_bytes": 1 << 30}, "one fixed size"),
        ({"batch_invariant": True}, "order of sums"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig(tensor_parallel=2, **settings)
    EngineConfig(**settings)


def test_a_loaded_model_is_refused() -> None:
    with pytest.raises(ValueError, match="give the model's folder"):
        make_engine(tiny("llama"), POOL, tensor_parallel=2)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ModelError, match="quantised weights are stored in blocks"):
        shard_checkpoint(str(tmp_path), config)


def shard_checkpoint(model: str, config: Any) -> None:
    """Load a rank's part. Fails before the rank is used."""
    loader._shard(model, config, torch.float32, torch.device("cpu"), "auto", 0, None, False, False)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    made("llama").save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_killed_rank_stops_the_group_with_an_error(folder: Path) -> None:
    """Ranks are processes. They generate, then one is killed: the next step fails, and so does every later one."""
    prompts = prompts_of(3)
    wanted = expected(made("llama"), prompts)
    llm = LLM(str(folder), tensor_parallel=2, device="cpu", dtype="float32", pool_bytes=POOL)
    try:
        found = llm.generate(prompts, GREEDY)
        assert [[*p, *r.outputs[0].token_ids] for p, r in zip(prompts, found, strict=True)] == wanted
        assert llm.engine.group is not None
        rank = llm.engine.group.processes[0]
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait(30)
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(RankError, match=r"has stopped|restart the engine"):
                llm.generate(prompts, GREEDY)
            assert time.monotonic() - began < 55  # less than `rank_seconds`
    finally:
        llm.close()


@pytest.mark.slow
def test_the_text_part_of_an_image_model_runs_on_two_ranks(tmp_path: Path) -> None:
    model, prompts = vision_model("qwen3_5"), prompts_of(3)
    model.save_pretrained(tmp_path)
    whole = LLM(str(tmp_path), device="cpu", dtype="float32", pool_bytes=POOL)
    wanted = [one.outputs[0].token_ids for one in whole.generate(prompts, GREEDY)]
    whole.close()
    settings: dict[str, Any] = {"tensor_parallel": 2, "device": "cpu", "dtype": "float32", "pool_bytes": POOL}
    with pytest.raises(ValueError, match="--text-only"):
        LLM(str(tmp_path), **settings)
    llm = LLM(str(tmp_path), text_only=True, **settings)
    try:
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)] == wanted
    finally:
        llm.close()


@pytest.mark.slow
def test_experts_of_a_checkpoint_are_cut_while_they_are_read(tmp_path: Path) -> None:
    """transformers joins the experts of the checkpoint to one weight, which is then cut."""
    made("qwen3_moe").save_pretrained(tmp_path)
    prompts = prompts_of(3)
    llm = LLM(str(tmp_path), tensor_parallel=2, device="cpu", dtype="float32", pool_bytes=POOL)
    try:
        found = llm.generate(prompts, GREEDY)
    finally:
        llm.close()
    wanted = expected(made("qwen3_moe"), prompts)
    assert [[*p, *r.outputs[0].token_ids] for p, r in zip(prompts, found, strict=True)] == wanted


@pytest.mark.slow
def test_a_rank_that_hangs_stops_the_group_in_time(folder: Path) -> None:
    llm = LLM(str(folder), tensor_parallel=2, device="cpu", dtype="float32", pool_bytes=POOL, rank_seconds=3)
    assert llm.engine.group is not None
    rank = llm.engine.group.processes[0]
    try:
        llm.generate(prompts_of(3), GREEDY)
        os.kill(rank.pid, signal.SIGSTOP)
        with pytest.raises(RankError, match="restart the engine"):
            llm.generate(prompts_of(3), GREEDY)
        assert rank.wait(10) == -signal.SIGKILL
    finally:
        llm.close()


@pytest.mark.slow
def test_a_step_that_fails_on_rank_0_stops_the_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may be inside the step, so a later step would sum values of two steps."""
    llm = LLM(str(folder), tensor_parallel=2, device="cpu", dtype="float32", pool_bytes=POOL)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.runner, "_forward", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts_of(3), GREEDY)
        with pytest.raises(RankError, match="a step failed on rank 0"):
            llm.generate(prompts_of(3), GREEDY)
    finally:
        llm.close()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_refused_model_says_why_also_from_processes(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_attention_heads 4 is not divisible"):
        LLM(str(tmp_path), tensor_parallel=3, device="cpu", dtype="float32", pool_bytes=POOL)
