"""Another process's host memory: the conformance suite over shared memory and over TCP, real processes, and bad clients."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvloom.tiers import Form, HostConfig, HostTier, Objects, Outcome, Ranges, TierError, open_tier
from kvloom.tiers.host import SharedMemory, map_shared_memory
from kvloom.tiers.peer import PeerConfig, PeerConnection, PeerServer, UseTLS, open_peer
from kvloom.tiers.peer.protocol import WIRE_VERSION, Channel, Message, PeerError, Verb, client_handshake
from kvloom.tiers.remote import RemoteConfig
from kvloom.tiers.testing.conformance import (
    PAGE,
    RUN,
    Harness,
    TierConformance,
    filled,
    get,
    memory,
    objects,
    open_files,
    put,
)
from kvloom.tiers.tier import KEY_BYTES

from .servers import running, stopped
from .test_host_tier import HostHarness

MIB = 1 << 20
SECRET = b"a secret of two peers"
ROOT = Path(__file__).parents[2]


class PeerHarness(Harness):
    """Both sides in one process: the damage is done in the server's memory."""

    def __init__(
        self, shared: bool, size: int = 4 * MIB, slab: int = 256 << 10, tls: UseTLS = "auto"
    ) -> None:
        self.memory = SharedMemory(size)
        self.host = HostTier(HostConfig(size, slab_bytes=slab), buffer=self.memory.buffer)
        self.server = PeerServer(self.host, PeerConfig(secret=SECRET, tls=tls), self.memory)
        self.tier = open_peer(self.server.address, SECRET, "shared" if shared else "connection")

    def flip(self, wanted: Objects) -> None:
        HostHarness(self.host).flip(wanted)

    def swap(self, first: Objects, second: Objects) -> None:
        HostHarness(self.host).swap(first, second)


class PeerConformance(TierConformance):
    shared: bool
    tls: UseTLS = "auto"

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        harness = PeerHarness(self.shared, tls=self.tls)
        yield harness
        harness.tier.close()
        harness.server.close()


class TestShared(PeerConformance):
    shared = True


class TestConnection(PeerConformance):
    shared = False


@contextlib.contextmanager
def other_process(folder: Path, secret: str = "") -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    said = folder / "said"
    command = [sys.executable, "-m", "tests.tiers.peer_child", "16", *filter(None, [secret])]
    script = f"cd {ROOT} && exec {' '.join(command)} > {said}"
    with running(
        ["sh", "-c", script], lambda: said.exists() and said.read_text().endswith("\n"), folder / "log"
    ) as p:
        yield int(said.read_text()), p


@pytest.mark.parametrize("shared", [True, False])
def test_a_process_reads_and_writes_another_processes_memory(tmp_path: Path, shared: bool) -> None:
    with other_process(tmp_path) as (port, process):
        tier = open_peer(
            ("127.0.0.1", port), by="shared" if shared else "connection", config=RemoteConfig(1, timeout=2)
        )
        assert (tier._control._store.arena is not None) == shared  # type: ignore[union-attr]
        assert tier.lookup(objects(range(10))).tolist() == [True] * 8 + [False] * 2
        assert get(tier, range(8)).ok.all()
        assert put(tier, range(8, 40)).ok.all()
        second = open_tier(f"peer://127.0.0.1:{port}?by={'connection' if shared else 'shared'}&readers=1")
        assert get(second, range(40)).ok.all(), "both ways lead to the same pages"
        second.close()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(5)
        began = time.monotonic()
        assert (get(tier, range(8)).results == Outcome.FAILED).all()
        assert not tier.lookup(objects(range(8))).any()
        assert time.monotonic() - began < 5
        tier.close()


