"""An engine shares its host memory: other engines read its pages, change nothing, and recompute when it ends."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from kvloom.engine import Engine
from kvloom.tiers.peer import PeerServer
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_offload import PATIENT, POOL, closed, drawn, offload_of, served, stored


def offered(engine: Engine) -> PeerServer:
    server = offload_of(engine).host_server
    assert server is not None
    return server


def guest(engine: Engine, options: str = "") -> Engine:
    host, port = offered(engine).address
    return make_engine(
        tiny("llama"), POOL, tiers=[f"peer://{host}:{port}?timeout=1{options}"], offload=PATIENT
    )


@pytest.mark.parametrize("by", ["shared", "connection"])
def test_another_engine_reads_served_host_memory(by: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of more than 16 bytes")
    secret.chmod(0o600)
    prompts, other = drawn("offer", 70, 50), drawn("other", 40)
    wanted = expected(tiny("llama"), [*prompts, *other], 8)
    owner = make_engine(tiny("llama"), POOL, tiers=[f"host:8MiB?share=0&secret={secret}"], offload=PATIENT)
    served(owner, prompts)
    assert offered(owner).address[0] == "127.0.0.1"
    before = offload_of(owner).host.stats()
    second = guest(owner, f"&by={by}&secret={secret}")
    found = served(second, [*prompts, *other])
    assert [one.tokens for one in found] == wanted
    assert [one.cached_tokens for one in found] == [64, 48, 0]
    stored(second)
    lane = offload_of(second).transfers.queues[0]
    assert lane.tier.stats().writes.get("full"), "it offered its own pages, and they were refused"
    after = offload_of(owner).host.stats()
    assert (after.objects, after.bytes) == (before.objects, before.bytes)
    closed(owner)
    again = served(second, [[*prompts[0], 9]])  # its pool still has it; no tier does
    assert again[0].cached_tokens
    late = served(second, drawn("late", 60))
    assert [one.tokens for one in late] == expected(tiny("llama"), drawn("late", 60), 8)
    closed(second)


def test_host_server_needs_a_secret_beyond_loopback_and_a_free_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def opened(text: str) -> Engine:
        return make_engine(tiny("llama"), POOL, tiers=[text])

    with pytest.raises(ValueError, match="give a secret"):
        opened("host:8MiB?share=0.0.0.0:0")
    with pytest.raises(ValueError, match="neither PORT nor HOST:PORT"):
        opened("host:8MiB?share=here")
    with pytest.raises(ValueError, match=r"secret file .* cannot be read"):
        opened("host:8MiB?share=0&secret=/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with caplog.at_level(logging.WARNING, "kvloom.tiers"):
            engine = opened(f"host:8MiB?share={taken.getsockname()[1]}")
        assert "not shared" in caplog.text
        assert offload_of(engine).host_server is None
        closed(engine)
