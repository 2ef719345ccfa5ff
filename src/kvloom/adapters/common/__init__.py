"""Parts that several adapters use: tiers by URL, pages in tiers, the identity of weights, tested versions.

    tier_urls.py        checks and expands the URLs of tiers
    tier_pages.py       TierPages: host memory and the other tiers of one process
    waiting_pages.py    WaitingPages: lookup, load and store for threads that may wait
    weights.py          digests that identify weight files
    engine_version.py   EngineVersion: which version of an engine is tested

This folder imports no other engine.
"""

from .engine_version import EngineVersion
from .tier_pages import TierPages
from .tier_urls import check_tier_urls, host_url, number, of_rank, tier_list
from .waiting_pages import PageCounts, WaitingPages
from .weights import model_folder, weights_digest

__all__ = [
    "EngineVersion",
    "PageCounts",
    "TierPages",
    "WaitingPages",
    "check_tier_urls",
    "host_url",
    "model_folder",
    "number",
    "of_rank",
    "tier_list",
    "weights_digest",
]
