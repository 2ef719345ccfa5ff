"""Expert parallelism: ranks with some whole experts each generate the tokens of one rank, which are those of Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvloom.engine import LLM, Engine, EngineConfig, SamplingParams, engine_config
from kvloom.models.loading import sharding_refusal
from kvloom.models.paged import divided_step
from kvloom.models.sharding import is_mixture
from tests.engine.test_degrees import OneRank
from tests.engine.test_heads import save as save_head
from tests.engine.test_lora import Adapters, drawn as lora_prompts, params
from tests.engine.test_offload import PATIENT, drawn
from tests.engine.test_rank_tiers import stored
from tests.engine.test_tensor_parallel import GREEDY, POOL, generate, made
from tests.engine.thread_ranks import grid_engine
from tests.engines import make_engine
from tests.models.tiny_families import config_of
from tests.models.zoo import expected, prompts_of, tiny

FAMILIES = (
    *(
        "mixtral",
        "gpt_oss",
        "deepseek_v3",
        "llama4_text",
        "qwen3_next",
        "qwen2_moe",
        "qwen3_moe",
        "deepseek_v2",
    ),
    *(
        "jamba",
        "granitemoehybrid",
        "nemotron_h",
        "glm4_moe",
        "minimax",
        "kimi_linear",
        "ernie4_5_moe",
        "aria_text",
    ),
)
MIXTURES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "hybrid_override_pattern": "MEM*",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "moe_latent_size": 24,
    }
}
"""Tiny models without experts, and how they get experts."""
FOUR = {"mixtral": {"num_local_experts": 4}, "llama4_text": {"num_local_experts": 4}}
"""Tiny models with fewer than four experts, and how they get four."""


@contextmanager
def ranks(model: Any, count: int, context: int = 1, **settings: Any) -> Iterator[Engine]:
    engine = grid_engine(model, count, context, pool_bytes=POOL, expert_parallel=True, **settings)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.few(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_generate_the_tokens_of_hugging_face(family: str) -> None:
    model, prompts = made(family, **MIXTURES.get(family, {})), prompts_of(3)
    wanted = expected(model, prompts)
    with ranks(model, 2, token_budget=16) as engine:
        assert generate(engine, prompts) == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", ["gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "llama4_text"]
)
def test_four_ranks_with_one_expert_each_generate_the_tokens_of_hugging_face(family: str) -> None:
    model, prompts = made(family, **FOUR.get(family, {})), prompts_of(4)
    wanted = expected(model, prompts)
    with ranks(model, 4, token_budget=16) as engine:
        assert {len(module.down_proj) for module in mixtures(engine.model)} == {1}
        assert generate(engine, prompts) == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "context", "settings"),
    [
        ("qwen3_moe", 2, {}),
        ("gpt_oss", 2, {"kv_dtype": "int8", "speculate": "ngram"}),
        ("deepseek_v3", 1, {"kv_dtype": "int8", "ahead": True}),
        ("qwen3_next", 1, {"speculate": "suffix", "max_running": 2}),
        ("llama4_text", 2, {}),
    ],
    ids=str,
)
def test_settings_give_the_tokens_of_one_rank(
    family: str, context: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts of the context, prompts are divided between ranks."""
    monkeypatch.setattr(divided_step, "MIN_TOKENS", 8)
    prompts = prompts_of(5, (40, 33, 7)) * 2
    wanted = generate(make_engine(made(family), POOL, **settings), prompts)
    with ranks(made(family), 2, context, **settings) as engine:
        assert generate(engine, prompts) == wanted
        assert generate(engine, prompts) == wanted  # hits of the prefix cache


def mixtures(model: Any) -> list[Any]:
    return [module for module in model.modules() if is_mixture(module)]


