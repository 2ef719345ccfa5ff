"""Requests longer than the pool on a GPU: cold pages are read from pinned host memory, beside requests without them."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.engines import make_engine

from .test_long_requests import closed, cold_pages, drawn, greedy, run, slabs_for
from .test_speculation_gpu import made

LENGTH = 1500


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_tokens_are_those_of_a_pool_that_holds_all(family: str, kv_dtype: str | None) -> None:
    if kv_dtype is not None and family != "llama":
        pytest.skip("one family covers quantised pages: the attention path is the same")
    model = made(family, max_position_embeddings=2048)
    prompts = [*drawn(family, LENGTH, 40), *drawn(family + "more", LENGTH - 300, 90)]
    large = make_engine(model, 1 << 28, kv_dtype=kv_dtype)
    wanted = [large.add(prompt, greedy()) for prompt in prompts]
    run(large)
    slabs = slabs_for(large, LENGTH + 16, 2) + 4
    pool = (slabs + 1) * large.layout.slab_bytes
    small = make_engine(model, pool, tiers=["host:256MiB"], kv_dtype=kv_dtype)
    small.prepare()
    found = [small.add(prompt, greedy()) for prompt in prompts]
    run(small)
    assert cold_pages(small)
    assert [one.output for one in found] == [one.output for one in wanted]
    large.close()
    closed(small)
