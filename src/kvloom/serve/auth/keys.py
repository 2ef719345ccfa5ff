"""API keys: which tenant a key speaks for. Keys are kept as digests, and compared in constant time.

A file of keys is JSON, {"KEY": "tenant"} or {"KEY": {"tenant": "t", "quota": "2GiB", "weight": 1}}, or lines of
`KEY tenant [quota [weight]] [max_…=N] [admin]` (# begins a comment, - is no quota). Several keys may name one tenant; then what
they say of it must agree. Where no tenant has a weight all have equal default shares (`core.Tenant.firm`); where one has, those
that name none count 1. `max_answers`, `max_open`, `max_ttl` and `max_priority` are the tenant's `Caps`. A key with
"admin": true (in lines, the last word `admin`) is an operator's: it sees what is told of every tenant.
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
from kvloom.serve.api.errors import invalid_key
from kvloom.serve.worker.messages import TenantRules

from .limits import Caps

__all__ = ["Keys", "exposed", "read_keys"]

SHORTEST = 8
CAPS = {"max_answers": int, "max_open": int, "max_ttl": float, "max_priority": int}
"""What a key may say of its tenant's `Caps`, and of which type it is."""
Row = tuple[str, str, str, int | None, float | None, dict[str, Any], bool]
"""Where it stands, the key, its tenant, what was said of quota, weight and caps, and whether it is an operator's."""


class Keys:
    """Keys by their SHA-256; none means that nobody is asked for one."""

    def __init__(
        self,
        keys: dict[str, TenantRules],
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

    def caps(self, tenant: str) -> Caps:
        """What a tenant's requests may ask for."""
        return self._caps.get(tenant, self._default)

    def admin(self, authorization: str | None) -> bool:
        """Whether a request's Authorization header has an operator's key."""
        digest = _digest(_given(authorization).encode())
        return sum(hmac.compare_digest(known, digest) for known in self._admins) > 0  # all of them, as above


def _given(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def read_keys(path: str, default: Caps | None = None) -> Keys:
    """The keys of a file; `default` is what they do not say of caps. Raises ValueError that names the line or key, never the
    key itself."""
    default = default or Caps()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a file of text (UTF-8)") from None
    rows = _from_json(text, path) if text.lstrip().startswith("{") else _from_lines(text, path)
    keys: dict[str, TenantRules] = {}
    tenants: dict[str, tuple[TenantRules, Caps]] = {}
    firm = any(weight is not None for *_, weight, _, _ in rows)
    for where, key, name, quota, weight, said, _ in rows:
        rules = TenantRules(name, quota, 1.0 if weight is None else weight, firm)
        if len(key) < SHORTEST:
            raise ValueError(f"{path}, {where}: a key needs at least {SHORTEST} characters")
        if key in keys:
            raise ValueError(f"{path}, {where}: this key was given before")
        if not name:
            raise ValueError(f"{path}, {where}: a tenant needs a name")
        told = rules, replace(default, **said)
        if tenants.setdefault(name, told) != told:
            raise ValueError(
                f"{path}, {where}: tenant {name!r} was given with another quota, weight or max_… before"
            )
        keys[key] = rules
    if not keys:
        raise ValueError(f"{path} holds no keys")
    caps = {name: caps for name, (_, caps) in tenants.items()}
    return Keys(keys, [key for _, key, *_, admin in rows if admin], caps, default)


def exposed(path: str) -> str | None:
    """What to tell someone whose file of keys others on this machine can read or change; None where they cannot."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return None
    return f"{path} has keys in it and mode {mode:03o}, so others on this machine can get at them: chmod 600 {path}"


def _from_lines(text: str, path: str) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"line {number}"
        admin = len(words) > 2 and words[-1] == "admin"
        words = words[:-1] if admin else words
        told = dict(word.split("=", 1) for word in words[2:] if "=" in word)
        words = words[:2] + [word for word in words[2:] if "=" not in word]
        if not 2 <= len(words) <= 4:
            raise ValueError(f"{path}, {where}: a line is `KEY tenant [quota [weight]] [max_…=N] [admin]`")
        key, name, quota, weight, *_ = (*words, "-", "-")
        most = None if quota == "-" else _size(quota, f"{path}, {where}")
        share = None if weight == "-" else _weight(weight, f"{path}, {where}")
        rows.append((where, key, name, most, share, _caps(told, f"{path}, {where}"), admin))
    return rows


def _from_json(text: str, path: str) -> list[Row]:
    try:
        found = msgspec.json.decode(text, type=dict[str, str | dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    rows: list[Row] = []
    for number, (key, value) in enumerate(found.items(), 1):
        where = f"key {number}"
        told = {"tenant": value} if isinstance(value, str) else value
        caps = {name: one for name, one in told.items() if name in CAPS}
        unknown = set(told) - {"tenant", "quota", "weight", "admin", *CAPS}
        name, quota, weight = told.get("tenant"), told.get("quota"), told.get("weight")
        admin = told.get("admin", False)
        if unknown or not isinstance(name, str) or not isinstance(admin, bool):
            raise ValueError(
                f"{path}, {where}: a key names a tenant, or has tenant, quota (bytes), weight (0 or more), {', '.join(CAPS)} and admin (true)"
            )
        most = None if quota is None else _size(str(quota), f"{path}, {where}")
        share = None if weight is None else _weight(weight, f"{path}, {where}")
        rows.append((where, key, name, most, share, _caps(caps, f"{path}, {where}"), admin))
    return rows


def _caps(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What was said of caps, by the names of `Caps`. Raises ValueError for one that is not known or no number."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in CAPS:
            raise ValueError(f"{where}: {name!r} is not known; a key may have {', '.join(CAPS)}")
        try:
            number = math.nan if isinstance(value, bool) else CAPS[name](value)
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
