"""API keys: which tenant a key speaks for. Keys are kept as digests, and compared in constant time.

A file of keys is JSON, {"KEY": "tenant"} or {"KEY": {"tenant": "t", "quota": "2GiB", "weight": 1, "admin": true}}, or lines of
`KEY tenant [quota] [admin]` (# begins a comment). Several keys may name one tenant; then what they say of its quota must agree.
An admin's key may also see the whole cache.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from .errors import ApiError, invalid_key
from .messages import TenantRules

__all__ = ["Keys", "read_keys"]

SHORTEST = 8
Size = Callable[[str], int]
"""Reads a size like 2GiB; raises ValueError."""
_Row = tuple[str, str, TenantRules, bool]


class Keys:
    """Keys by their SHA-256; none means that nobody is asked for one."""

    def __init__(self, keys: dict[str, TenantRules], admins: Collection[str] = ()) -> None:
        self._digests = [(_digest(key.encode()), rules.name, key in admins) for key, rules in keys.items()]
        self.tenants = tuple({rules.name: rules for rules in keys.values()}.values())

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: str | None) -> str:
        """The tenant that a request's Authorization header speaks for. Raises ApiError 401."""
        return self._found(authorization)[0]

    def check_admin(self, authorization: str | None) -> None:
        """Raises ApiError where a request's Authorization header speaks for no admin: 401 without a key, else 403."""
        if not self._found(authorization)[1]:
            raise ApiError(
                403,
                "this shows what all tenants do, and the key is no admin's: a line of --api-keys that ends in `admin` "
                'makes one, or "admin": true',
                code="not_admin",
            )

    def _found(self, authorization: str | None) -> tuple[str, bool]:
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        digest = _digest(given.encode())
        found = None
        for known, name, admin in self._digests:  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = name, admin
        if found is None:
            raise invalid_key(bool(given))
        return found


def read_keys(path: str, size: Size) -> Keys:
    """The keys of a file, whose quotas `size` reads. Raises ValueError that names the line or key, never the key itself."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a file of text (UTF-8)") from None
    rows = _from_json(text, path, size) if text.lstrip().startswith("{") else _from_lines(text, path, size)
    keys: dict[str, TenantRules] = {}
    tenants: dict[str, TenantRules] = {}
    admins: set[str] = set()
    for where, key, rules, admin in rows:
        if len(key) < SHORTEST:
            raise ValueError(f"{path}, {where}: a key needs at least {SHORTEST} characters")
        if key in keys:
            raise ValueError(f"{path}, {where}: this key was given before")
        if not rules.name:
            raise ValueError(f"{path}, {where}: a tenant needs a name")
        if tenants.setdefault(rules.name, rules) != rules:
            raise ValueError(
                f"{path}, {where}: tenant {rules.name!r} was given with another quota or weight before"
            )
        keys[key] = rules
        if admin:
            admins.add(key)
    if not keys:
        raise ValueError(f"{path} holds no keys")
    return Keys(keys, admins)


def _from_lines(text: str, path: str, size: Size) -> list[_Row]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        admin = len(words) > 2 and words[-1] == "admin"
        words = words[:-1] if admin else words
        if len(words) not in (2, 3):
            raise ValueError(f"{path}, line {number}: a line is `KEY tenant [quota] [admin]`")
        quota = _size(words[2], f"{path}, line {number}", size) if len(words) == 3 else None
        rows.append((f"line {number}", words[0], TenantRules(words[1], quota), admin))
    return rows


def _from_json(text: str, path: str, size: Size) -> list[_Row]:
    try:
        found = msgspec.json.decode(text, type=dict[str, str | dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    rows = []
    for number, (key, value) in enumerate(found.items(), 1):
        where = f"key {number}"
        told: dict[str, Any] = {"tenant": value} if isinstance(value, str) else value
        unknown = set(told) - {"tenant", "quota", "weight", "admin"}
        name, quota, weight = told.get("tenant"), told.get("quota"), told.get("weight", 0.0)
        admin = told.get("admin", False)
        plain = isinstance(name, str) and isinstance(weight, int | float) and isinstance(admin, bool)
        if unknown or not plain or weight < 0:
            raise ValueError(
                f"{path}, {where}: a key names a tenant, or has tenant, quota (bytes), weight (0 or more) and admin (true or "
                "false)"
            )
        most = None if quota is None else _size(str(quota), f"{path}, {where}", size)
        rows.append((where, key, TenantRules(str(name), most, float(weight)), admin))
    return rows


def _size(text: str, where: str, size: Size) -> int:
    try:
        return size(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
