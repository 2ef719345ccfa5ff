"""Encryption or authentication of single layer runs, and the keys under which a tier stores pages.

    key file     {"acme": "64 hex digits", "*": "64 hex digits"}    "*": derives the key of every other tenant
    page key     BLAKE2b(tenant's key, salt of the page)            nonce = number of the run, never reused
    stored key   BLAKE2b(tenant's key, the object's key)            cannot be derived without the tenant's key

A run is the bytes of one layer in a page. To seal a run is to encrypt or to authenticate it. `protect="encrypt"` is
AES-256-GCM. `protect="authenticate"` leaves the bytes readable and adds 16 bytes of HMAC-SHA-256. A
sealed run can be opened only with its tenant's key, at its position in the page, and in the
page whose key was used to seal it. This module does not depend on formats or tiers.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from kvloom.tiers.tier import KEY_BYTES, Objects, TierError

__all__ = [
    "SALT_BYTES",
    "TAG_BYTES",
    "Keyring",
    "NoKeyError",
    "PageCipher",
    "Protect",
    "check_protect",
    "read_keys",
]

SALT_BYTES = 16
TAG_BYTES = 16
Protect = Literal["encrypt", "authenticate"]
_KEY_BYTES = 32
_OTHERS = "*"
_PERSON, _PERSON_MAC, _PERSON_NAME = b"kvloom.key", b"kvloom.mac", b"kvloom.name"


class NoKeyError(LookupError):
    """Raised if a tenant has no key. Its pages are then not stored, because they would not be protected."""


class PageCipher(Protocol):
    """Seals and opens the layer runs of one page. To seal is to encrypt or to authenticate. A layer run can be
    opened only with the `context` with which it was sealed."""

    def encrypt(self, number: int, run: memoryview | bytes, context: bytes) -> bytes:
        """Seal layer run number `number` of the page. Return the sealed layer run, followed by its tag of TAG_BYTES
        bytes."""
        ...

    def decrypt(self, number: int, sealed: memoryview, context: bytes) -> memoryview | None:
        """Verify the layer run with the number `number`. Return the decrypted layer run without its tag. Return
        None if the tag does not match."""
        ...


class _Aes(PageCipher):
    """AES-256-GCM. Each page has its own key, so the number of a layer run is a unique nonce."""

    def __init__(self, cipher: Any, invalid: type[Exception]) -> None:
        self._cipher, self._invalid = cipher, invalid

    def encrypt(self, number: int, run: memoryview | bytes, context: bytes) -> bytes:
        sealed: bytes = self._cipher.encrypt(number.to_bytes(12, "little"), run, context)
        return sealed

    def decrypt(self, number: int, sealed: memoryview, context: bytes) -> memoryview | None:
        try:
            return memoryview(self._cipher.decrypt(number.to_bytes(12, "little"), sealed, context))
        except (self._invalid, ValueError):
            return None


class _Mac(PageCipher):
    """Authentication without encryption. A sealed layer run is the unchanged layer run, followed by 16 bytes of
    HMAC-SHA-256 over context, number and layer run."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _tag(self, number: int, run: memoryview | bytes, context: bytes) -> bytes:
        head = len(context).to_bytes(4, "little") + context + number.to_bytes(12, "little")
        mac = hmac.new(self._key, head, "sha256")
        mac.update(run)
        return mac.digest()[:TAG_BYTES]

    def encrypt(self, number: int, run: memoryview | bytes, context: bytes) -> bytes:
        return bytes(run) + self._tag(number, run, context)

    def decrypt(self, number: int, sealed: memoryview, context: bytes) -> memoryview | None:
        run, tag = sealed[:-TAG_BYTES], bytes(sealed[-TAG_BYTES:])
        return run if hmac.compare_digest(tag, self._tag(number, run, context)) else None