def test_a_hung_peer_costs_a_bounded_wait(tmp_path: Path) -> None:
    with other_process(tmp_path) as (port, process):
        tier = open_peer(("127.0.0.1", port), config=RemoteConfig(1, timeout=0.3))
        with stopped(process):
            began = time.monotonic()
            transfer = tier.read(objects(range(4)), memory(4))
            assert not tier.lookup(objects(range(4))).any()
            assert transfer.wait(8)
            assert (transfer.results == Outcome.FAILED).all()
            assert time.monotonic() - began < 10
        deadline = time.monotonic() + 10
        while not get(tier, range(4)).ok.all() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert get(tier, range(4)).ok.all()
        tier.close()


@pytest.fixture
def served() -> Iterator[PeerHarness]:
    harness = PeerHarness(shared=True)
    yield harness
    harness.tier.close()
    harness.server.close()


def test_a_disconnected_client_leaves_no_lease_and_no_partial_page(served: PeerHarness) -> None:
    put(served.host, range(2))
    client = PeerConnection(served.server.address, SECRET, 2.0)
    keys = objects(range(4)).keys
    client._ask(Message(Verb.ACQUIRE, 2, PAGE, RUN, payload=b"".join(keys[:2])))
    client._ask(Message(Verb.RESERVE, 2, PAGE, RUN, payload=b"".join(keys[2:])))
    assert served.host.stats().bytes == 4 * PAGE
    client.close()
    deadline = time.monotonic() + 5
    while served.host.stats().bytes != 2 * PAGE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.host.stats().objects == 2
    for first in range(100, 356, 32):  # no leases: all pages are evictable
        assert put(served.host, range(first, first + 32)).ok.all()


def test_pages_leased_by_a_peer_are_not_evicted(served: PeerHarness) -> None:
    put(served.host, range(4))
    client = PeerConnection(served.server.address, SECRET, 2.0)
    answer = client._ask(Message(Verb.ACQUIRE, 4, PAGE, RUN, payload=b"".join(objects(range(4)).keys)))
    for first in range(100, 356, 32):
        put(served.host, range(first, first + 32))
    assert served.host.lookup(objects(range(4))).all()
    client._channel.send(Message(Verb.RELEASE, a=answer.a))
    assert client.exists(objects(range(4)).keys) == [True] * 4  # answered after the release
    for first in range(500, 756, 32):
        put(served.host, range(first, first + 32))
    assert not served.host.lookup(objects(range(4))).any()
    client.close()


