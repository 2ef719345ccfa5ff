"""Opens the configured tiers of one cache: host memory first, then the others.

All URLs are checked before any tier is opened. A tier that cannot be opened is an error. With `?optional=1`, the
error is logged, and the engine tries again in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence as Many
from contextlib import contextmanager
from dataclasses import replace

import torch

from kvloom.core import KVCache, PoolLayout
from kvloom.engine.config import OffloadConfig
from kvloom.tiers import (
    HostTier,
    LossyTier,
    OpenTier,
    TierError,
    UnitTier,
    ValueTier,
    check_tiers,
    is_optional,
    scheme_of,
    split_write_policy,
    tenant_shares,
)
from kvloom.tiers.host import HostURL, SharedMemory
from kvloom.tiers.peer import PeerConfig, PeerServer, read_secret
from kvloom.tiers.transfers import open_required, open_tiers

from .host_pages import RankCopies, open_host, unit_forms, value_forms
from .manager import OffloadManager

__all__ = ["open_offload", "opened_tiers"]

log = logging.getLogger("kvloom.tiers")
STAGING_BYTES = {False: 256 << 20, True: 4 << 30}
"""Bytes of host memory that an engine without a host tier reserves, because every transfer passes through host
memory. The key is False for an engine on a CPU, and True for an engine on a GPU."""


@contextmanager
def opened_tiers(tiers: Many[str | OpenTier]) -> Iterator[list[str | OpenTier]]:
    """Open the required tiers, except host memory, before a model is loaded. Yields the list `tiers` with opened tiers
    in place of their URLs. Host memory and optional tiers stay URLs. If the `with` block fails, the tiers are closed.
    Raises ValueError for a tier that cannot be opened.
    """
    check_tiers(text for text in tiers if isinstance(text, str))
    found: list[str | OpenTier] = []
    try:
        for text in tiers:
            is_later = isinstance(text, OpenTier) or scheme_of(text) == "host" or is_optional(text)
            found.append(text if is_later else open_required(str(text)))
        yield found
    except BaseException:
        for place in found:
            if isinstance(place, OpenTier) and place not in tiers:
                place.tier.close()
        raise


def open_offload(
    tiers: Many[str | OpenTier],
    cache: KVCache,
    buffer: torch.Tensor,
    apply_copies: Callable[[], None],
    config: OffloadConfig | None = None,
    ranks: RankCopies | None = None,
) -> OffloadManager:
    """Open tiers (`host:64GiB`, `disk:/path:1TiB`, …) and return the offload manager of a cache. With tensor
    parallelism, rank 0 opens the tiers, and `ranks` are the other ranks. They map host memory.

    Raises ValueError for an invalid URL, and for a tier that cannot be opened. If a tier with `optional=1` cannot
    be opened, the error is only logged.
    """
    layout, device, count = cache.layout, buffer.device, 1 if ranks is None else ranks.count
    check_tiers(text for text in tiers if isinstance(text, str))
    hosts = [text for text in tiers if isinstance(text, str) and text.startswith("host:")]
    write: str | None = None
    host_text = HostURL(STAGING_BYTES[device.type == "cuda"])
    if hosts:
        plain, write = split_write_policy(hosts[0])
        host_text = HostURL.parse(plain)
    server_config = _server_config(host_text)
    whole = layout.whole()
    host, memory = open_host(
        whole,
        host_text.capacity,
        host_text.checked,
        device,
        shared=server_config is not None,
        ttl=host_text.ttl,
        ranks=count,
    )
    tenants = (account.tenant for account in cache.inspect.accounts.values())
    shares = tenant_shares(tenants, cache.usable_slabs * layout.slab_bytes)
    if hosts:  # staging memory has no tenant shares
        host.set_shares(shares)
    try:
        if ranks is not None:
            assert memory is not None
            ranks.share(memory)
            memory = None  # ranks write to this memory, so other processes must use TCP instead of mapping it
        others = [text for text in tiers if text not in hosts]
        places, unavailable = open_tiers(others, shares, lambda place: _checked(place, whole))
    except BaseException:
        host.close()
        raise
    places = [_with_unit_pages(_with_values(place, whole), whole) for place in places]
    server = None if server_config is None else _serve_host(host, server_config, memory)
    return OffloadManager(
        cache,
        buffer,
        host,
        places,
        write,
        host_text.exclusive and host_text.share is None,
        apply_copies,
        config or OffloadConfig(),
        unavailable,
        server,
        ranks,
    )


def _with_values(place: OpenTier, layout: PoolLayout) -> OpenTier:
    """If the opened tier `place` re-encodes pages, wrap it, so that servers with other KV dtypes can use its pages.
    Other tiers are returned unchanged."""
    if not isinstance(place.tier, LossyTier):
        return place
    return replace(place, tier=ValueTier(place.tier, value_forms(layout)))


def _with_unit_pages(place: OpenTier, layout: PoolLayout) -> OpenTier:
    """Wrap `place` so that it stores pages of HASH_TOKENS tokens (units). Servers of every block size can use
    them.

    A peer tier also has whole pages, because the peer may have the same block size as this engine. Return
    `place` unchanged if the pool's blocks have HASH_TOKENS tokens.
    """
    forms = unit_forms(layout)
    is_peer = "peer://" in place.tier.name
    return replace(place, tier=UnitTier(place.tier, forms, has_whole_pages=is_peer)) if forms else place


def _server_config(host_text: HostURL) -> PeerConfig | None:
    """Return the settings for sharing host memory with other processes, or None if sharing is not configured.
    Raises ValueError if an address other than loopback has no secret, or if the secret is unreadable.
    """
    if host_text.share is None:
        return None
    secret = read_secret(host_text.secret) if host_text.secret else b""
    return PeerConfig(*host_text.share, secret, read_only=True, tls=host_text.tls)


def _serve_host(host: HostTier, config: PeerConfig, memory: SharedMemory | None) -> PeerServer | None:
    """Share host memory read-only with other processes. Return None and logs a warning if the address cannot be
    bound."""
    try:
        server = PeerServer(host, config, memory)
    except (OSError, ValueError) as error:
        log.warning(
            "host memory is not shared at %s:%d, serving goes on: %s",
            config.host,
            config.port,
            error,
        )
        return None
    log.info("host memory is shared at peer://%s:%d", *server.address)
    return server


def _checked(place: OpenTier, layout: PoolLayout) -> OpenTier:
    """Return `place` if its tier can store the pages of the layout. Otherwise close the tier and raise TierError. If
    the tier re-encodes pages (`LossyTier`), also make it store recurrent states unchanged.
    """
    if isinstance(place.tier, LossyTier):
        place.tier.exact_groups = frozenset(group.index for group in layout.of("state"))
        try:
            value_forms(layout)
        except ValueError as error:
            place.tier.close()
            raise TierError(f"this tier cannot re-encode pages of this model: {error}") from error
    return place