class Keyring:
    """Keys by tenant. Thread-safe."""

    def __init__(self, keys: dict[str, bytes], protect: Protect = "encrypt") -> None:
        wrong = [tenant for tenant, key in keys.items() if len(key) != _KEY_BYTES]
        if wrong or not keys:
            raise ValueError(
                f"a keyring needs at least one key, and keys of {_KEY_BYTES} bytes; wrong length for {wrong}"
            )
        self._keys, self.protect = dict(keys), protect
        self._aes: Any = None
        self._invalid: type[Exception] = ValueError
        try:
            self._aes = import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM
            self._invalid = import_module("cryptography.exceptions").InvalidTag
        except ImportError as error:
            if protect == "encrypt":
                raise TierError(
                    "the package 'cryptography' is missing: pip install 'kvloom[encryption]', "
                    "or use protect=authenticate"
                ) from error

    @classmethod
    def read(cls, path: Path | str, protect: Protect = "encrypt") -> Keyring:
        """Read keys from a file. Raises TierError if the file is invalid or other users may read it. The message
        never contains the content of the file.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read()
        except OSError as error:
            raise TierError(f"the key file {path} cannot be read: {error.strerror}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise TierError(f"other users may read {path}: run chmod 600 on it and replace its keys")
        try:
            content = json.loads(text)
            return cls({str(tenant): bytes.fromhex(key) for tenant, key in content.items()}, protect)
        except (ValueError, TypeError, AttributeError):
            raise TierError(
                f'{path} is not a key file: write {{"TENANT": "{2 * _KEY_BYTES} hex digits", "*": "…"}}'
            ) from None

    def page_cipher(self, tenant: str, salt: bytes, protect: Protect = "encrypt") -> PageCipher:
        """Return the cipher of one page. Its key is derived from the tenant's key and the `salt` of the page. Raises
        NoKeyError if the tenant has no key, and TierError if a package is missing."""
        key = self._tenant_key(tenant)
        if protect == "authenticate":
            return _Mac(_derive(salt, key, _PERSON_MAC))
        if self._aes is None:
            raise TierError("the package 'cryptography' is missing: pip install 'kvloom[encryption]'")
        return _Aes(self._aes(_derive(salt, key, _PERSON)), self._invalid)

    def with_stored_keys(self, objects: Objects) -> Objects:
        """Return the objects with the keys under which a tier stores them. These keys are derived from
        `Objects.keys` and the tenant's encryption key. Raises NoKeyError if the tenant has no encryption key.
        """
        key = self._tenant_key(objects.tenant)
        keyed = blake2b(digest_size=KEY_BYTES, key=key, person=_PERSON_NAME)
        stored = []
        for plain in objects.keys:
            each = keyed.copy()
            each.update(plain)
            stored.append(each.digest())
        return objects.with_keys(stored)

    def _tenant_key(self, tenant: str) -> bytes:
        key = self._keys.get(tenant) if tenant != _OTHERS else None
        if key is None:
            others = self._keys.get(_OTHERS)
            if others is None:
                raise NoKeyError(f"tenant {tenant!r} has no key")
            key = _derive(tenant.encode(), others, _PERSON)
        return key


def _derive(text: bytes, key: bytes, person: bytes) -> bytes:
    return blake2b(text, digest_size=_KEY_BYTES, key=key, person=person).digest()


def read_keys(path: Path | str | None, protect: Protect | None) -> Keyring | None:
    """Return the keys of a tier, or None if `path` is None. Raises TierError if the file is unusable."""
    return None if path is None else Keyring.read(path, protect or "encrypt")


def check_protect(path: Path | str | None, protect: str | None) -> None:
    """Raises ValueError if `protect` is invalid or is set without a key file."""
    if path is not None and not str(path):
        raise ValueError("keys= has no file name: give keys=FILE, or omit it to store pages in the clear")
    if protect is not None and protect not in get_args(Protect):
        raise ValueError(f"protect={protect!r} is none of {', '.join(get_args(Protect))}")
    if protect is not None and path is None:
        raise ValueError(f"protect={protect} needs keys: give keys=FILE")