@pytest.mark.parametrize(
    "message",
    [
        Message(Verb.LOOKUP, 2, 1, 1, payload=bytes(KEY_BYTES)),
        Message(Verb.ACQUIRE, 1, 100, 33, payload=bytes(KEY_BYTES)),
        Message(Verb.ACQUIRE, 1, 0, 0, payload=bytes(KEY_BYTES)),
        Message(Verb.RESERVE, 1, 8 * MIB, 8 * MIB, payload=bytes(KEY_BYTES)),
        Message(Verb.READ, 1, PAGE, RUN, a=10, b=PAGE + 1, payload=bytes(KEY_BYTES)),
        Message(Verb.READ, 1, PAGE, RUN, a=10, b=10, payload=bytes(KEY_BYTES)),
        Message(Verb.COMMIT, a=77),
        Message(Verb.WRITE, 1, PAGE, RUN, payload=bytes(KEY_BYTES + 8 * PAGE // RUN)),
        Message(Verb.LOOKUP, 2, 1, 1, payload=bytes(KEY_BYTES) + bytes([1] * KEY_BYTES)),
    ],
)
def test_an_invalid_message_ends_only_its_connection(served: PeerHarness, message: Message) -> None:
    client = PeerConnection(served.server.address, SECRET, 2.0)
    with pytest.raises((PeerError, ConnectionError)):  # the latter if bytes of the message were unread
        client._ask(message)
    client.close()
    assert put(served.tier, range(3)).ok.all()
    assert get(served.tier, range(3)).ok.all()


def test_random_bytes_on_the_port_are_harmless(served: PeerHarness) -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 64, 65, 200, 5000):
        with socket.create_connection(served.server.address, 2) as noise:
            noise.sendall(random.integers(0, 256, size, dtype=np.uint8).tobytes())
    for _ in range(20):  # past the hello
        channel = Channel(socket.create_connection(served.server.address, 2), 2)
        client_handshake(channel, SECRET)
        header = struct.pack(
            "<4sBBHIIIQQQ",
            b"KVPM",
            int(random.integers(0, 12)),
            0,
            0,
            *random.integers(0, 1 << 31, 3).tolist(),
            5,
            6,
            int(random.integers(0, 300)),
        )
        channel.send_bytes([header, random.integers(0, 256, 300, dtype=np.uint8).tobytes()])
        channel.close()
    assert put(served.tier, range(3)).ok.all()
    assert get(served.tier, range(3)).ok.all()


def test_a_client_without_the_secret_is_refused(served: PeerHarness) -> None:
    with pytest.raises(TierError, match="rejected the secret"):
        open_peer(served.server.address, b"another secret entirely")
    with pytest.raises(TierError, match="rejected the secret"):
        open_peer(served.server.address, b"a secret of two peer")
    deadline = time.monotonic() + 5
    while served.server.refused < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.server.refused == 2
    channel = Channel(socket.create_connection(served.server.address, 2), 2)
    channel.receive_bytes(40)
    channel.send_bytes([bytes(64), b"".join([b"KVPM", bytes([Verb.DROP])])])
    assert bytes(channel.receive_bytes(33)) == bytes(33)
    with pytest.raises(ConnectionError):
        channel.receive_bytes(1)
    channel.close()


def test_a_client_refuses_a_server_without_the_secret() -> None:
    harness = PeerHarness(shared=False)
    harness.tier.close()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = impostor.getsockname()
        channel = Channel(socket.create_connection(address, 2), 2)
        other = Channel(impostor.accept()[0], 2)
        other.send_bytes([struct.pack("<6sH32s", b"KVPEER", WIRE_VERSION, bytes(32)), b"\x01" + bytes(32)])
        with pytest.raises(PeerError, match="does not have the secret"):
            client_handshake(channel, SECRET)
        other.send_bytes([struct.pack("<6sH32s", b"KVPEER", 9, bytes(32))])
        with pytest.raises(PeerError, match=f"version 9, this process {WIRE_VERSION}"):
            client_handshake(channel, SECRET)
        other.send_bytes([struct.pack("<6sH32s", b"KVPEER", 3, bytes(32))])  # whose messages have no tags
        with pytest.raises(PeerError, match=f"version 3, this process {WIRE_VERSION}: run the same release"):
            client_handshake(channel, SECRET)
        other.send_bytes([b"HTTP/1.1 400 Bad Request, and so on and so on"])
        with pytest.raises(PeerError, match="not a kvloom peer"):
            client_handshake(channel, SECRET)
        channel.close()
        other.close()
    harness.server.close()


def test_connections_above_the_limit_are_refused() -> None:
    tier = HostTier(HostConfig(MIB, slab_bytes=PAGE))
    server = PeerServer(tier, PeerConfig(max_connections=1))
    first = PeerConnection(server.address, b"", 2.0)
    with pytest.raises((OSError, PeerError)):
        PeerConnection(server.address, b"", 2.0)
    assert first.exists([]) == []
    assert first.usage().objects == 0
    first.close()
    server.close()


def test_a_public_address_requires_a_secret() -> None:
    with pytest.raises(ValueError, match="is reachable from other hosts"):
        PeerConfig(host="0.0.0.0")
    with pytest.raises(ValueError, match="this has 5"):
        PeerConfig(host="192.168.1.7", secret=b"short")
    with pytest.raises(ValueError, match="a secret of 5 bytes is too short: use 16"):
        PeerConfig(secret=b"short")
    assert PeerConfig(host="0.0.0.0", secret=SECRET).port == 0
    assert PeerConfig(host="::1").host == "::1"


def test_a_page_larger_than_the_peers_slab_is_refused(served: PeerHarness) -> None:
    big = Form("f", "x", MIB, MIB)
    with pytest.raises(ValueError, match="does not fit"):
        served.tier.write(objects([1], big), memory(1, MIB))


def test_an_invalid_shared_memory_path_is_not_mapped(tmp_path: Path) -> None:
    mine = SharedMemory(8192)
    mapped = map_shared_memory(mine.path, mine.token, 8192)
    assert mapped is not None
    mapped[5] = 7
    assert mine.buffer[5] == 7
    assert map_shared_memory(mine.path, "0" * 32, 8192) is None
    assert map_shared_memory(mine.path, mine.token, 4096) is None
    assert map_shared_memory(mine.path, mine.token, 8192) is mapped, "once for all connections"
    other = SharedMemory(8192)
    assert map_shared_memory("/proc/1/fd/99999", other.token, 8192) is None
    assert map_shared_memory("/etc/passwd", other.token, 8192) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peer://127.0.0.1", "write peer://host:port"),
        ("peer://127.0.0.1:99999", "Port out of range"),
        ("peer://127.0.0.1:1?by=pigeon", "'pigeon' is none of auto"),
        ("peer://127.0.0.1:1?capacity=5GiB", "unknown options capacity"),
    ],
)
def test_a_bad_address_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_tier(text)


