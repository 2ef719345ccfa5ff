"""The URLs of tiers in the settings of an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.tiers import check_tiers, scheme_of, split_write_policy
from kvloom.tiers.encoding import CODINGS
from kvloom.tiers.host import HostURL

__all__ = ["check_tier_urls", "host_url", "number", "of_rank", "tier_list"]

STAGING_BYTES = 1 << 30
"""Bytes of host memory if no host tier is configured. Every transfer passes through host memory."""


def tier_list(settings: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the setting `tiers`. Raises ValueError if it is not a list of URLs. `where` names the settings in the
    error message."""
    tiers = settings.get("tiers")
    if not isinstance(tiers, list | tuple) or not tiers or not all(isinstance(url, str) for url in tiers):
        raise ValueError(
            f"{where} needs tiers, a list of URLs, and has {tiers!r}: "
            'write {"tiers": ["host:8GiB", "disk:/nvme/kv:1TiB"]}'
        )
    return tuple(tiers)


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """Return the setting `name`, or `default` if it is missing. Raises ValueError unless it is a number, 0 or larger."""
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{name} {value!r} must be a number of at least 0")
    return float(value)


def of_rank(urls: Sequence[str], rank: int) -> list[str]:
    """Return the tier URLs of the process with this rank. The rank replaces `{rank}` in a URL."""
    return [url.replace("{rank}", str(rank)) for url in urls]


def host_url(urls: Sequence[str]) -> HostURL:
    """Return the configured host tier. If none is configured, return a host tier of STAGING_BYTES bytes."""
    for url in urls:
        if scheme_of(url) == "host":
            return HostURL.parse(split_write_policy(url)[0])
    return HostURL(STAGING_BYTES)


def check_tier_urls(urls: Sequence[str], engine: str, world_size: int) -> None:
    """Raises ValueError for a tier URL that cannot be used with `engine`, which runs `world_size` processes. Opens no
    tier.
    """
    check_tiers(of_rank(urls, 0))
    for url in urls:
        scheme = scheme_of(url)
        if scheme in CODINGS:
            raise ValueError(
                f"tier {url!r} re-encodes pages, and {engine}'s pages are stored exactly: remove {scheme}:"
            )
        if scheme == "disk" and world_size > 1 and "{rank}" not in url:
            raise ValueError(
                f"tier {url!r}: one process owns a folder of a disk tier, and {engine} runs {world_size} workers: "
                "write {rank} into the path, such as disk:/nvme/kv-{rank}:1TiB"
            )
    if host_url(of_rank(urls, 0)).share is not None:
        raise ValueError(
            f"a host tier of {engine} cannot be shared: remove the option share, and use a redis or peer tier"
        )
