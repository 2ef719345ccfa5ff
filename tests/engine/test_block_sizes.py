"""Servers with different block sizes share one store: each loads the pages of the other, and no token changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.tiers import UnitTier
from tests.engines import make_engine
from tests.models.zoo import expected, tiny
from tests.tiers.servers import redis_server

from .test_offload import PATIENT, closed, drawn, offload_of, served

POOL = 1 << 23
# full, sliding, latent (MLA), and chunked layers
FAMILIES = ["llama", "gemma3_text", "deepseek_v3", "llama4_text"]


@contextlib.contextmanager
def disk_text(folder: Path) -> Iterator[str]:
    yield f"disk:{folder}/kv:64MiB"


@contextlib.contextmanager
def redis_text(folder: Path) -> Iterator[str]:
    with redis_server(folder) as (port, _):
        yield f"redis://127.0.0.1:{port}/0?capacity=64MiB"


@pytest.mark.parametrize("text_of", [disk_text, pytest.param(redis_text, marks=pytest.mark.server)])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (64, 32)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(4)
def test_pages_of_another_block_size_are_loaded(
    family: str, sizes: tuple[int, int], text_of: Any, tmp_path: Path
) -> None:
    prompts = drawn(family, 70, 50, 33, 90)
    wanted = expected(tiny(family), prompts, 8)
    turns = [[*tokens, 5, 6, 7] for tokens in wanted]
    again = expected(tiny(family), turns, 8)
    with text_of(tmp_path) as text:
        for round_, block in enumerate(sizes):
            engine = make_engine(tiny(family), POOL, tiers=[text], offload=PATIENT, block_tokens=block)
            requests = served(engine, turns if round_ else prompts)
            assert [request.tokens for request in requests] == (again if round_ else wanted)
            found = [request.cached_tokens for request in requests]
            is_unit = isinstance(offload_of(engine).transfers.queues[0].tier, UnitTier)
            assert is_unit == (block > 16)
            closed(engine)
    whole = [(len(tokens) - 1) // sizes[1] * sizes[1] for tokens in wanted]
    assert found == whole


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
@pytest.mark.few(1)
def test_quantised_pages_of_another_block_size_keep_their_scales(
    kv_dtype: Any, sizes: tuple[int, int], tmp_path: Path
) -> None:
    prompts = drawn(kv_dtype, 70, 50)
    plain = served(make_engine(tiny("llama"), POOL, kv_dtype=kv_dtype), prompts)
    turns = [[*request.tokens, 5, 6] for request in plain]
    wanted = [r.tokens for r in served(make_engine(tiny("llama"), POOL, kv_dtype=kv_dtype), turns)]
    for round_, block in enumerate(sizes):
        engine = make_engine(
            tiny("llama"),
            POOL,
            kv_dtype=kv_dtype,
            tiers=[f"disk:{tmp_path}:64MiB"],
            offload=PATIENT,
            block_tokens=block,
        )
        requests = served(engine, turns if round_ else prompts)
        assert [r.tokens for r in requests] == (wanted if round_ else [r.tokens for r in plain])
        if round_:
            assert all((r.cached_tokens or 0) >= 32 for r in requests)
        closed(engine)


@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "mamba"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
@pytest.mark.few(2)
def test_states_are_loaded_at_another_block_size(family: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    prompts = drawn(family, 70, 50, 90)
    wanted = expected(tiny(family), prompts, 8)
    turns = [[*tokens, 5, 6, 7] for tokens in wanted]
    again = expected(tiny(family), turns, 8)
    for round_, block in enumerate(sizes):
        engine = make_engine(
            tiny(family), POOL, tiers=[f"disk:{tmp_path}:64MiB"], offload=PATIENT, block_tokens=block
        )
        requests = served(engine, turns if round_ else prompts)
        assert [request.tokens for request in requests] == (again if round_ else wanted)
        found = [request.cached_tokens for request in requests]
        closed(engine)
    assert found == [len(tokens) - 1 for tokens in wanted]