def test_an_unreachable_peer_is_reported_at_opening(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="cannot be reached"):
        open_tier("peer://127.0.0.1:1?timeout=1")
    with pytest.raises(TierError, match=r"secret file .* cannot be read"):
        open_tier(f"peer://127.0.0.1:1?secret={tmp_path / 'absent'}")
    with pytest.raises(ValueError, match="compression and keys are not supported"):
        open_peer(("127.0.0.1", 1), config=RemoteConfig(1, compression="lz4"))


def test_several_peers_write_the_same_pages_concurrently(served: PeerHarness) -> None:
    other = open_peer(served.server.address, SECRET, by="connection")
    numbers = range(20)
    transfers = [tier.write(objects(numbers), filled(numbers)) for tier in (served.tier, other) * 3]
    for transfer in transfers:
        assert transfer.wait(10)
        assert transfer.ok.all()
    assert get(other, numbers).ok.all()
    assert served.host.stats().objects == 20
    other.close()


def test_a_lookup_may_exceed_the_objects_of_one_message() -> None:
    form = Form("f32", "x", 64, 64)
    many = objects(range(70_000), form)
    host = HostTier(HostConfig(8 * MIB, slab_bytes=64 << 10))
    assert host.write(many, Ranges(np.zeros(64, np.uint8), np.zeros(len(many)))).ok.all()
    server = PeerServer(host, PeerConfig())
    tier = open_peer(server.address, config=RemoteConfig(1, timeout=20))
    assert tier.stats().objects == 70_000
    assert tier.lookup(many).all()
    transfer = tier.read(many, Ranges(np.ones(70_000 * 64, np.uint8), np.arange(70_000) * 64))
    assert transfer.wait(30)
    assert transfer.ok.all()
    assert tier.drop(many) == 0, "the server wrote them itself: no peer drops them"
    assert host.drop(many) == 70_000
    tier.close()
    server.close()


def test_read_only_shared_memory_cannot_be_written_by_peers() -> None:
    offered = SharedMemory(1 << 20, read_only=True)
    offered.buffer[:4] = b"mine"
    mapped = map_shared_memory(offered.path, offered.token, offered.size)
    assert mapped is not None
    assert not mapped.flags.writeable
    offered.buffer[4:8] = b"more"
    assert bytes(mapped[:8]) == b"minemore"
    with Path(offered.path).open("r+b") as file, pytest.raises(PermissionError):
        mmap.mmap(file.fileno(), offered.size)


def test_shared_memory_is_freed_with_its_owner() -> None:
    shared = SharedMemory(1 << 20)
    tier, token = HostTier(HostConfig(1 << 20, 1 << 20), shared.buffer), shared.token
    assert open_files(token)
    tier.close()
    del shared, tier
    gc.collect()
    assert not open_files(token)
