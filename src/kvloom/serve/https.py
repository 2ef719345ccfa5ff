"""Certificates: the options with which `kvloom serve` and `kvloom route` serve HTTPS, and with which a router calls its
workers.
"""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path
from typing import Any

__all__ = ["client_context", "https_arguments", "https_settings"]


def https_arguments(parser: argparse._ActionsContainer) -> None:
    add = parser.add_argument
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate chain (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="private key of the certificate (default: in the same file)")
    add("--ssl-ca-certs", metavar="FILE", help="require client certificates of these authorities (PEM)")


def https_settings(certfile: str | None, keyfile: str | None, ca_certs: str | None) -> dict[str, Any]:
    """Return the settings of uvicorn for the options of `https_arguments`. Raises ValueError for files that TLS cannot
    use."""
    if certfile is None:
        if keyfile or ca_certs:
            raise ValueError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return {}
    _check_files("ssl", certfile, keyfile, ca_certs)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load("--ssl-certfile", context, certfile, keyfile)
    if ca_certs is not None:
        _load_authorities("--ssl-ca-certs", context, ca_certs)
    return {
        "ssl_certfile": certfile,
        "ssl_keyfile": keyfile,
        "ssl_ca_certs": ca_certs,
        "ssl_cert_reqs": ssl.CERT_NONE if ca_certs is None else ssl.CERT_REQUIRED,
    }


def client_context(
    ca_certs: str | None, certfile: str | None = None, keyfile: str | None = None, prefix: str = "worker"
) -> ssl.SSLContext:
    """Return the TLS settings of a client. The client trusts the authorities in the file `ca_certs`, or those of
    the system if `ca_certs` is None. If `certfile` is given, the client presents this certificate. `prefix` is
    the first word of the option names in error messages, such as --worker-certfile. Raises ValueError for files
    that TLS cannot use."""
    if keyfile and certfile is None:
        raise ValueError(f"--{prefix}-keyfile needs --{prefix}-certfile")
    _check_files(prefix, certfile, keyfile, ca_certs)
    context = ssl.create_default_context() if ca_certs is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_certs is not None:
        _load_authorities(f"--{prefix}-ca-certs", context, ca_certs)
    if certfile is not None:
        _load(f"--{prefix}-certfile", context, certfile, keyfile)
    return context


def _check_files(prefix: str, certfile: str | None, keyfile: str | None, ca_certs: str | None) -> None:
    for option, path in (("certfile", certfile), ("keyfile", keyfile), ("ca-certs", ca_certs)):
        if path is not None and not Path(path).is_file():
            raise ValueError(f"--{prefix}-{option} {path}: there is no such file")


def _load(option: str, context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    try:
        context.load_cert_chain(certfile, keyfile, lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ValueError(
            f"{option} {certfile} cannot be used ({error}): give a certificate and its key without password, in PEM format"
        ) from None


def _load_authorities(option: str, context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option} {path} cannot be used ({error}): give certificates in PEM format"
        ) from None
