"""Access to a peer: secrets, users, limits and leases of the peer protocol, with real processes and sockets."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.tiers import HostConfig, HostTier, Outcome, Ranges, TierError, open_tier
from kvloom.tiers.host import SharedMemory, map_shared_memory
from kvloom.tiers.peer import PeerConfig, PeerConnection, PeerServer, UnixAddress, open_peer, read_secret
from kvloom.tiers.peer.protocol import (
    WIRE_VERSION,
    Channel,
    Message,
    PeerError,
    Verb,
    client_handshake,
    server_handshake,
)
from kvloom.tiers.peer.secret import default_secret
from kvloom.tiers.peer.unix_socket import listen_unix
from kvloom.tiers.remote import StoreError
from kvloom.tiers.testing.conformance import PAGE, RUN, get, objects, put

MIB = 1 << 20
SECRET = b"a secret of two peers"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@contextlib.contextmanager
def served(size: int = 4 * MIB, slab: int = 256 << 10, **changes: object) -> Iterator[PeerServer]:
    memory = SharedMemory(size)
    host = HostTier(HostConfig(size, slab_bytes=slab), buffer=memory.buffer)
    config = PeerConfig(secret=SECRET, **changes)  # type: ignore[arg-type]
    server = PeerServer(host, config, memory)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def client(server: PeerServer, token: bytes = b"") -> Iterator[PeerConnection]:
    connection = PeerConnection(server.address, SECRET, 5.0, token=token)
    try:
        yield connection
    finally:
        connection.close()


def asked(verb: Verb, numbers: range, page: int = PAGE, run: int = RUN, a: int = 0, b: int = 0) -> Message:
    keys = objects(numbers).keys
    return Message(verb, len(keys), page, run, a, b, b"".join(keys))


def comes(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def filled_by_peer(server: PeerServer, numbers: range) -> None:
    tier = open_peer(server.address, SECRET)
    assert put(tier, numbers).ok.all()
    tier.close()


# --- admission


@contextlib.contextmanager
def sharing(*options: str) -> Iterator[dict[str, object]]:
    command = [sys.executable, "-m", "kvloom.cli", "share", "16MiB", "--slab", "1MiB", "--json", *options]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)


STRANGER = """
import os, sys
import encodings.idna
from kvloom.tiers import open_tier
from kvloom.tiers.peer import open_peer
from kvloom.tiers import TierError
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for text in sys.argv[1:]:
    try:
        print("in", open_tier(text).stats().objects)
    except TierError as error:
        print("out", error)
