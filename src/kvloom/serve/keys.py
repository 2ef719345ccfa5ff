"""API keys: which tenant a key speaks for. Keys are kept as digests, and compared in constant time.

A file of keys is JSON, {"KEY": "tenant"} or {"KEY": {"tenant": "t", "quota": "2GiB", "weight": 1}}, or lines of
`KEY tenant [quota]` (# begins a comment). Several keys may name one tenant; then what they say of its quota must agree. A key
with "admin": true (in lines, the last word `admin`) is an operator's: it sees what is told of every tenant.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from .errors import invalid_key
from .messages import TenantRules

__all__ = ["Keys", "read_keys"]

SHORTEST = 8
Size = Callable[[str], int]
"""Reads a size like 2GiB; raises ValueError."""
_KeyRow = tuple[str, str, TenantRules, bool]
"""Where a key stands, the key, whom it is for, and whether it is an operator's."""


class Keys:
    """Keys by their SHA-256; none means that nobody is asked for one."""

    def __init__(self, keys: dict[str, TenantRules], admins: Collection[str] = ()) -> None:
        self._admins = [_digest(key.encode()) for key in admins]
        self._digests = [(_digest(key.encode()), rules.name) for key, rules in keys.items()]
        self.tenants = tuple({rules.name: rules for rules in keys.values()}.values())

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: str | None) -> str:
        """The tenant that a request's Authorization header speaks for. Raises ApiError 401."""
        given = _given(authorization)
        digest = _digest(given.encode())
        found = None
        for known, name in self._digests:  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            raise invalid_key(bool(given))
        return found

    def admin(self, authorization: str | None) -> bool:
        """Whether a request's Authorization header has an operator's key."""
        digest = _digest(_given(authorization).encode())
        return sum(hmac.compare_digest(known, digest) for known in self._admins) > 0  # all of them, as above


def _given(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def read_keys(path: str, size: Size) -> Keys:
    """The keys of a file, whose quotas `size` reads. Raises ValueError that names the line or key, never the key itself."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a file of text (UTF-8)") from None
    rows = _from_json(text, path, size) if text.lstrip().startswith("{") else _from_lines(text, path, size)
    keys: dict[str, TenantRules] = {}
    tenants: dict[str, TenantRules] = {}
    admins = [key for _, key, _, admin in rows if admin]
    for where, key, rules, _ in rows:
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
    if not keys:
        raise ValueError(f"{path} holds no keys")
    return Keys(keys, admins)


def _from_lines(text: str, path: str, size: Size) -> list[_KeyRow]:
    rows: list[_KeyRow] = []
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


def _from_json(text: str, path: str, size: Size) -> list[_KeyRow]:
    try:
        found = msgspec.json.decode(text, type=dict[str, str | dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    rows: list[_KeyRow] = []
    for number, (key, value) in enumerate(found.items(), 1):
        where = f"key {number}"
        told = {"tenant": value} if isinstance(value, str) else value
        unknown = set(told) - {"tenant", "quota", "weight", "admin"}
        name, quota, weight = told.get("tenant"), told.get("quota"), told.get("weight", 0.0)
        wrong = not isinstance(name, str) or not isinstance(weight, int | float) or weight < 0
        if unknown or wrong or not isinstance(told.get("admin", False), bool):
            raise ValueError(
                f"{path}, {where}: a key names a tenant, or has tenant, quota (bytes), weight (0 or more) and admin (true)"
            )
        most = None if quota is None else _size(str(quota), f"{path}, {where}", size)
        rows.append((where, key, TenantRules(str(name), most, float(weight)), bool(told.get("admin"))))
    return rows


def _size(text: str, where: str, size: Size) -> int:
    try:
        return size(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
