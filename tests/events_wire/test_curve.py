"""Event sockets with CURVE keys, on real TCP sockets: only a subscriber with the right key gets events and replays."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest

pytest.importorskip("zmq")

import zmq
import zmq.asyncio
import zmq.auth

from kvloom.engine import EngineConfig
from kvloom.events_wire import CurveKey, EventSettings, Subscriber, WirePublisher, subscriber
from kvloom.events_wire.publisher import SNAPSHOT
from tests.events_wire.test_events_wire import Index, cache_of, compute, published, until

if not zmq.has("curve"):
    pytest.skip("this libzmq has no CURVE", allow_module_level=True)


def key_file(folder: Path, name: str) -> Path:
    zmq.auth.create_certificates(folder, name)
    path = folder / f"{name}.key_secret"
    path.chmod(0o600)
    return path


def tcp(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return found


def test_only_the_right_key_gets_events_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_SECONDS", 1.0)
    right, wrong = (CurveKey.read(key_file(tmp_path, name)) for name in ("right", "wrong"))
    half = CurveKey(right.public, wrong.secret)  # knows the public key only
    endpoint, replay = tcp(2)
    cache = cache_of()
    publisher = WirePublisher(cache, EventSettings(endpoint, replay, key=str(tmp_path / "right.key_secret")))

    async def run() -> None:
        heard = {name: Index() for name in ("right", "wrong", "half", "plain")}
        keys = {"right": right, "wrong": wrong, "half": half, "plain": None}
        followers = {n: Subscriber(endpoint, replay, heard[n].apply, key=keys[n]) for n in heard}
        tasks = [asyncio.create_task(one.run()) for one in followers.values()]
        context = zmq.asyncio.Context()
        try:
            await until(lambda: followers["right"].counts.is_synced)
            for number in range(5):
                compute(cache, list(range(100 * number + 1, 100 * number + 50)))
                publisher.flush()
                wanted = published(cache, publisher)
                await until(lambda wanted=wanted: heard["right"].pages == wanted)  # type: ignore[misc]
            parts = await followers["right"]._ask(context, SNAPSHOT)
            assert parts
            answers = [await followers[name]._ask(context, SNAPSHOT) for name in ("wrong", "half", "plain")]
            assert answers == [None] * 3
            for name in ("wrong", "half", "plain"):
                assert not heard[name].pages
                assert followers[name].counts.batches == 0
                assert not followers[name].counts.is_synced
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            context.destroy(linger=0)

    try:
        asyncio.run(run())
    finally:
        publisher.close()
    # The addresses are free again: the sockets and the thread that authenticates have ended.
    publisher._thread.join(30)
    WirePublisher(cache, EventSettings(endpoint, replay)).close()


def test_key_files_are_checked(tmp_path: Path) -> None:
    path = key_file(tmp_path, "k")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="mode 644"):
        CurveKey.read(path)
    path.chmod(0o440)
    CurveKey.read(path)
    (tmp_path / "k.key").chmod(0o600)
    with pytest.raises(ValueError, match=r"use the file \*.key_secret"):
        CurveKey.read(tmp_path / "k.key")
    with pytest.raises(ValueError, match="cannot be read"):
        CurveKey.read(tmp_path / "missing")
    with pytest.raises(ValueError, match="kv_events_key needs kv_events"):
        EngineConfig(kv_events_key=str(path))


@pytest.mark.parametrize(
    ("address", "warns"),
    [("tcp://127.0.0.1:{}", False), ("tcp://0.0.0.0:{}", True), ("ipc://{folder}/{}", False)],
)
def test_plain_events_beyond_loopback_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, address: str, warns: bool
) -> None:
    endpoint = address.format(tcp(1)[0].rpartition(":")[2], folder=tmp_path)
    with caplog.at_level(logging.WARNING, "kvloom.events"):
        WirePublisher(cache_of(), EventSettings(endpoint)).close()
    assert ("neither encrypted nor authenticated" in caplog.text) is warns
    caplog.clear()
    if warns:
        with caplog.at_level(logging.WARNING, "kvloom.events"):
            key = str(key_file(tmp_path, "k"))
            endpoint = address.format(tcp(1)[0].rpartition(":")[2])
            WirePublisher(cache_of(), EventSettings(endpoint, key=key)).close()
        assert caplog.text == ""
