"""API keys and their tenants. Keys are stored as SHA-256 digests and compared in constant time.

A key file has one of two forms:

    JSON     {"KEY": "tenant"} or {"KEY": {"tenant": "t", "quota": "2GiB", "weight": 1, "public": true, "admin": true}}
    lines    KEY tenant [quota [weight]] [max_…=N] [public] [admin]      # starts a comment; - means no quota

- All keys of one tenant must have the same quota, weight and caps.
- The default weight of a tenant is 1. If no key sets a weight, all tenants have equal shares of the pool, and only half
  of each share is protected from eviction by other tenants (`core.Tenant.firm`).
- `max_answers`, `max_open`, `max_ttl` and `max_priority` set the tenant's `Caps`.
- `public` allows the tenant to mark public prefixes, which other tenants share.
- An admin key can read the data of all tenants.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import stat
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvloom.arguments import parse_size
from kvloom.core import PUBLIC_TENANT
from kvloom.serve.errors import invalid_key
from kvloom.serve.worker import TenantConfig

from .limits import Caps

__all__ = ["OWN_TENANT", "ApiKeys", "permission_warning", "read_keys"]

MIN_KEY_CHARACTERS = 8
OWN_TENANT = "default"
"""Tenant of the keys that are given on the command line. These keys are admin keys."""
OBJECTIVES = {"slo_ttft": float, "slo_tbt": float}
"""Objectives that a key can set for its tenant, in milliseconds."""
CAPS = {"max_answers": int, "max_open": int, "max_ttl": float, "max_priority": int}
"""Caps that a key can set for its tenant, and their types."""
KeyRow = tuple[str, str, str, int | None, float | None, dict[str, Any], bool]
"""One key as it was read: location in the file, key, tenant, quota, weight, caps, and whether it is an admin key."""


class ApiKeys:
    """Finds the tenant of an API key. Stores only digests of keys.

    `bool(keys)` is False if no keys are configured. The server then does not authenticate.
    """

    def __init__(
        self,
        keys: dict[str, TenantConfig],
        admins: Collection[str] = (),
        caps: Mapping[str, Caps] | None = None,
        default: Caps | None = None,
    ) -> None:
        self._caps, self._default = caps or {}, default or Caps()
        self._admins = [_digest(key.encode()) for key in admins]
        self._digests = [(_digest(key.encode()), rules.name) for key, rules in keys.items()]
        self.tenants = tuple({rules.name: rules for rules in keys.values()}.values())

    def __bool__(self) -> bool:
        return bool(self._digests)

    def authenticate(self, authorization: str | None) -> str:
        """Return the tenant of a request's Authorization header. Raises ApiError 401 for an unknown key."""
        given = _bearer_key(authorization)
        digest = _digest(given.encode())
        found = None
        for known, name in self._digests:  # compare all: constant time
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            raise invalid_key(bool(given))
        return found

    def caps(self, tenant: str) -> Caps:
        """Return the limits of a tenant."""
        return self._caps.get(tenant, self._default)

    def is_admin(self, authorization: str | None) -> bool:
        """Whether a request's Authorization header has an admin key."""
        digest = _digest(_bearer_key(authorization).encode())
        return (
            sum(hmac.compare_digest(known, digest) for known in self._admins) > 0
        )  # compare all: constant time


