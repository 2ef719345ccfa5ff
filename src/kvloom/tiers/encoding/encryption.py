"""Encryption at rest: a key for every tenant, from a file, and AES-256-GCM of single runs.

    the file   {"acme": "64 hex digits", "*": "64 hex digits"}     "*": every other tenant's key is made from this one
    a page     key = BLAKE2b(tenant's key, salt of the page)       nonce = number of the run, so none is used twice

What was sealed with another key, or moved to another name, does not open. Knows no formats and no tiers.
"""

from __future__ import annotations

import json
import os
import stat
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

from kvloom.tiers.tier import TierError

__all__ = ["SALT_BYTES", "TAG_BYTES", "Keyring", "NoKeyError"]

SALT_BYTES = 16
TAG_BYTES = 16
_KEY_BYTES = 32
_OTHERS = "*"
_PERSON = b"kvloom.key"


class NoKeyError(LookupError):
    """A tenant has no key: nothing of it may be stored in the clear, and nothing can be opened."""


class Keyring:
    """Keys by tenant. Safe from any thread."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        wrong = [tenant for tenant, key in keys.items() if len(key) != _KEY_BYTES]
        if wrong or not keys:
            raise ValueError(f"keys have {_KEY_BYTES} bytes, and there is one at least; wrong for {wrong}")
        self._keys = dict(keys)
        try:
            aead = import_module("cryptography.hazmat.primitives.ciphers.aead")
            self._invalid: type[Exception] = import_module("cryptography.exceptions").InvalidTag
        except ImportError as error:
            raise TierError(
                "the package 'cryptography' is missing: pip install 'kvloom[encryption]'"
            ) from error
        self._cipher: Any = aead.AESGCM

    @classmethod
    def read(cls, path: Path | str) -> Keyring:
        """Keys from a file that its owner alone may read. A TierError says what is wrong with it, never what is in it."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read()
        except OSError as error:
            raise TierError(f"the keys of {path} cannot be read: {error.strerror}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TierError(f"others may read {path}: chmod 600 it, and consider its keys known")
        try:
            told = json.loads(text)
            return cls({str(tenant): bytes.fromhex(key) for tenant, key in told.items()})
        except (ValueError, TypeError, AttributeError):
            raise TierError(
                f'{path} has no keys: write {{"TENANT": "{2 * _KEY_BYTES} hex digits", "*": "…"}}'
            ) from None

    def page_cipher(self, tenant: str, salt: bytes) -> Any:
        """The cipher of one page. NoKeyError where the tenant has none."""
        key = self._keys.get(tenant)
        if key is None:
            others = self._keys.get(_OTHERS)
            if others is None:
                raise NoKeyError(f"tenant {tenant!r} has no key")
            key = blake2b(tenant.encode(), digest_size=_KEY_BYTES, key=others, person=_PERSON).digest()
        return self._cipher(blake2b(salt, digest_size=_KEY_BYTES, key=key, person=_PERSON).digest())

    @staticmethod
    def encrypt(cipher: Any, number: int, run: memoryview | bytes, context: bytes) -> bytes:
        """A run and its tag; `context` must be the same to open it."""
        sealed: bytes = cipher.encrypt(number.to_bytes(12, "little"), run, context)
        return sealed

    def decrypt(self, cipher: Any, number: int, sealed: memoryview, context: bytes) -> bytes | None:
        """The run, or None: another key, or not what was sealed."""
        try:
            run: bytes = cipher.decrypt(number.to_bytes(12, "little"), sealed, context)
        except (self._invalid, ValueError):
            return None
        return run
