"""An engine on each store, with real servers: a restarted engine loads from it, and a store that dies changes no token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvloom.tiers import Form, HostConfig, HostTier, Outcome
from kvloom.tiers.encoding import make_codec, parse_head, seal
from kvloom.tiers.host import SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer
from kvloom.tiers.remote.redis_protocol import RespConnection
from kvloom.tiers.remote.store_tier import PREFIX
from kvloom.tiers.transfers import CircuitBreakerConfig, TierQueueConfig
from tests.engines import make_engine
from tests.models.zoo import expected, tiny
from tests.tiers.servers import mooncake_master, redis_server, s3_bucket

from .test_offload import PATIENT, POOL, QUICK, closed, drawn, served

pytestmark = pytest.mark.server
MIB = 1 << 20
UNBROKEN = replace(PATIENT.transfers, queue=TierQueueConfig(breaker=CircuitBreakerConfig(max_failures=1000)))
"""For faults that must not close a tier: pages are offloaded to it again."""


@contextlib.contextmanager
def redis_text(folder: Path) -> Iterator[str]:
    keys = folder / "keys.json"
    keys.write_text('{"*": "' + "5c" * 32 + '"}')
    keys.chmod(0o600)
    with redis_server(folder) as (port, _):
        yield f"redis://127.0.0.1:{port}/0?capacity=64MiB&compression=lz4&keys={keys}"


@contextlib.contextmanager
def peer_text(folder: Path) -> Iterator[str]:
    memory = SharedMemory(64 * MIB)
    server = PeerServer(HostTier(HostConfig(memory.size, MIB), buffer=memory.buffer), PeerConfig(), memory)
    yield "peer://{}:{}".format(*server.address)
    server.close()


@contextlib.contextmanager
def nixl_text(folder: Path) -> Iterator[str]:
    pytest.importorskip("nixl._api", reason="pip install --no-deps nixl nixl-cu12", exc_type=ImportError)
    yield f"nixl://{folder}/kv?capacity=64MiB&durable=process"


@contextlib.contextmanager
def mooncake_text(folder: Path) -> Iterator[str]:
    """Values in a process's own segment end with the process, so another process provides one."""
    with mooncake_master(folder) as (port, _):
        from kvloom.tiers.remote import MooncakeConfig
        from kvloom.tiers.remote.mooncake_client import MooncakeClient

        storage = MooncakeClient(MooncakeConfig(f"127.0.0.1:{port}", segment=128 * MIB), 5.0)
        storage.get()
        yield f"mooncake://127.0.0.1:{port}?capacity=64MiB&timeout=5"
        storage.close()


def s3_text(folder: Path) -> contextlib.AbstractContextManager[str]:
    return s3_bucket(folder, 64 * MIB)


@pytest.mark.parametrize("text_of", [redis_text, peer_text, nixl_text, mooncake_text, s3_text])
@pytest.mark.parametrize("family", ["gemma3_text", "bamba"])
@pytest.mark.few(3)
def test_restart_loads_pages_from_the_store(family: str, text_of: object, tmp_path: Path) -> None:
    prompts = drawn(family, 70, 50, 90)
    wanted = expected(tiny(family), prompts, 8)
    turns = [[*tokens, 5, 6, 7] for tokens in wanted]
    again = expected(tiny(family), turns, 8)
    with text_of(tmp_path) as text:  # type: ignore[operator]
        for round_ in range(2):
            engine = make_engine(tiny(family), POOL, tiers=[text], offload=PATIENT)
            assert engine.offload is not None
            requests = served(engine, turns if round_ else prompts)
            assert [request.tokens for request in requests] == (again if round_ else wanted)
            if round_:
                assert all(request.cached_tokens >= 32 for request in requests)
            closed(engine)


def test_store_failure_changes_no_token(tmp_path: Path) -> None:
    prompts = drawn("dies", 70, 50, 90)
    wanted = expected(tiny("llama"), prompts, 8)
    with redis_server(tmp_path) as (port, _):
        text = f"redis://127.0.0.1:{port}/0?capacity=64MiB&timeout=0.3"
        first = make_engine(tiny("llama"), POOL, tiers=[text], offload=QUICK)
        assert [r.tokens for r in served(first, prompts)] == wanted
        closed(first)
        engine = make_engine(tiny("llama"), POOL, tiers=[text], offload=QUICK)
    assert [r.tokens for r in served(engine, prompts)] == wanted
    closed(engine)


def forge(port: int) -> int:
    """Replace every page in Redis by random bytes with valid checksums, as a writer without keys can. Return how many."""
    client, random = RespConnection(("127.0.0.1", port), 5, limit=16 * MIB), np.random.default_rng(0)
    keys = client.call("KEYS", PREFIX + b"*")
    for key in keys:
        parsed = parse_head(memoryview(client.call("GET", key)))
        assert not isinstance(parsed, Outcome)
        head = parsed[0]
        form = Form("any", "any", head.runs * head.run_bytes, head.run_bytes)
        wrong = random.standard_normal(form.page_bytes // 4 + 1).astype(np.float32).view(np.uint8)
        plain, body = seal(head.key, form, memoryview(wrong)[: form.page_bytes], make_codec("none"))
        assert client.call("SET", key, [plain.pack(), *map(bytes, body)]) == b"OK"
    client.close()
    return len(keys)


@pytest.mark.parametrize("protect", ["encrypt", "authenticate"])
def test_forged_pages_in_a_keyed_store_change_no_token_and_are_counted(protect: str, tmp_path: Path) -> None:
    prompts = drawn("forged", 70, 50, 90)
    wanted = expected(tiny("llama"), prompts, 8)
    keys = tmp_path / "keys.json"
    keys.write_text('{"*": "' + "5c" * 32 + '"}')
    keys.chmod(0o600)
    with redis_server(tmp_path) as (port, _):
        text = f"redis://127.0.0.1:{port}/0?capacity=64MiB&keys={keys}&protect={protect}"
        for round_ in range(3):
            engine = make_engine(
                tiny("llama"), POOL, tiers=[text], offload=replace(PATIENT, transfers=UNBROKEN)
            )
            assert engine.offload is not None
            requests = served(engine, prompts)
            assert [request.tokens for request in requests] == wanted
            found = {key[1:]: n for key, n in engine.offload.transfers.fault_log.counts.items()}
            assert (found.get(("read", "untrusted"), 0) > 0) == (round_ == 1), "forged pages are counted"
            if round_ == 2:
                assert all(request.cached_tokens >= 32 for request in requests), "good pages took their place"
            closed(engine)
            if round_ == 0:
                assert forge(port) > 0