"""


def stranger(*texts: str) -> list[str]:
    """What a process of another user gets for these tiers."""
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *texts],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_share_and_a_client_of_one_user_need_no_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / ("long" * 40)  # longer than a socket's address may be
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    with sharing() as told:
        tier = open_tier(str(told["address"]))
        assert tier._control._store._channel._stream.socket.family == socket.AF_UNIX  # type: ignore[attr-defined]
        assert put(tier, range(8)).ok.all()
        tier.close()
        by_tcp = open_tier(f"{told['address']}?by=connection")
        assert get(by_tcp, range(8)).ok.all()
        by_tcp.close()
        folder = state / "kvloom"
        modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == {"": 0o600, ".sock": 0o600}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(default_secret()) == 64
    assert comes(lambda: not list(folder.glob("*.sock")))


def test_an_error_states_where_the_missing_secret_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served() as server:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        with pytest.raises(
            TierError, match=r"secret file .*peer-secret does not exist: start `kvloom share` as this user"
        ):
            open_peer(server.address)
        (tmp_path / "kvloom").mkdir(exist_ok=True)
        default_secret(create=True)
        with pytest.raises(TierError, match=r"rejected the secret: give both sides the same file"):
            open_peer(server.address)


@as_root
def test_another_user_of_this_host_is_refused() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)  # a stranger may enter it
        ours, theirs = folder / "ours.sock", folder / "theirs.sock"
        told = stack.enter_context(sharing("--socket", str(ours)))
        stack.enter_context(sharing("--socket", str(theirs), "--allow-uid", str(NOBODY)))
        tier = open_tier(str(told["address"]))
        assert put(tier, range(4)).ok.all()
        tier.close()
        answers = stranger(
            str(told["address"]),
            f"{told['address']}?by=connection",
            f"peer://{ours}",
            f"peer://{theirs}",
            f"peer://{theirs}?by=shared",
        )
        assert [answer.split()[0] for answer in answers] == ["out", "out", "out", "in", "out"]
        assert "secret" in answers[0]
        assert "secret" in answers[1]
        assert "Permission denied" in answers[2]
        assert "cannot be mapped" in answers[4], "it reads by the socket, and does not map our memory"
        ours.chmod(0o666)  # a mistake of the administrator: the kernel still identifies the user
        (answer,) = stranger(f"peer://{ours}")
        assert "does not serve this user: start it with --allow-uid" in answer


@as_root
def test_a_client_refuses_a_server_of_another_user(tmp_path: Path) -> None:
    where = tmp_path / "planted.sock"
    code = (
        "import os,socket,sys,time\n"
        "s=socket.socket(socket.AF_UNIX)\nos.setgid(65534)\n"
        "s.bind(sys.argv[1])\nos.setuid(65534)\ns.listen()\nprint('up',flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(where)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            with pytest.raises(StoreError, match=r"belongs to user 65534, not to user 0: give \?uid=65534"):
                PeerConnection(UnixAddress(str(where)), b"", 2.0)
        finally:
            process.kill()


def test_a_unix_socket_admits_allowed_users_only(tmp_path: Path) -> None:
    where = tmp_path / "here.sock"
    with served(unix_socket=where) as server:
        connection = PeerConnection(UnixAddress(str(where)), b"", 5.0)
        assert connection.exists(objects(range(2)).keys) == [False, False]
        connection.close()
        server._uids = frozenset({NOBODY})
        with pytest.raises(PeerError, match="does not serve this user"):
            PeerConnection(UnixAddress(str(where)), b"", 5.0)
    assert not where.exists()
    where.write_text("a file")
    with pytest.raises(OSError, match="is not a socket"), served(unix_socket=where):
        pass
    assert where.read_text() == "a file"
    with pytest.raises(ValueError, match="give the path of a socket"):
        PeerConfig(allowed_uids=(1001,))


@pytest.mark.parametrize(("mode", "said"), [(0o644, "mode 644"), (0o620, "mode 620"), (0o604, "chmod 600")])
def test_a_secret_file_readable_by_others_is_refused(tmp_path: Path, mode: int, said: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(mode)
    with pytest.raises(ValueError, match=said):
        read_secret(secret)
    secret.chmod(0o600)
    assert read_secret(secret) == SECRET
    secret.write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes: use 16 to 4096"):
        read_secret(secret)


def test_a_state_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "kvloom").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="cannot store a secret"):
        default_secret(create=True)
    (tmp_path / "kvloom").unlink()
    first = default_secret(create=True)
    assert default_secret(create=True) == first
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ValueError, match="belongs to user"):
        default_secret()


# --- what a message may do


@pytest.mark.parametrize(
    ("page", "run"), [(32 * PAGE, RUN), (4 * PAGE, 4 * PAGE), (PAGE // 2, RUN), (PAGE, 2 * RUN)]
)
@pytest.mark.parametrize("verb", [Verb.READ, Verb.ACQUIRE])
def test_a_read_with_another_page_size_is_a_layout_miss(verb: Verb, page: int, run: int) -> None:
    with served(64 * MIB, 2 * MIB) as server:
        filled_by_peer(server, range(2))
        with client(server) as other:
            answer = other._ask(asked(verb, range(2), page, run, 0, page if verb == Verb.READ else 0))
            assert answer.payload[:2] == bytes([Outcome.LAYOUT] * 2)
            assert len(answer.payload) == (2 if verb == Verb.READ else 2 + 16)
            connected = other._channel._stream.socket
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 200_000))
            with pytest.raises(BlockingIOError):  # no byte of a page is sent
                connected.recv(1)
        tier = open_peer(server.address, SECRET)
        assert get(tier, range(2)).ok.all()
        tier.close()


def test_a_wrong_run_size_stores_no_checksums() -> None:
    with served() as server:
        assert put(server._tier, range(3)).ok.all()  # by the server itself: without checksums so far
        with client(server) as other:
            other._ask(asked(Verb.ACQUIRE, range(3), PAGE, PAGE))
        tier = open_peer(server.address, SECRET, "connection")
        assert get(tier, range(3)).ok.all()
        tier.close()


def test_a_stored_page_is_neither_overwritten_nor_dropped_by_others() -> None:
    with served() as server:
        owner = open_peer(server.address, SECRET)
        assert put(owner, range(4)).ok.all()
        with client(server) as other:
            answer = other._ask(asked(Verb.RESERVE, range(4)))
            assert answer.payload[:4] == bytes([Outcome.OK] * 4), "stored already: no page to write to"
            assert other.remove(objects(range(4)).keys) == 0
        assert get(owner, range(4)).ok.all()
        at = int(server._tier._slots.offset[server._tier.index.entries[objects([1]).keys[0]]])
        server._tier.arena[at] ^= 1
        with client(server) as other:
            assert other.remove(objects(range(4)).keys) == 1, "any client may drop a damaged page"
        assert owner.lookup(objects(range(4))).tolist() == [True, False, True, True]
        assert owner.drop(objects(range(4))) == 3
        owner.close()


def test_a_reserved_page_never_exposes_bytes_of_an_evicted_page() -> None:
    with served() as server:
        filled_by_peer(server, range(64))  # all of the tier
        with client(server) as other:
            lease = other._ask(asked(Verb.RESERVE, range(100, 104)))
            assert lease.payload[:4] == bytes([Outcome.PENDING] * 4)
            other._ask(Message(Verb.COMMIT, a=lease.a, b=1, payload=bytes(4 * 8 * PAGE // RUN)))
            answer = other._ask(asked(Verb.READ, range(100, 104), a=0, b=PAGE))
            assert answer.payload[:4] == bytes([Outcome.OK] * 4)
            assert not any(other._channel.receive_bytes(4 * PAGE))


def test_reserved_pages_that_are_never_filled_do_not_evict_all_others() -> None:
    with served(16 * MIB, MIB) as server:
        filled_by_peer(server, range(200))
        with contextlib.ExitStack() as stack:
            results: list[int] = []
            for first in range(1000, 2000, 100):
                connection = stack.enter_context(client(server))
                answer = connection._ask(asked(Verb.RESERVE, range(first, first + 100)))
                results += answer.payload[:100]
            assert results.count(Outcome.PENDING) == 8 * MIB // PAGE, "half of the tier"
            assert results.count(Outcome.BUSY) == 1000 - 8 * MIB // PAGE
            assert server._tier.lookup(objects(range(200))).sum() >= 100
        assert comes(lambda: server._tier.stats().bytes < 9 * MIB)


def test_leases_and_leased_bytes_of_a_connection_are_bounded() -> None:
    with served(16 * MIB, MIB) as server:
        filled_by_peer(server, range(200))
        with client(server) as other:
            held: list[int] = []
            for first in range(0, 200, 50):
                held += other._ask(asked(Verb.ACQUIRE, range(first, first + 50))).payload[:50]
            assert held.count(Outcome.OK) == 2 * MIB // PAGE, "an eighth of the tier"
            with pytest.raises(PeerError, match="has 4 leases, the limit is 4: release some"):
                other._ask(asked(Verb.ACQUIRE, range(1)))
        with (
            client(server) as other,
            pytest.raises(PeerError, match="9000 objects in leases of one connection"),
        ):
            other._ask(asked(Verb.ACQUIRE, range(9000)))


def test_an_expired_lease_ends_its_connection() -> None:
    with served(lease_seconds=1.5) as server, client(server) as other:
        other._ask(asked(Verb.RESERVE, range(4)))
        assert server._tier.stats().bytes == 4 * PAGE
        assert comes(lambda: server._tier.stats().bytes == 0)
        with pytest.raises((OSError, PeerError)):
            other.exists(objects(range(1)).keys)
        filled_by_peer(server, range(4))  # a client that releases in time continues
        tier = open_peer(server.address, SECRET)
        time.sleep(2.5)
        assert get(tier, range(4)).ok.all(), "idle, without a lease, is no reason to end"
        tier.close()


@pytest.mark.parametrize(("page", "run"), [(64, 64), (PAGE, 1)])
def test_very_small_pages_are_refused(page: int, run: int) -> None:
    with served() as server, client(server) as other, pytest.raises(PeerError, match="too small for a peer"):
        other._ask(asked(Verb.RESERVE, range(1), page, run))


def test_a_message_modified_in_transit_is_refused() -> None:
    with served() as server:
        for change in (b"x", b""):  # another payload; the same message a second time
            channel = Channel(socket.create_connection(server.address, 5), 5)
            client_handshake(channel, SECRET)
            sent: list[bytes] = []
            push, channel.send_bytes = channel.send_bytes, lambda pieces, sent=sent: sent.extend(pieces)  # type: ignore[method-assign, misc, assignment]
            channel.send(Message(Verb.LOOKUP, 1, 1, 1, payload=objects([1]).keys[0]))
            message = sent[0]
            if change:
                push([message[:60] + bytes([message[60] ^ 1]) + message[61:]])
            else:
                push([message])
                assert channel.receive().verb == Verb.LOOKUP
                push([message])
            with pytest.raises(PeerError, match="modified in transit"):
                channel.receive()
            channel.close()


def test_an_old_client_receives_the_protocol_version() -> None:
    with served() as server, socket.create_connection(server.address, 5) as old:
        hello = old.recv(40, socket.MSG_WAITALL)
        assert struct.unpack("<6sH32s", hello)[:2] == (b"KVPEER", WIRE_VERSION)
        assert WIRE_VERSION > 3, "a client of version 3 stops here: it reports both versions"


# --- how many may connect


def test_idle_unauthenticated_connections_do_not_block_clients() -> None:
    with served(handshake_seconds=2.0) as server:
        first = open_peer(server.address, SECRET)
        strangers = [socket.create_connection(server.address, 5) for _ in range(150)]
        try:
            for _ in range(3):
                tier = open_peer(server.address, SECRET)
                assert put(tier, range(4)).ok.all()
                tier.close()
            assert get(first, range(4)).ok.all(), "an admitted connection stays"
            assert comes(lambda: server.refused >= 150)
            assert comes(lambda: not server._clients._pending)
        finally:
            for connected in strangers:
                connected.close()
        first.close()


def test_a_new_connection_replaces_an_idle_one_but_not_a_busy_one() -> None:
    with served(max_connections=2, idle_seconds=0.2) as server, client(server) as busy:
        busy._ask(asked(Verb.RESERVE, range(1)))
        time.sleep(0.4)
        with pytest.raises(PeerError, match="reached its limit of connections"):
            PeerConnection(server.address, SECRET, 5.0)
        assert busy.exists(objects(range(1)).keys) == [False]
        busy._channel.send(Message(Verb.RELEASE, a=1))
        assert busy.exists(objects(range(1)).keys) == [False]
        time.sleep(0.4)
        with client(server) as second:
            assert second.exists(objects(range(1)).keys) == [False]
            with pytest.raises(ConnectionError):
                busy.exists(objects(range(1)).keys)


# --- shared memory


def test_no_peer_changes_the_size_of_shared_memory() -> None:
    memory = SharedMemory(MIB)
    with Path(memory.path).open("r+b") as file:
        for size in (0, 4096, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(file.fileno(), size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.buffer[MIB - 1] = 7


def test_memory_without_size_seals_is_not_mapped() -> None:
    token = "0123456789abcdef" * 2
    fd = os.memfd_create(f"kvloom-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, MIB)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        assert map_shared_memory(path, token, MIB) is None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapped = map_shared_memory(path, token, MIB)
        assert mapped is not None
        assert int(np.asarray(mapped[:10]).sum()) == 0
    finally:
        os.close(fd)


def test_a_link_in_place_of_the_socket_keeps_the_mode_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who may rename files in the directory replaces the socket before its mode is set."""
    victim = tmp_path / "victim"
    victim.touch(mode=0o600)

    class Replaced(socket.socket):
        def bind(self, address: Any) -> None:
            super().bind(address)
            Path(address).unlink()
            Path(address).symlink_to(victim)

    monkeypatch.setattr(socket, "socket", Replaced)
    with pytest.raises(OSError, match="replaced the socket"):
        listen_unix(tmp_path / "sock", 0o666)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


