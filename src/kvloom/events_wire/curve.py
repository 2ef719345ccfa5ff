"""Encrypts and authenticates the event sockets with ZMQ's CURVE.

A cluster has one key file: `kvloom serve` and `kvloom route` read it with `--kv-events-key FILE`. The file is a
certificate of pyzmq, with a public and a secret key. All publishers and subscribers use this pair of keys. A publisher
accepts only subscribers with this public key. CURVE checks that a subscriber also has the secret key. A subscriber with
another key, or without a key, gets no event and no replay.
"""

from __future__ import annotations

import hmac
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CurveKey"]


@dataclass(frozen=True, slots=True)
class CurveKey:
    """The pair of keys of a cluster's event sockets, in the encoding Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def read(cls, path: str | Path) -> CurveKey:
        """Read a file that `zmq.auth.create_certificates` wrote. Raises ValueError if the file cannot be read or has no
        secret key. Also raises ValueError if other users may access the file, or if its group may write it."""
        import zmq.auth

        try:
            mode = Path(path).stat().st_mode
            public, secret = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"the key file {path} of events cannot be read: {error}") from None
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ValueError(
                f"the key file {path} of events has mode {stat.S_IMODE(mode):o}, so other users may have read it: "
                "create new keys, and run chmod 600 on the file"
            )
        if secret is None:
            raise ValueError(f"the key file {path} of events has no secret key: use the file *.key_secret")
        return cls(public, secret)

    def open_authenticator(self, context: Any) -> Any:
        """Start a thread that accepts only subscribers with this key, and return its authenticator. The thread serves
        all server sockets of `context`. The caller must stop the authenticator before it ends the context."""
        from zmq.auth.thread import ThreadAuthenticator

        found = ThreadAuthenticator(context)
        found.start()
        found.configure_curve_callback(credentials_provider=self)
        return found

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a subscriber with the public key `key` may connect. The thread of the authenticator calls this
        method."""
        return hmac.compare_digest(key, self.public)

    def protect_server(self, socket: Any) -> None:
        """Make a publisher's socket require CURVE. Call this method before the socket is bound."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_server = True

    def protect_client(self, socket: Any) -> None:
        """Make a subscriber's socket use CURVE. Call this method before the socket is connected."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.public
