"""Opens tiers by URL, as given on the command line.

    host:64GiB    disk:/nvme/kv:1TiB    int8:disk:/nvme/kv:1TiB    SCHEME…?option=value&option=value

A row of SCHEMES maps a URL scheme to a parser. The parser checks the URL and returns an opener, a function that opens
the tier. All URLs are checked before any tier is opened. Other packages add schemes by entry points of the group
`kvloom.tiers`. Their modules are imported on first use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Literal, cast

from .encoding import CODINGS
from .options import redact_url, url_label
from .shares import Shares, SupportsShares
from .tier import Tier, TierError

__all__ = [
    "ENTRY_POINTS",
    "SCHEMES",
    "OpenTier",
    "Opener",
    "Parser",
    "WritePolicy",
    "check_tiers",
    "find_parser",
    "is_optional",
    "known_schemes",
    "mark_optional",
    "open_tier",
    "open_with_policy",
    "parse_tier",
    "scheme_of",
    "short_tier_names",
    "split_write_policy",
]

WritePolicy = Literal["through", "second-use", "back"]
"""When a page is copied to a tier. "through": when its sequence closes. "second-use": when a sequence that reused
it closes. "back": when host memory is about to evict it."""
WRITE_POLICIES: tuple[WritePolicy, ...] = ("through", "second-use", "back")
Opener = Callable[[], Tier]
"""A function that opens the tier of a parsed URL. Raises TierError if the tier cannot be opened."""
Parser = Callable[[str], Opener]
"""A function that parses a URL. Raises ValueError for an invalid URL. Opens nothing."""

ENTRY_POINTS = "kvloom.tiers"
"""Group of entry points. The name is the URL scheme; the value is `module:function` of a Parser."""

SCHEMES: dict[str, str] = {
    "host": "kvloom.tiers.host.host_url:parse_url",
    "disk": "kvloom.tiers.disk.disk_tier:parse_url",
    "redis": "kvloom.tiers.remote.redis:parse_url",
    "rediss": "kvloom.tiers.remote.redis:parse_url",
    "mooncake": "kvloom.tiers.remote.mooncake:parse_url",
    "nixl": "kvloom.tiers.remote.nixl:parse_url",
    "peer": "kvloom.tiers.peer.peer_tier:parse_url",
    "s3": "kvloom.tiers.remote.s3:parse_url",
    **dict.fromkeys(CODINGS, "kvloom.tiers.lossy_tier:parse_url"),
}
"""`module:function` of the Parser of each URL scheme. Each tier of this package is one row."""


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier and its write policy. The write policy decides when pages are written to the tier:

    - "through": when the sequence that computed the pages ends.
    - "second-use": when a sequence that reused the pages ends.
    - "back": when host memory is about to evict the pages.
    """

    tier: Tier
    write_policy: WritePolicy = "through"

    @property
    def is_lossy(self) -> bool:
        """Whether the tier re-encodes pages. A lossy tier never serves exact pages."""
        return self.tier.is_lossy


