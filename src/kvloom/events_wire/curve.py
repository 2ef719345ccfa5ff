"""Encrypts and authenticates the event sockets with ZMQ's CURVE.

One key file belongs to a cluster: `--kv-events-key FILE` of `kvloom serve` and of `kvloom route`. It has the form of
pyzmq's certificates, with a public and a secret key. Publisher and subscriber both use this pair of keys. A publisher
accepts only subscribers with this public key, and CURVE lets them prove that they have its secret key. A subscriber
with another key, or without a key, gets no event and no replay.
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
        """Read a file that `zmq.auth.create_certificates` wrote. Raises ValueError if it has no secret key, cannot be
        read, or is readable by every user."""
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
        """Start the thread that accepts only subscribers with this key. All server sockets of the context use it. The
        caller stops it before it ends the context."""
        from zmq.auth.thread import ThreadAuthenticator

        found = ThreadAuthenticator(context)
        found.start()
        found.configure_curve_callback(credentials_provider=self)
        return found

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a subscriber may connect. pyzmq calls this in its thread."""
        return hmac.compare_digest(key, self.public)

    def protect_server(self, socket: Any) -> None:
        """Let a publisher's socket require CURVE. Call it before the socket is bound."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_server = True

    def protect_client(self, socket: Any) -> None:
        """Let a subscriber's socket use CURVE. Call it before the socket is connected."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.public
