"""The tiers that texts name, opened under one cache: host memory first, which all pages pass, then those below it.

A text that makes no sense is refused before anything is open; a tier that cannot be opened is left out, and said to be, until
it can.
Knows texts and shares; what pages do there is `lower.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Many

import torch

from kvloom.core import KVCache, PoolLayout
from kvloom.tiers import HostTier, TierError
from kvloom.tiers.away import AwayTier
from kvloom.tiers.lossy import LossyTier, lossy_form
from kvloom.tiers.opening import (
    CODINGS,
    HostText,
    Place,
    check_tiers,
    open_place,
    scheme_of,
    shown,
    taken_write,
)
from kvloom.tiers.peer_server import PeerConfig, PeerServer
from kvloom.tiers.secret import read_secret
from kvloom.tiers.shared import SharedMemory
from kvloom.tiers.shares import Shares, shares_of

from .arena import form_of, open_host
from .lower import Lower, LowerConfig

__all__ = ["open_lower"]

log = logging.getLogger("kvloom.tiers")
STAGING = {False: 256 << 20, True: 4 << 30}
"""Host memory that pages pass through where no host tier was asked for, without and with a GPU."""


def open_lower(
    texts: Many[str | Place],
    cache: KVCache,
    buffer: torch.Tensor,
    settle: Callable[[], None],
    config: LowerConfig | None = None,
) -> Lower:
    """The tiers that texts name (`host:64GiB`, `disk:/path:1TiB`, …), under one cache. A text that makes no sense is refused;
    a tier that cannot be opened is left out, and said to be, until it can."""
    layout, device = cache.layout, buffer.device
    check_tiers(text for text in texts if isinstance(text, str))
    hosts = [text for text in texts if isinstance(text, str) and text.startswith("host:")]
    write: str | None = None
    told = HostText(STAGING[device.type == "cuda"])
    if hosts:
        plain, write = taken_write(hosts[0])
        told = HostText.read(plain)
    offer = _offer_of(told)
    host, memory = open_host(layout, told.capacity, told.checked, device, shared=offer is not None)
    tenants = (account.tenant for account in cache.accounts.accounts.values())
    shares = shares_of(tenants, (cache.pool.slabs - 1) * layout.slab_bytes)
    if hosts:  # what pages only pass through is shared by whoever needs it
        host.share_out(shares)
    places: list[Place] = []
    left_out: list[tuple[str, str]] = []
    try:
        for text in texts:
            if isinstance(text, Place):
                places.append(text)
            elif text not in hosts:
                try:
                    places.append(_fitting(open_place(text, shares), layout))
                except TierError as error:
                    left_out.append((shown(text), str(error)))
                    log.warning("tier %s is left out, serving goes on without it: %s", *left_out[-1])
                    if _may_come(text, error):
                        places.append(_away(text, shares, str(error)))
    except BaseException:
        for place in places:
            place.tier.close()
        host.close()
        raise
    lower = Lower(cache, buffer, host, places, write, settle, config or LowerConfig())
    lower.left_out = left_out
    if offer is not None:
        lower.offered = _offered(host, offer, memory)
    return lower


def _offer_of(told: HostText) -> PeerConfig | None:
    """Where an engine's host memory is to be read by others, if anywhere. A ValueError beyond loopback without a secret."""
    if told.share is None:
        return None
    secret = read_secret(told.secret) if told.secret else b""
    return PeerConfig(*told.share, secret, read_only=True)


def _offered(host: HostTier, config: PeerConfig, memory: SharedMemory | None) -> PeerServer | None:
    """Lets others read what host memory has, and change nothing; None, and a warning, where the address cannot be had."""
    try:
        server = PeerServer(host, config, memory)
    except (OSError, ValueError) as error:
        log.warning(
            "host memory is not offered to others at %s:%d, serving goes on: %s",
            config.host,
            config.port,
            error,
        )
        return None
    log.info("host memory is offered to others at peer://%s:%d", *server.address)
    return server


def _may_come(text: str, error: TierError) -> bool:
    """Whether it helps to try again. What is not installed does not come by itself; and what re-encodes is known by its tier."""
    return not isinstance(error.__cause__, ImportError) and scheme_of(text) not in CODINGS


def _away(text: str, shares: Shares, why: str) -> Place:
    _, write = taken_write(text)
    return Place(AwayTier(shown(text), lambda: open_place(text, shares).tier, why), write)


def _fitting(place: Place, layout: PoolLayout) -> Place:
    """The place, if it can take the layout's pages; else a TierError, and it is closed."""
    coding = place.tier.coding if isinstance(place.tier, LossyTier) else None
    if coding is not None:
        try:
            for group in layout.groups:
                lossy_form(form_of(group, 0), coding)
        except ValueError as error:
            place.tier.close()
            raise TierError(f"pages of this model are not re-encoded: {error}") from error
    return place
