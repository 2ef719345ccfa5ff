"""Tiers in the host memory of another process, on this or another host.

peer_tier.py       the client: a tier over a PeerServer
server.py          PeerServer: serves a host tier
protocol.py        messages, handshake, authentication
connections.py     admission and limits of connections
unix_socket.py     Unix sockets between users of one host
secret.py          the shared secret and its file
tls.py             TLS with a certificate that the handshake checks
nixl_arena.py      access to the arena by NIXL
share_command.py   `kvloom share`
"""

from .nixl_arena import NixlArena
from .peer_tier import PeerConnection, TransferMethod, open_peer
from .secret import read_secret
from .server import PeerConfig, PeerServer, UseTLS
from .unix_socket import UnixAddress

__all__ = [
    "NixlArena",
    "PeerConfig",
    "PeerConnection",
    "PeerServer",
    "TransferMethod",
    "UnixAddress",
    "UseTLS",
    "open_peer",
    "read_secret",
]
