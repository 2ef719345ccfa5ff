"""Settings of the L2 adapter: `adapter_params` of LMCache's plug-in adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvloom.adapters.common import check_tier_urls, host_url, number, tier_list

__all__ = ["Settings"]

MAX_OBJECT_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one adapter. Raises ValueError for a wrong value."""

    tiers: tuple[str, ...]
    """URLs of tiers, the fastest first."""
    load_seconds: float = 5.0
    """Longest time of one load, in seconds. Objects that arrive later are misses."""
    max_object_bytes: int = MAX_OBJECT_BYTES
    """Largest size of an object in bytes. An object contains all bytes of one chunk in one layer group."""
    namespace: str = ""
    """A text that becomes part of every key. LMCache identifies a model by its name only, so use different namespaces
    for different weights with the same name."""

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Settings:
        """Return the settings of `adapter_params`. Opens no tier."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(params) - set(known)):
            raise ValueError(f"unknown setting {unknown[0]!r} in adapter_params: use {', '.join(known)}")
        tiers = tier_list(params, "adapter_params")
        check_tier_urls(tiers, "LMCache", 1)
        namespace = params.get("namespace", "")
        if not isinstance(namespace, str):
            raise ValueError(f"namespace {namespace!r} must be a text")
        largest = min(MAX_OBJECT_BYTES, host_url(tiers).capacity // 8)
        size = int(number(params, "max_object_bytes", largest))
        return cls(tiers, number(params, "load_seconds", 5.0), max(1, size), namespace)