def known_schemes() -> list[str]:
    """Return all URL schemes. Schemes of this package come first, then schemes of entry points. Does not import
    tiers."""
    return list(dict.fromkeys([*SCHEMES, *(point.name for point in entry_points(group=ENTRY_POINTS))]))


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, which is the text before the first colon. Raises ValueError if no tier has this
    scheme."""
    scheme, colon, _ = url.partition(":")
    known = list(SCHEMES) if scheme in SCHEMES else known_schemes()
    if not colon or scheme not in known:
        raise ValueError(
            f"tier {redact_url(url)!r} has no known scheme; write host:64GiB or disk:/path:1TiB, or use a scheme of: "
            + ", ".join(known)
        )
    return scheme


def find_parser(scheme: str) -> Parser:
    """Import and return the parser of a scheme. Schemes of this package take precedence over entry points.

    Raises ValueError if several packages define the scheme, or if the module of an entry point cannot be imported.
    """
    if scheme in SCHEMES:
        return cast(Parser, resolve_name(SCHEMES[scheme]))
    points = list(entry_points(group=ENTRY_POINTS, name=scheme))
    if len(points) != 1:
        targets = ", ".join(point.value for point in points) or "none"
        raise ValueError(f"tier scheme {scheme!r} needs one entry point, and has: {targets}")
    try:
        return cast(Parser, points[0].load())
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"tier scheme {scheme!r}: the entry point {points[0].value!r} cannot be loaded ({error}); "
            "reinstall its package"
        ) from error


def parse_tier(url: str) -> Opener:
    """Parse a URL. Return a function that opens its tier. Raises ValueError for an invalid URL. The message contains
    the URL without its password."""
    parser = find_parser(scheme_of(url))
    try:
        return parser(url)
    except ValueError as error:
        if url_label(url) in str(error):
            raise
        raise ValueError(f"tier {redact_url(url)!r}: {error}") from None


def check_tiers(urls: Iterable[str]) -> None:
    """Raises ValueError for an invalid URL, or for URLs that cannot be combined. Opens no tier."""
    urls = list(urls)
    for url in urls:
        parse_tier(split_write_policy(url)[0])
    hosts = sum(scheme_of(url) == "host" for url in urls)
    if hosts > 1:
        raise ValueError(f"{hosts} host tiers were given; the limit is one: add up their sizes")


def short_tier_names(names: Sequence[str]) -> list[str]:
    """Return short names of tiers, without paths and addresses, for example disk, disk 2, redis."""
    kinds = [name.partition(":")[0] for name in names]
    before = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
    return [f"{kind} {count + 1}" if count else kind for kind, count in zip(kinds, before, strict=True)]


def open_tier(url: str) -> Tier:
    """Open the tier of a URL. Raises ValueError for an invalid URL, and TierError if the tier cannot be opened."""
    return parse_tier(url)()


def open_with_policy(url: str, shares: Shares | None = None) -> OpenTier:
    """Open a tier and read its write policy from the URL option `write` (`through`, `second-use` or `back`).

    If the tier supports tenant shares, the tier enforces `shares`.
    """
    rest, policy = split_write_policy(url)
    tier = open_tier(rest)
    if shares and isinstance(tier, SupportsShares):
        try:
            tier.set_shares(shares)
        except TierError:
            tier.close()
            raise
    return OpenTier(tier, policy)


def split_write_policy(url: str) -> tuple[str, WritePolicy]:
    """Return the URL without its options `write` and `optional`, and the write policy. Host memory that is not shared
    with other processes has the default policy `back`. All other tiers have the default `through`."""
    scheme = scheme_of(url)
    if url.count("?") > 1:
        raise ValueError(
            f"tier {redact_url(url)!r} has several question marks; write options as ?name=value&name=value"
        )
    url = _without_optional(url)
    found = re.search(r"(?<=[?&])write=([^&]*)(?:&|$)", url)
    if found is None:
        private = scheme == "host" and re.search(r"[?&]share=", url) is None
        return url, "back" if private else "through"
    if found[1] not in WRITE_POLICIES:
        raise ValueError(
            f"tier {redact_url(url)!r}: write={found[1]!r} is none of {', '.join(WRITE_POLICIES)}"
        )
    return (url[: found.start()] + url[found.end() :]).rstrip("?&"), cast(WritePolicy, found[1])


_OPTIONAL = re.compile(r"(?<=[?&])optional=([^&]*)(?:&|$)")


def is_optional(url: str) -> bool:
    """Return whether a URL has the option `optional=1`, so that the engine starts even if the tier cannot be
    opened. Raises ValueError if the value of `optional` is neither 0 nor 1.
    """
    found = _OPTIONAL.search(url)
    if found is not None and found[1] not in ("0", "1"):
        raise ValueError(f"tier {redact_url(url)!r}: optional={found[1]!r} must be 0 or 1")
    return found is not None and found[1] == "1"


def mark_optional(url: str) -> str:
    """Return the URL with the option `optional=1` (see `is_optional`)."""
    rest = _without_optional(url)
    return f"{rest}{'&' if '?' in rest else '?'}optional=1"


def _without_optional(url: str) -> str:
    is_optional(url)
    return _OPTIONAL.sub("", url).rstrip("?&")
