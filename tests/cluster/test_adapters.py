"""Adapter-aware routing: block hashes of the router equal those of workers, and requests go where adapter and pages are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import torch
from transformers import LlamaForCausalLM

from kvloom.cluster.router.fleet import AdapterOffer, Fleet, Offer
from kvloom.cluster.router.prompt_keys import PromptKeys, Roots
from kvloom.cluster.router.scoring import Scorer, ScoringOptions, WorkerLoad
from kvloom.core import CacheControl, activation_mark, token_bytes
from kvloom.events_wire import wire_hashes
from tests.cluster.fleet import Process, started, until
from tests.cluster.test_router_live import alive, start_worker
from tests.engines import make_engine
from tests.models.lora_adapters import write_adapter
from tests.models.zoo import tiny
from tests.serve.running import MODEL, model_folder

PROMPT = [(7 * i) % 250 + 20 for i in range(160)]
INVOCATION = [301, 302]


@pytest.mark.parametrize("activated", [False, True])
def test_the_router_computes_the_hashes_of_workers(activated: bool) -> None:
    engine = make_engine(tiny("llama"), 1 << 22)
    tokens = np.array([*range(3, 40), 60, 61, *range(5, 30)], np.int32)
    adapter = AdapterOffer("ab" * 16, (60, 61) if activated else ())
    offer = Offer(engine.cache.model, adapters={"sql": adapter})
    root = Fleet.root("model", offer, "tenant", "", adapter="sql")
    found = PromptKeys(token_bytes(tokens), [], len(tokens)).hashes(Roots(root, adapter=adapter))
    control = CacheControl(tenant="tenant", adapter="" if activated else adapter.digest)
    mark = activation_mark(tokens, adapter.invocation_tokens, adapter.digest)
    media = () if mark is None else (mark,)
    wanted = engine.cache.block_hashes(tokens, control, media, 0, len(tokens) // 16 * 16, None)
    assert found == wire_hashes(wanted)
    plain = PromptKeys(token_bytes(tokens), [], len(tokens)).hashes(
        Roots(Fleet.root("model", offer, "tenant", ""))
    )
    shared = [one == other for one, other in zip(found, plain, strict=True)]
    assert shared == ([True, True, False, False] if activated else [False] * 4)
    engine.close()


def test_a_worker_with_the_adapter_in_a_slot_is_preferred() -> None:
    scorer = Scorer(ScoringOptions(adapter_seconds=0.5))
    scorer.loads = {"one": WorkerLoad(1000), "two": WorkerLoad(1000, adapters={"sql"})}
    for adapter, wanted in (("sql", "two"), (None, "one")):
        choice = scorer.choose(100, {}, ["one", "two"], 0.0, adapter=adapter)
        assert choice is not None
        assert choice.worker == wanted
    # Many cached tokens outweigh the time to load the adapter.
    scorer.loads["one"].speed.per_token = 0.01
    choice = scorer.choose(1000, {"one": (900,) * 4}, ["one", "two"], 0.0, adapter="sql")
    assert choice is not None
    assert choice.worker == "one"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Process, list[Process]]]:
    """A router and two workers. Both have the adapter sql, and only the second one the activated LoRA `late`."""
    folder = model_folder(tmp_path / "models")
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    targets = ("q_proj", "v_proj", "down_proj")
    sql = write_adapter(tmp_path / "sql", base, targets, seed=1, size=0.3)
    late = write_adapter(
        tmp_path / "late", base, targets, seed=2, size=0.3, alora_invocation_tokens=INVOCATION
    )
    with ExitStack() as stack:
        flags = [("--lora", f"sql={sql}"), ("--lora", f"sql={sql}", "--lora", f"late={late}")]
        workers = [start_worker(stack, folder, tmp_path / f"w{i}.log", *more) for i, more in enumerate(flags)]
        named = [word for worker in workers for word in ("--worker", worker.url)]
        router = stack.enter_context(started(tmp_path / "router.log", "route", "--wait-seconds", "0", *named))
        until(lambda: router.is_healthy() and alive(router) == 2)
        yield router, workers


def cached(router: Process, model: str, tokens: list[int]) -> dict[str, int]:
    status, found = router.send("POST", "/query", {"model_name": model, "token_ids": tokens})
    assert status == 200, found
    return {name: one["gpu"] for name, one in found["instances"].items()}


@pytest.mark.slow
def test_requests_go_where_their_adapter_and_its_pages_are(fleet: tuple[Process, list[Process]]) -> None:
    router, workers = fleet
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    status, first = router.send("POST", "/v1/completions", body)
    assert status == 200, first
    assert first["model"] == "sql"
    until(lambda: max(cached(router, "sql", PROMPT).values()) >= 160)
    assert sorted(cached(router, "sql", PROMPT).values()) == [0, 160]
    assert set(cached(router, MODEL, PROMPT).values()) == {0}, "the base model has other hashes"
    for _ in range(3):
        _, again = router.send("POST", "/v1/completions", body)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144

    second = workers[1].url
    prompt = [*PROMPT[3:103], *INVOCATION, *PROMPT[:40]]
    for _ in range(2):
        status, found = router.send("POST", "/v1/completions", {**body, "model": "late", "prompt": prompt})
        assert status == 200, found
    until(lambda: cached(router, "late", prompt)[second] == 128)
    assert cached(router, MODEL, prompt)[second] == 96, "blocks before the activation are the base model's"
    listed = {one["id"]: one.get("parent") for one in router.send("GET", "/v1/models")[1]["data"]}
    assert listed == {MODEL: None, "sql": MODEL, "late": MODEL}
    workers[1].kill()
    until(lambda: alive(router) == 1)
    assert router.send("POST", "/v1/completions", {**body, "model": "late"})[0] == 404
    assert router.send("POST", "/v1/completions", body)[0] == 200
