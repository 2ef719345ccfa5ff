"""Settings of the connector: `kv_connector_extra_config` of vLLM's KVTransferConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from kvloom.tiers import check_tiers, scheme_of, split_write_policy
from kvloom.tiers.encoding import CODINGS
from kvloom.tiers.host import HostURL

__all__ = ["Settings"]

LoadRule = Literal["auto", "always", "never"]
STAGING_BYTES = 1 << 30
"""Bytes of host memory if no host tier is configured. Every transfer passes through host memory."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one connector. Raises ValueError for a wrong value."""

    tiers: tuple[str, ...]
    """URLs of tiers, the fastest first. `{rank}` in a URL is replaced by the worker's rank."""
    load: LoadRule = "auto"
    """"auto" loads or recomputes pages, whichever is faster. "always" loads every page that a tier has. "never" only
    stores pages.
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
        tiers = extra.get("tiers")
        if not isinstance(tiers, list | tuple) or not tiers or not all(isinstance(url, str) for url in tiers):
            raise ValueError(
                f"kv_connector_extra_config needs tiers, a list of URLs, and has {tiers!r}: "
                'write {"tiers": ["host:8GiB", "disk:/nvme/kv:1TiB"]}'
            )
        load = extra.get("load", "auto")
        if load not in get_args(LoadRule):
            raise ValueError(f"load {load!r} is not one of {', '.join(get_args(LoadRule))}")
        seconds, tokens = extra.get("load_seconds", 5.0), extra.get("min_load_tokens", 0)
        for name, value in (("load_seconds", seconds), ("min_load_tokens", tokens)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ValueError(f"{name} {value!r} must be a number of at least 0")
        found = cls(tuple(tiers), load, float(seconds), int(tokens))
        found._check(world_size)
        return found

    def of_rank(self, rank: int) -> list[str]:
        """Return the URLs of the tiers of the worker with this rank."""
        return [url.replace("{rank}", str(rank)) for url in self.tiers]

    def host(self, rank: int = 0) -> HostURL:
        """Return the URL of the configured host tier. If none is configured, return one with STAGING_BYTES bytes."""
        for url in self.of_rank(rank):
            if scheme_of(url) == "host":
                return HostURL.parse(split_write_policy(url)[0])
        return HostURL(STAGING_BYTES)

    def _check(self, world_size: int) -> None:
        check_tiers(self.of_rank(0))
        for url in self.tiers:
            scheme = scheme_of(url)
            if scheme in CODINGS:
                raise ValueError(
                    f"tier {url!r} re-encodes pages, and vLLM's pages are stored exactly: remove {scheme}:"
                )
            if scheme == "disk" and world_size > 1 and "{rank}" not in url:
                raise ValueError(
                    f"tier {url!r}: one process owns a folder of a disk tier, and vLLM runs {world_size} workers: "
                    "write {rank} into the path, such as disk:/nvme/kv-{rank}:1TiB"
                )
        if self.host().share is not None:
            raise ValueError(
                "a host tier of vLLM cannot be shared: remove the option share, and use a redis or peer tier"
            )