# --- servers that lie


@contextlib.contextmanager
def lying(result: int) -> Iterator[tuple[str, int]]:
    """A server with the secret that replies to every read and write with this result for each page."""
    replies: dict[Verb, Callable[[Message], Message]] = {
        Verb.ABOUT: lambda got: Message(Verb.ABOUT, a=MIB, b=16 * MIB, payload=b'{"lease_bytes": 1048576}'),
        Verb.USAGE: lambda got: Message(Verb.USAGE, payload=bytes(24)),
    }

    def serve(connected: socket.socket) -> None:
        channel = Channel(connected, 20.0)
        with contextlib.suppress(OSError, PeerError):
            server_handshake(channel, SECRET)
            while True:
                got = channel.receive(wait=True)
                every = Message(got.verb, got.count, payload=bytes([result]) * got.count)
                channel.send(replies.get(got.verb, lambda _, every=every: every)(got))
        channel.close()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = listening.accept()
                threading.Thread(target=serve, args=(connected,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[:2]
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("result", [Outcome.PENDING, 13, 255])
def test_an_invalid_result_of_a_read_is_a_failure(result: int) -> None:
    with lying(result) as address:
        tier = open_peer(address, SECRET, "connection")
        transfer = tier.read(objects(range(2)), Ranges(np.zeros(2 * PAGE, np.uint8), np.arange(2) * PAGE))
        assert transfer.wait(20)
        assert transfer.failed
        assert transfer.results.tolist() == [Outcome.FAILED] * 2
        assert transfer.wait_released(20)
        tier.close()