def _bearer_key(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def read_keys(path: str | None, default: Caps | None = None, own: Collection[str] = ()) -> ApiKeys:
    """Read a key file, and add the operator's keys in `own`, which are admin keys. If a key does not set a cap, the cap
    in `default` applies. Raises ValueError for an invalid file. The message contains the line or position, but never
    the key.
    """
    default = default or Caps()
    rows = [] if path is None else _read_file(path)
    path = path or "--api-key"
    for number, key in enumerate(dict.fromkeys(own), 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"--api-key, key {number}: a key must be printable ASCII without spaces")
        rows.append((f"key {number} of --api-key", key, OWN_TENANT, None, None, {}, True))
    keys: dict[str, TenantConfig] = {}
    tenants: dict[str, tuple[TenantConfig, Caps]] = {}
    is_firm = any(weight is not None for *_, weight, _, _ in rows)
    for where, key, name, quota, weight, caps, _ in rows:
        slo = [caps.pop(name, None) for name in OBJECTIVES]
        rules = TenantConfig(name, quota, 1.0 if weight is None else weight, is_firm, *slo)
        if len(key) < MIN_KEY_CHARACTERS:
            raise ValueError(f"{path}, {where}: a key must have at least {MIN_KEY_CHARACTERS} characters")
        if key in keys:
            raise ValueError(f"{path}, {where}: duplicate key")
        if not name:
            raise ValueError(f"{path}, {where}: the tenant's name is empty")
        if name == PUBLIC_TENANT:
            raise ValueError(f"{path}, {where}: the tenant's name {name!r} is reserved: choose another name")
        given = rules, replace(default, **caps)
        if tenants.setdefault(name, given) != given:
            raise ValueError(
                f"{path}, {where}: tenant {name!r} has a different quota, weight, slo_…, max_… or public in an earlier key"
            )
        keys[key] = rules
    if not keys:
        raise ValueError(f"{path} contains no keys")
    caps_of = {name: caps for name, (_, caps) in tenants.items()}
    return ApiKeys(keys, [key for _, key, *_, is_admin in rows if is_admin], caps_of, default)


def _read_file(path: str) -> list[KeyRow]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    return _from_json(text, path) if text.lstrip().startswith("{") else _from_lines(text, path)


def permission_warning(path: str) -> str | None:
    """Return a warning if other users of this machine can read or change a key file, else None."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return None
    return f"{path} contains API keys, but other users can access it (mode {mode:03o}): chmod 600 {path}"


def _from_lines(text: str, path: str) -> list[KeyRow]:
    rows: list[KeyRow] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"line {number}"
        is_admin = len(words) > 2 and words[-1] == "admin"
        words = words[:-1] if is_admin else words
        is_public = len(words) > 2 and words[-1] == "public"
        words = words[:-1] if is_public else words
        caps = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        words = words[:2] + [word for word in words[2:] if "=" not in word]
        if not 2 <= len(words) <= 4:
            raise ValueError(
                f"{path}, {where}: expected `KEY tenant [quota [weight]] [slo_…=MS] [max_…=N] [public] [admin]`"
            )
        key, name, quota, weight, *_ = (*words, "-", "-")
        most = None if quota == "-" else _size(quota, f"{path}, {where}")
        share = None if weight == "-" else _weight(weight, f"{path}, {where}")
        limits = _read_caps(caps, f"{path}, {where}") | ({"public": True} if is_public else {})
        rows.append((where, key, name, most, share, limits, is_admin))
    return rows


def _from_json(text: str, path: str) -> list[KeyRow]:
    try:
        found = msgspec.json.decode(text, type=dict[str, str | dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    rows: list[KeyRow] = []
    for number, (key, value) in enumerate(found.items(), 1):
        where = f"key {number}"
        fields = {"tenant": value} if isinstance(value, str) else value
        caps = {name: one for name, one in fields.items() if name in CAPS or name in OBJECTIVES}
        unknown = set(fields) - {"tenant", "quota", "weight", "public", "admin", *CAPS, *OBJECTIVES}
        name, quota, weight = fields.get("tenant"), fields.get("quota"), fields.get("weight")
        is_admin, is_public = fields.get("admin", False), fields.get("public", False)
        if (
            unknown
            or not isinstance(name, str)
            or not isinstance(is_admin, bool)
            or not isinstance(is_public, bool)
        ):
            raise ValueError(
                f"{path}, {where}: expected a tenant, or an object with tenant, quota (bytes), weight (0 or more), {', '.join([*OBJECTIVES, *CAPS])}, public (true), admin (true)"
            )
        most = None if quota is None else _size(str(quota), f"{path}, {where}")
        share = None if weight is None else _weight(weight, f"{path}, {where}")
        limits = _read_caps(caps, f"{path}, {where}") | ({"public": True} if is_public else {})
        rows.append((where, key, name, most, share, limits, is_admin))
    return rows


def _read_caps(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the caps and objectives of a key, by field name. The prefix `max_` of a cap is removed, which gives the
    field name in `Caps`. Raises ValueError for an unknown name, or for a value that is not a valid number.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        known = CAPS | OBJECTIVES
        if name not in known:
            raise ValueError(f"{where}: unknown cap {name!r}; known are {', '.join(known)}")
        try:
            number = math.nan if isinstance(value, bool) else known[name](value)
            number = math.nan if isinstance(value, float) and number != value else number
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not -(1 << 63) <= number < 1 << 63 or (name != "max_priority" and number <= 0):
            least = "" if name == "max_priority" else " above 0"
            raise ValueError(f"{where}: {name} {value!r} must be a number{least}")
        found[name.removeprefix("max_")] = number
    return found


def _weight(given: Any, where: str) -> float:
    try:
        weight = float(given)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(f"{where}: weight {given!r} must be a number, 0 or more")
    return weight


def _size(text: str, where: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
