"""TierPages: the host memory and the other tiers in which one process stores pages."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.tiers import HostConfig, HostTier, OpenTier, PageChanges, SupportsChanges, TierError, scheme_of
from kvloom.tiers.transfers import TransferConfig, TransferManager, open_tiers

from .tier_urls import host_url, of_rank

__all__ = ["TierPages"]

SLAB_BYTES = 8 << 20


class TierPages:
    """The tiers of one process: host memory, and the other configured tiers. The constructor opens the tiers, and
    raises ValueError if a required tier cannot be opened. Only one thread may use `manager`. For several threads, use
    `WaitingPages`.

    - `tiers`: the URLs of the tiers, in which `rank` replaces `{rank}`.
    - `page_bytes`: the size of the largest page.
    - `pin`: host memory is pinned, so that a GPU can copy directly.
    - `others`: tiers that are already open. If given, they replace all configured tiers except the host tier.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        page_bytes: int,
        rank: int = 0,
        pin: bool = False,
        others: Sequence[OpenTier] | None = None,
    ) -> None:
        urls = of_rank(tiers, rank)
        host = host_url(urls)
        slab = max(min(SLAB_BYTES, host.capacity // 32), page_bytes)
        slab = -(-slab // mmap.PAGESIZE) * mmap.PAGESIZE
        if slab > host.capacity:
            raise ValueError(
                f"a host tier of {host.capacity:,} bytes has no space for a page of {page_bytes:,} bytes: "
                f"give it at least {slab:,}"
            )
        buffer: Any = None
        if pin:
            buffer = torch.empty(host.capacity // slab * slab, dtype=torch.uint8, pin_memory=True).numpy()
        self.host = HostTier(HostConfig(host.capacity, slab, host.checked, host.ttl), buffer)
        urls = [url for url in urls if scheme_of(url) != "host"]
        try:
            places, self.unavailable = open_tiers(urls if others is None else others, check=_checked)
        except BaseException:
            self.host.close()
            raise
        self.manager = TransferManager(self.host, places, TransferConfig())

    @property
    def arena(self) -> npt.NDArray[np.uint8]:
        return self.host.arena

    def watch(self) -> list[tuple[str, PageChanges]]:
        """Start to record which pages host memory and disk tiers store and remove. Return, for each recorded tier, its
        medium ("CPU" or "STORAGE", as in vLLM's events) and the object that collects its changes. Shared stores are not
        recorded, because other processes change them too.
        """
        found = [("CPU", self.host.watch())]
        for place in self.manager.tiers:
            changes = place.tier.watch() if isinstance(place.tier, SupportsChanges) else None
            if changes is not None:
                found.append(("STORAGE", changes))
        return found

    def close(self) -> None:
        """Write pending pages to the tiers within a time limit, and close the tiers."""
        self.manager.close()


def _checked(place: OpenTier) -> OpenTier:
    if place.is_lossy:
        place.tier.close()
        raise TierError("it re-encodes pages, and the engine's pages are stored exactly")
    return place
