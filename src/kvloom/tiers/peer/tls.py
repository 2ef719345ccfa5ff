"""TLS between peers. The server makes a new certificate when it starts, and no authority signs it. The handshake of
protocol.py then proves that both sides have the shared secret, and that the client got the certificate of this server.
A connection through a machine with another certificate is refused.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import ssl
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

__all__ = ["ServerTLS", "client_context", "make_server_tls"]

_VALID_DAYS = 3650  # clients do not check the dates, because the certificate ends with its process


@dataclass(frozen=True, slots=True)
class ServerTLS:
    """The TLS settings of a server, and the SHA-256 digest of its certificate."""

    context: ssl.SSLContext
    digest: bytes


def make_server_tls() -> ServerTLS:
    """Make a key and a certificate, which exist only in this process. Raises ValueError if the package `cryptography`
    is not installed."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ValueError(
            "TLS between peers needs the package cryptography: pip install 'kvloom[encryption]', or turn TLS off with "
            "`tls=off` in a network that you trust"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvloom peer")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=_VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # every connection proves the secret again
    fd, path = tempfile.mkstemp(prefix="kvloom-")  # mode 0600; `ssl` reads keys from files only
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
    return ServerTLS(context, sha256(certificate.public_bytes(serialization.Encoding.DER)).digest())


def client_context() -> ssl.SSLContext:
    """Return the TLS settings of a client. They accept every certificate, because the handshake of protocol.py checks
    it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
