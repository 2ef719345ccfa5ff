"""Opens configured tiers other than host memory.

A tier that cannot be opened is an error. With `?optional=1` in its URL, the error is only logged. If a later attempt
may succeed, a stand-in tries to open the tier again in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvloom.tiers.encoding import CODINGS
from kvloom.tiers.options import url_label
from kvloom.tiers.registry import OpenTier, is_optional, open_with_policy, scheme_of, split_write_policy
from kvloom.tiers.shares import Shares, SupportsShares
from kvloom.tiers.tier import TierError

from .unavailable_tier import UnavailableTier

__all__ = ["open_required", "open_tiers"]

log = logging.getLogger("kvloom.tiers")
Check = Callable[[OpenTier], OpenTier]
"""A function that checks an opened tier. The function returns a tier that can store the caller's pages, possibly a
wrapper. If the tier cannot store them, the function closes the tier and raises TierError."""


def open_required(text: str) -> OpenTier:
    """Open the tier of a URL. Raises ValueError with the remedy if it cannot be opened."""
    try:
        return open_with_policy(text)
    except TierError as error:
        raise _unusable(text, error) from error


def open_tiers(
    tiers: Sequence[str | OpenTier], shares: Shares | None = None, check: Check = lambda place: place
) -> tuple[list[OpenTier], list[tuple[str, str]]]:
    """Open tiers in order, and call `check` with each opened tier. `check` may replace a tier that was opened by
    its URL.

    Return two lists: the tiers, and (name, error) of each optional tier that cannot be opened. Instead of an
    optional tier that may be opened later, the first list has a stand-in. If a required tier cannot be
    opened, closes all tiers and raises ValueError."""
    places: list[OpenTier] = []
    unavailable: list[tuple[str, str]] = []
    try:
        for text in tiers:
            if isinstance(text, OpenTier):
                places.append(text)
                if shares and isinstance(text.tier, SupportsShares):
                    text.tier.set_shares(shares)
                try:
                    check(text)
                except TierError as error:
                    raise _unusable(text.tier.name, error) from error
                continue
            try:
                places.append(check(open_with_policy(text, shares)))
            except TierError as error:
                if not is_optional(text):
                    raise _unusable(text, error) from error
                unavailable.append((url_label(text), str(error)))
                log.warning("tier %s is left out, serving goes on without it: %s", *unavailable[-1])
                if _should_retry(text, error):
                    places.append(_stand_in(text, shares, str(error)))
    except BaseException:
        for place in places:
            place.tier.close()
        raise
    return places, unavailable


def _unusable(text: str, error: TierError) -> ValueError:
    return ValueError(
        f"tier {url_label(text)} cannot be used: {error}; correct it, or add optional=1 to its options "
        "to start without it"
    )


def _should_retry(text: str, error: TierError) -> bool:
    """Return whether opening a tier may succeed later. Return False if a package is missing, or if the tier
    re-encodes pages.
    """
    return not isinstance(error.__cause__, ImportError) and scheme_of(text) not in CODINGS


def _stand_in(text: str, shares: Shares | None, reason: str) -> OpenTier:
    """Return a stand-in for a tier that is unavailable now. The stand-in opens the tier later, in the background."""
    _, write = split_write_policy(text)
    return OpenTier(
        UnavailableTier(url_label(text), lambda: open_with_policy(text, shares).tier, reason), write
    )
