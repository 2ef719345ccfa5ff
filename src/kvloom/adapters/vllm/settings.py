"""Settings of the connector: `kv_connector_extra_config` of vLLM's KVTransferConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from kvloom.adapters.common import check_tier_urls, number, tier_list

__all__ = ["Settings"]

LoadRule = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one connector. Raises ValueError for a wrong value."""

    tiers: tuple[str, ...]
    """URLs of tiers, the fastest first. `{rank}` in a URL is replaced by the worker's rank."""
    load: LoadRule = "auto"
    """"auto" loads pages if this is faster than recomputing them. "always" loads every page that a tier has. "never"
    loads no page, but still stores pages.
    """
    load_seconds: float = 5.0
    """Longest time, in seconds, that a request waits for pages. Pages that arrive later are recomputed."""
    min_load_tokens: int = 0
    """A hit with fewer tokens than this is recomputed."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], world_size: int = 1) -> Settings:
        """Return the settings of an extra config. Opens no tier."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(extra) - set(known)):
            raise ValueError(
                f"unknown setting {unknown[0]!r} in kv_connector_extra_config: use {', '.join(known)}"
            )
        load = extra.get("load", "auto")
        if load not in get_args(LoadRule):
            raise ValueError(f"load {load!r} is not one of {', '.join(get_args(LoadRule))}")
        tiers = tier_list(extra, "kv_connector_extra_config")
        check_tier_urls(tiers, "vLLM", world_size)
        seconds, tokens = number(extra, "load_seconds", 5.0), number(extra, "min_load_tokens", 0)
        return cls(tiers, load, seconds, int(tokens))
