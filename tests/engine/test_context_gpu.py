"""Context parallelism on a GPU: two processes share one GPU and exchange partial attention by gloo. Tokens are those of
Hugging Face's model on the same GPU, within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import transformers

from kvloom.engine import LLM, Request, SamplingParams
from tests.engine.test_offload import PATIENT, offload_of
from tests.engine.test_rank_tiers import stored
from tests.engines import make_engine
from tests.models.test_zoo_gpu import MLA, WIDE, _within_rounding
from tests.models.zoo import config_of, prompts_of

POOL = 1 << 26
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "gemma3_text", "gpt_oss", "qwen3_next", "llama4_text"), WIDE),
    "deepseek_v3": {**WIDE, **MLA},
    "bamba": {**WIDE, "mamba_n_heads": 8, "mamba_d_head": 64},
}
EXPERTS = ("gpt_oss", "qwen3_next")
"""Families in float32: in bf16, rounding may select other experts, which changes logits much more than rounding."""


def saved(family: str, folder: Path) -> Any:
    """Save a model with random weights. Return Hugging Face's model on the GPU."""
    torch.manual_seed(0)
    config = config_of(family, **{**FAMILIES[family], "max_position_embeddings": 4096})
    dtype = torch.float32 if family in EXPERTS else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.save_pretrained(folder)
    model.set_attn_implementation("eager")
    return model.cuda()


@contextmanager
def two_ranks(folder: Path, **settings: Any) -> Iterator[LLM]:
    settings = {"pool_bytes": POOL, "block_tokens": 32, "dtype": "auto", **settings}
    llm = LLM(str(folder), context_parallel=2, rank_backend="gloo", device="cuda", **settings)
    try:
        yield llm
    finally:
        llm.close()


def run(llm: LLM, prompts: list[list[int]]) -> list[Request]:
    requests = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
    llm.engine.run()
    return requests


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_hugging_faces_within_rounding(family: str, tmp_path: Path) -> None:
    """Chunks of 300 tokens are divided between ranks, decode steps are not. A second round hits the prefix cache."""
    own = saved(family, tmp_path)
    prompts = prompts_of(1, (5, 40, 700, 129))
    with two_ranks(tmp_path, token_budget=300, max_running=4) as llm:
        pages = llm.engine.runner.pages
        divided = [group for group in llm.engine.layout.groups if group.parts == 2]
        assert divided
        assert all(group.page_tokens == 16 for group in divided)
        assert not pages.is_replayable, "steps of ranks that divide the context have no graphs"
        first = run(llm, prompts)
        again = run(llm, [[*request.tokens, *prompts[1]] for request in first])
        assert all(request.cached_tokens for request in again[1:])
        llm.engine.cache.check()
    _within_rounding(own, first)
    _within_rounding(own, again)


@pytest.mark.parametrize(
    "settings",
    [{"speculate": "ngram"}, {"kv_dtype": "fp8"}, {"kv_dtype": "int8"}, {"block_tokens": 64}],
    ids=str,
)
def test_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    """8-bit pages change logits more than bf16."""
    own = saved("llama", tmp_path)
    prompts = [prompt * 3 for prompt in prompts_of(2, (30, 90))]
    with two_ranks(tmp_path, **settings) as llm:
        requests = run(llm, prompts)
    _within_rounding(own, requests, 0.6 if "kv_dtype" in settings else 0.15)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_pages_evicted_to_host_memory_are_loaded_on_both_ranks(family: str, tmp_path: Path) -> None:
    own = saved(family, tmp_path)
    roots = prompts_of(3, (600, 500, 400, 550))
    with two_ranks(tmp_path) as llm:
        pool = llm.engine.layout.slab_bytes_for(700) + 8 * llm.engine.layout.slab_bytes
    settings: dict[str, Any] = {"pool_bytes": 2 * pool, "tiers": ["host:256MiB"], "offload": PATIENT}
    with two_ranks(tmp_path, max_running=2, **settings) as llm:
        run(llm, roots)
        stored(llm.engine)
        requests = run(
            llm, [[*root, *end] for root, end in zip(roots, prompts_of(4, (9, 8, 7, 6)), strict=True)]
        )
        assert offload_of(llm.engine).stats.loaded_tokens
        stored(llm.engine)
    _within_rounding(own, requests)


def test_a_context_that_does_not_fit_the_pool_of_one_rank_runs_on_two(tmp_path: Path) -> None:
    own = saved("llama", tmp_path)
    (prompt,) = prompts_of(5, (3000,))
    whole = make_engine(own, POOL, block_tokens=32).layout
    pool = whole.slab_bytes_for(len(prompt) + 12) * 3 // 4
    own = saved("llama", tmp_path)  # an engine changes the model that it gets
    with pytest.raises(ValueError, match="pool"):
        make_engine(saved("llama", tmp_path), pool, block_tokens=32).add(prompt, GREEDY)
    with two_ranks(tmp_path, pool_bytes=pool) as llm:
        requests = run(llm, [prompt])
    _within_rounding(own, requests)


def test_ranks_that_divide_the_weights_share_a_gpu(tmp_path: Path) -> None:
    own = saved("llama", tmp_path)
    llm = LLM(
        str(tmp_path),
        tensor_parallel=2,
        rank_backend="gloo",
        device="cuda",
        dtype="bfloat16",
        pool_bytes=POOL,
    )
    try:
        requests = run(llm, prompts_of(6, (40, 200)))
    finally:
        llm.close()
    _within_rounding(own, requests)
