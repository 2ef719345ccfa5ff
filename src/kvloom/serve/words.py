"""Texts that explain miss reasons and the outcomes of tier reads and writes to users. The dashboard, `kvloom top`,
`kvloom explain` and the docs show these texts.

`/kvloom/state` returns the texts as a table. A test compares this table with docs/observability.md.
"""

from __future__ import annotations

from kvloom.core import MISS_REASONS

__all__ = ["MISS_REASONS", "OUTCOMES", "POOL", "fault_text", "tier_word"]

POOL = "device"
"""The name of the page pool in counts of hits by tier."""

OUTCOMES = {
    "ok": "the page was read or written",
    "missing": "the tier does not have the page",
    "late": "the tier did not answer before the deadline; the page is recomputed",
    "failed": "the medium reported an error, or the tier is closed",
    "corrupt": "the bytes differ from those written",
    "short": "fewer bytes than written",
    "full": "no space, and nothing can be evicted",
    "busy": "too many bytes in transfer",
    "version": "written by another version of the format",
    "layout": "written in another form",
    "locked": "sealed with a key that this tier lacks, or modified since",
    "untrusted": "a plain page in a tier that accepts sealed pages only",
}
"""Outcomes of reading or writing a page in a tier. All but the first two are faults."""


def tier_word(tier: str) -> str:
    """Return the name of a tier for users. The tier "device" is shown as "pool"."""
    return "pool" if tier == POOL else tier


def fault_text(faults: dict[str, int]) -> str:
    """Return counts by outcome, the most frequent first: "41 late, 2 corrupt"."""
    return ", ".join(
        f"{count:,} {outcome}" for outcome, count in sorted(faults.items(), key=lambda one: -one[1])
    )