def test_each_rank_has_half_of_the_experts_and_computes_their_pairs() -> None:
    """Every pair of a token and a selected expert is computed on one rank, and skipped on the other."""
    model, prompts = made("qwen3_moe"), prompts_of(3)
    (every, *_), picked = mixtures(model), model.config.num_experts_per_tok
    shape = tuple(every.down_proj.shape)
    pairs, tokens = [], []
    with ranks(model, 2) as engine:
        (own, *_) = mixtures(engine.model)
        assert tuple(own.down_proj.shape) == (shape[0] // 2, *shape[1:])
        assert torch.equal(own.down_proj, every.down_proj[: shape[0] // 2])
        own.register_forward_pre_hook(lambda _, given: pairs.append(int((given[1] < shape[0] // 2).sum())))
        own.register_forward_pre_hook(lambda _, given: tokens.append(len(given[0])))
        generate(engine, prompts)
    assert 0 < sum(pairs) < picked * sum(tokens)


def test_weights_on_a_rank_have_the_size_of_tensor_parallelism() -> None:
    from kvloom.models.loading import shard_model

    model = tiny("deepseek_v3")
    sizes = []
    for expert_parallel in (False, True):
        one: Any = OneRank(1, 2)
        part = shard_model(model, one, True, expert_parallel)
        sizes.append(sum(weight.numel() for weight in part.parameters()))
    assert sizes[0] == sizes[1] < sum(weight.numel() for weight in model.parameters())


@pytest.mark.slow
def test_a_multi_token_head_on_rank_0_gives_the_tokens_of_hugging_face(tmp_path: Path) -> None:
    model, speculate = save_head(tmp_path / "model", "glm4_moe")
    prompts = prompts_of(5, (40, 33, 50))
    wanted = expected(model, prompts)
    with ranks(copy.deepcopy(model), 2, speculate=speculate) as engine:
        assert generate(engine, prompts) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_adapters_of_attention_apply_on_all_ranks(family: str, tmp_path: Path) -> None:
    adapters = Adapters(tmp_path, family)
    with ranks(copy.deepcopy(adapters.plain), 2, lora=adapters.paths) as engine:
        prompts, names = lora_prompts(family, 20, 40, 33, 50), [None, *adapters.paths]
        requests = [engine.add(p, params(), lora=name) for p, name in zip(prompts, names, strict=True)]
        engine.run()
        adapters.check(requests)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_processes_load_whole_experts_of_a_checkpoint_and_share_pages(family: str, tmp_path: Path) -> None:
    """transformers joins the experts of the checkpoint to one weight, which is then cut by experts. Engines that divide
    the width of experts, and engines of one rank, load the pages."""
    made(family).save_pretrained(tmp_path / "model")
    prompts = drawn((family, "experts"), 70, 50)
    wanted = expected(made(family), prompts, 8)
    tiers = ["host:8MiB", f"disk:{tmp_path / 'tier'}:64MiB"]
    for place, settings in enumerate(
        ({"tensor_parallel": 2, "expert_parallel": True}, {"tensor_parallel": 2}, {})
    ):
        llm = LLM(
            str(tmp_path / "model"),
            device="cpu",
            dtype="float32",
            pool_bytes=POOL,
            tiers=tiers,
            offload=PATIENT,
            **settings,
        )
        try:
            found = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
            stored(llm.engine)
        finally:
            llm.close()
        assert [[*p, *r.outputs[0].token_ids] for p, r in zip(prompts, found, strict=True)] == wanted
        assert [(r.num_cached_tokens or 0) >= 48 for r in found] == [place > 0] * 2


@pytest.mark.slow
def test_ranks_draw_the_same_random_weights(tmp_path: Path) -> None:
    config_of("qwen3_moe").save_pretrained(tmp_path)
    found = []
    for settings in ({}, {"tensor_parallel": 2, "expert_parallel": True}):
        llm = LLM(
            str(tmp_path), load_format="random", device="cpu", dtype="float32", pool_bytes=POOL, **settings
        )
        try:
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts_of(3), GREEDY)])
        finally:
            llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "count", "reason"),
    [
        ("llama", 2, "LlamaForCausalLM has no experts that can skip the tokens of other ranks"),
        ("longcat_flash", 2, "LongcatFlashForCausalLM has no experts that can skip"),
        ("mixtral", 4, "has 2 experts, and tensor_parallel 4 does not divide this number"),
        ("olmoe", 2, "computes with all heads at once"),
        ("jetmoe", 2, "transformers' own cache"),
    ],
)
def test_a_family_that_cannot_be_divided_is_refused_with_a_reason(
    family: str, count: int, reason: str
) -> None:
    config = config_of(family)
    assert reason in str(sharding_refusal(config, count, expert_parallel=True))


def test_one_rank_has_no_experts_to_divide() -> None:
    for settings in ({}, {"context_parallel": 2}):
        with pytest.raises(ValueError, match=r"set tensor_parallel \(--tensor-parallel\) to 2 or more"):
            EngineConfig(expert_parallel=True, **settings)  # type: ignore[arg-type]
    EngineConfig(expert_parallel=True, tensor_parallel=2)


def test_pipelines_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="ranks would compute one after the other: set tensor_parallel"):
        engine_config(pipeline_parallel=2)


@pytest.mark.slow
def test_every_plan_of_transformers_for_experts_is_one_that_ranks_divide() -> None:
    """A family with a plan for expert parallelism is divided, or refused for a reason of tensor parallelism."""
    from tests.models.tiny import TINY

    divided = 0
    for family in TINY:
        config = config_of(family)
        if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
            continue
        if getattr(config.get_text_config(), "base_model_ep_plan", None) is None:
            continue
        reasons = [sharding_refusal(config, 2, expert_parallel) for expert_parallel in (False, True)]
        assert reasons[0] == reasons[1] or "has no experts" in str(reasons[1])
        divided += reasons[1] is None
    assert divided > 20
