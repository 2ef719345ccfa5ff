"""TLS between peers: the conformance suite, and machines between the peers that read, replace and downgrade."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest

from kvloom.tiers import HostConfig, HostTier, TierError
from kvloom.tiers.host.host_url import HostURL
from kvloom.tiers.peer import PeerConfig, PeerServer, UseTLS, open_peer
from kvloom.tiers.peer.tls import client_context, make_server_tls
from kvloom.tiers.remote import RemoteConfig
from kvloom.tiers.testing.conformance import PAGE, get, objects, put

from .test_peer_tier import PeerConformance

MIB = 1 << 20
SECRET = b"a secret of two peers"
HELLO_BYTES = 40

pytest.importorskip("cryptography", reason="TLS between peers needs kvloom[encryption]")


@contextlib.contextmanager
def served(tls: UseTLS) -> Iterator[tuple[HostTier, PeerServer]]:
    host = HostTier(HostConfig(4 * MIB, slab_bytes=256 << 10))
    server = PeerServer(host, PeerConfig(secret=SECRET, tls=tls, handshake_seconds=2))
    try:
        yield host, server
    finally:
        server.close()


class TestTLS(PeerConformance):
    shared = False
    tls: UseTLS = "on"


class Between:
    """A machine between two peers. `meet` gets the sockets of client and server, and returns what to forward."""

    def __init__(
        self,
        server: PeerServer,
        meet: Callable[[socket.socket, socket.socket], tuple[socket.socket, socket.socket]],
    ) -> None:
        self.seen = bytearray()
        self._target, self._meet = server.address, meet
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target, 5) as server:
            first, second = self._meet(client, server)
            while True:
                ready, _, _ = select.select([first, second], [], [], 20)
                if not ready:
                    return
                for one in ready:
                    data = one.recv(65536)
                    if not data:
                        return
                    self.seen += data
                    (second if one is first else first).sendall(data)


@contextlib.contextmanager
def between(
    server: PeerServer,
    meet: Callable[[socket.socket, socket.socket], tuple[socket.socket, socket.socket]],
) -> Iterator[Between]:
    machine = Between(server, meet)
    try:
        yield machine
    finally:
        machine.close()


@pytest.mark.parametrize("tls", ["on", "off"])
def test_a_reader_of_the_network_sees_pages_only_without_tls(tls: UseTLS) -> None:
    with served(tls) as (_, server), between(server, lambda client, peer: (client, peer)) as machine:
        tier = open_peer(machine.address, SECRET, "connection")
        assert put(tier, range(4)).ok.all()
        got = get(tier, range(4))
        assert got.ok.all()
        tier.close()
        page = bytes(server._tier.arena[:PAGE])
        assert len(set(page)) > 8
        assert (page in machine.seen) == (tls == "off")
        assert (objects([1]).keys[0] in machine.seen) == (tls == "off")


def test_a_machine_with_its_own_certificate_is_refused() -> None:
    tls = make_server_tls()

    def terminate(client: socket.socket, server: socket.socket) -> tuple[socket.socket, socket.socket]:
        """Forward the hello, then decrypt both connections."""
        client.sendall(server.recv(HELLO_BYTES, socket.MSG_WAITALL))
        return tls.context.wrap_socket(client, server_side=True), client_context().wrap_socket(server)

    with served("on") as (_, server), between(server, terminate) as machine:
        with pytest.raises(TierError, match="secret"):
            open_peer(machine.address, SECRET, "connection", RemoteConfig(1, timeout=5))
        open_peer(server.address, SECRET, "connection").close()


def test_tls_cannot_be_removed_on_the_way() -> None:
    def strip(client: socket.socket, server: socket.socket) -> tuple[socket.socket, socket.socket]:
        """Tell the client that the server uses no TLS, and encrypt towards the server."""
        hello = bytearray(server.recv(HELLO_BYTES, socket.MSG_WAITALL))
        assert hello[7] & 0x80
        hello[7] &= 0x7F
        client.sendall(hello)
        return client, client_context().wrap_socket(server)

    with (
        served("on") as (_, server),
        between(server, strip) as machine,
        pytest.raises(TierError, match="secret"),
    ):
        open_peer(machine.address, SECRET, "connection", RemoteConfig(1, timeout=5))


def test_a_client_with_another_secret_is_refused() -> None:
    with served("on") as (_, server), pytest.raises(TierError, match="rejected the secret"):
        open_peer(server.address, b"some other secret", "connection")


def test_a_silent_client_and_one_without_tls_do_not_block_others() -> None:
    with served("on") as (_, server):
        silent = [socket.create_connection(server.address, 5) for _ in range(8)]
        silent[0].sendall(b"not TLS at all" * 10)
        tier = open_peer(server.address, SECRET, "connection")
        assert put(tier, range(2)).ok.all()
        for one in silent:
            one.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                while one.recv(4096):
                    pass  # the server closes it at the deadline of its handshake
            one.close()
        assert get(tier, range(2)).ok.all()
        tier.close()


def test_only_loopback_is_plain_by_default() -> None:
    assert PeerConfig("0.0.0.0", secret=SECRET).uses_tls
    assert not PeerConfig("127.0.0.1", secret=SECRET).uses_tls
    assert not PeerConfig("10.0.0.1", secret=SECRET, tls="off").uses_tls
    with pytest.raises(ValueError, match="tls='maybe' is none of auto, on, off"):
        PeerConfig(tls="maybe")  # type: ignore[arg-type]


def test_the_url_of_shared_host_memory_has_the_option() -> None:
    assert HostURL.parse("host:1GiB?share=7373&tls=on").tls == "on"
    assert HostURL.parse("host:1GiB?share=7373").tls == "auto"
    with pytest.raises(ValueError, match="tls='yes' is none of auto, on, off"):
        HostURL.parse("host:1GiB?share=7373&tls=yes")
    with pytest.raises(ValueError, match="tls= has no effect without share="):
        HostURL.parse("host:1GiB?tls=on")


def test_the_certificate_is_new_and_uses_tls_1_3() -> None:
    first, second = make_server_tls(), make_server_tls()
    assert first.digest != second.digest
    assert first.context.minimum_version == ssl.TLSVersion.TLSv1_3
