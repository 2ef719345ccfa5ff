"""Public prefixes in a cluster: block hashes of the router equal those of workers, and requests of other tenants go where
the public prefix is cached."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("aiohttp")

from kvloom.cluster.router.fleet import AdapterOffer, Fleet, Offer
from kvloom.cluster.router.prompt_keys import PromptKeys, Roots, roots_of
from kvloom.core import CacheControl, activation_mark, token_bytes
from kvloom.events_wire import wire_hashes
from tests.cluster.fleet import started, until
from tests.cluster.test_router_live import alive, metrics, start_worker
from tests.engines import make_engine
from tests.models.zoo import tiny
from tests.serve.running import MODEL, model_folder

SYSTEM = "You answer short questions about the weather in large cities. Be polite, and never guess. " * 2


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(
    "adapter", [AdapterOffer(""), AdapterOffer("ab" * 16), AdapterOffer("cd" * 16, (48, 49))]
)
@pytest.mark.parametrize("lossy", [False, True])
def test_the_router_computes_the_hashes_of_workers(block: int, adapter: AdapterOffer, lossy: bool) -> None:
    engine = make_engine(tiny("llama"), 1 << 22, public_bytes=1 << 20, block_tokens=block)
    tokens = np.arange(3, 60, dtype=np.int32)
    offer = Offer(engine.cache.model, adapters={"a": adapter}, block_tokens=block)
    mark = activation_mark(tokens, adapter.invocation_tokens, adapter.digest)
    for tenant in ("red", "blue"):
        for public in (0, 15, 33, 48, 500):
            private = Fleet.root("model", offer, tenant, "s", lossy, "a")
            roots = Roots(private, Fleet.public_root(offer, lossy, "a"), adapter, offer.block_tokens)
            found = PromptKeys(token_bytes(tokens), [], len(tokens), public).hashes(roots)
            digest = "" if adapter.invocation_tokens else adapter.digest
            control = CacheControl(tenant, digest, "s", lossy=lossy, public_tokens=public)
            media = () if mark is None else (mark,)
            hashes = engine.cache.block_hashes(tokens, control, media, 0, len(tokens) // block * block, None)
            ends = [i // 16 for i in range(block, len(tokens) + 1, block)]
            assert [found[end - 1] for end in ends] == wire_hashes([bytes(one) for one in hashes])
    engine.close()


def test_workers_of_another_kind_have_no_public_prefixes() -> None:
    assert Fleet.public_root(Offer(None)) is None
    tokens = token_bytes(np.arange(40, dtype=np.int32))
    roots = Roots(b"r" * 16)
    assert PromptKeys(tokens, [], 40, 32).hashes(roots) == PromptKeys(tokens, [], 40).hashes(roots)
    assert roots_of.__doc__


@pytest.mark.slow
def test_another_tenant_is_sent_where_the_public_prefix_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)

    def cached(tenant: str, question: str, **cache: int) -> int:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
        status, found = router.send(
            "POST", "/v1/chat/completions", {**body, "tenant": tenant, "cache": cache}
        )
        assert status == 200, found
        return int((found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    with ExitStack() as stack:
        flags = ("--public-prefixes", "1MiB")
        workers = [start_worker(stack, folder, tmp_path / f"w{i}.log", *flags) for i in range(2)]
        command = [word for worker in workers for word in ("--worker", worker.url)]
        router = stack.enter_context(
            started(tmp_path / "router.log", "route", "--wait-seconds", "0", *command)
        )
        until(lambda: router.is_healthy() and alive(router) == 2)
        assert cached("red", "Is it cold in Oslo?", public_messages=1) == 0
        for tenant in ("blue", "green", "blue"):
            assert cached(tenant, f"Which city is hot, {tenant}?", public_messages=1) >= 160
        assert metrics(router)["kvloom_router_expected_hit_tokens_total"] >= 3 * 160
        assert cached("white", "Is it cold in Oslo?") == 0
