"""Tiers from one line of text each, as a command line gives them.

    host:64GiB    disk:/nvme/kv:1TiB    int8:disk:/nvme/kv:1TiB    SCHEME…?option=value&option=value

A scheme is one entry of SCHEMES: a function that reads the whole text, and returns another that opens the tier, so that
texts are refused before anything is opened. What it needs is imported when it is asked for. Knows no engine; when pages are written to a tier is `Place.write`, the mover's to follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Literal, cast, get_args
from urllib.parse import parse_qsl

from kvloom.core.sizes import parse_size

from .codec import Compression
from .disk import DiskConfig, DiskTier
from .host import HostConfig, HostTier
from .keys import Protect
from .lossy import Coding, LossyTier
from .shares import Shares, Sharing
from .tier import Tier, TierError

__all__ = [
    "SCHEMES",
    "HostText",
    "Place",
    "Write",
    "check_tiers",
    "open_place",
    "open_tier",
    "options_of",
    "short_names",
    "shown",
    "taken_write",
]

Write = Literal["through", "second-use", "back"]
CODINGS = get_args(Coding)
WRITES: tuple[Write, ...] = ("through", "second-use", "back")
Opener = Callable[[], Tier]
"""Opens the tier of a text that was found to make sense. TierError: it cannot be opened."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tier, and when pages are written to it: when the sequence that made them ends ("through"), when one ends
    that used them again, or when they have to leave the place above ("back")."""

    tier: Tier
    write: Write = "through"

    @property
    def lossy(self) -> bool:
        """Whether it re-encodes pages, and so has nothing for those who want them exact."""
        return isinstance(self.tier, LossyTier)


def scheme_of(text: str) -> str:
    """The scheme before the first colon; a ValueError where it is none of SCHEMES."""
    scheme, colon, _ = text.partition(":")
    if not colon or scheme not in SCHEMES:
        raise ValueError(
            f"tier {hidden(text)!r} is of no known kind; write it like host:64GiB or disk:/path:1TiB, or begin it with one of: "
            + ", ".join(SCHEMES)
        )
    return scheme


def options_of(text: str, known: Iterable[str]) -> tuple[str, dict[str, str]]:
    """What stands before the question mark, and the options behind it; a ValueError for one that is not `known`."""
    plain, _, query = text.partition("?")
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise ValueError(f"tier {text!r}: write options like ?name=value&name=value, not {query!r}") from None
    known = tuple(known)
    for name, _value in given:
        if name not in known:
            raise ValueError(
                f"tier {text!r}: option {name!r} is not known; known: {', '.join((*known, 'write'))}"
            )
    return plain, dict(given)


def check_tiers(texts: Iterable[str]) -> None:
    """Raise ValueError where a text makes no sense, or two of them do not go together. Nothing is opened."""
    texts = list(texts)
    for text in texts:
        rest, _ = taken_write(text)
        SCHEMES[scheme_of(rest)](rest)
    hosts = sum(scheme_of(text) == "host" for text in texts)
    if hosts > 1:
        raise ValueError(f"{hosts} host tiers were asked for: there is one host memory, so give one")


def hidden(text: str) -> str:
    """A text without what is secret."""
    return re.sub(r"//[^?]*@", "//…@", text)


def shown(text: str) -> str:
    """A text as it may be told: without options, and without what is secret."""
    return hidden(text.partition("?")[0])


def short_names(names: Sequence[str]) -> list[str]:
    """Tiers' names without their paths and addresses: disk, disk 2, redis."""
    kinds = [name.partition(":")[0] for name in names]
    before = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
    return [f"{kind} {count + 1}" if count else kind for kind, count in zip(kinds, before, strict=True)]


def open_tier(text: str) -> Tier:
    """The tier that a text names, open. ValueError: the text makes no sense; TierError: the tier cannot be opened."""
    return SCHEMES[scheme_of(text)](text)()


def open_place(text: str, shares: Shares | None = None) -> Place:
    """`open_tier`, with the option that every scheme has: `write=through`, `second-use` or `back`. `shares` hold
    in it where it is a tier that knows them."""
    rest, write = taken_write(text)
    tier = open_tier(rest)
    if shares and isinstance(tier, Sharing):
        try:
            tier.share_out(shares)
        except TierError:
            tier.close()
            raise
    return Place(tier, write)


def taken_write(text: str) -> tuple[str, Write]:
    """A text without its option `write`, and that: for host memory that nobody else reads `back` where it is not said, for
    all else `through`."""
    scheme = scheme_of(text)
    if text.count("?") > 1:
        raise ValueError(
            f"tier {hidden(text)!r}: there is one question mark; write options like ?name=value&name=value"
        )
    found = re.search(r"(?<=[?&])write=([^&]*)(?:&|$)", text)
    if found is None:
        own = scheme == "host" and HostText.read(text).share is None
        return text, "back" if own else "through"
    if found[1] not in WRITES:
        raise ValueError(f"tier {hidden(text)!r}: write={found[1]!r} is none of {', '.join(WRITES)}")
    return (text[: found.start()] + text[found.end() :]).rstrip("?&"), cast(Write, found[1])


@dataclass(frozen=True, slots=True)
class HostText:
    """What `host:SIZE?…` says: bytes, whether checksums are kept (`checked=1`), and where others may read it (`share=PORT` on
    loopback, `share=HOST:PORT`), with the file of a `secret`."""

    capacity: int
    checked: bool = False
    share: tuple[str, int] | None = None
    secret: str = ""

    @classmethod
    def read(cls, text: str) -> HostText:
        plain, options = options_of(text, ("checked", "share", "secret"))
        checked = options.get("checked", "0")
        if checked not in ("0", "1"):
            raise ValueError(f"tier {text!r}: checked={checked!r} must be 0 or 1")
        share, secret = None, options.get("secret", "")
        if "share" in options:
            host, _, port = options["share"].rpartition(":")
            if not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"tier {text!r}: share={options['share']!r} is no PORT and no HOST:PORT")
            share = (host.strip("[]") or "127.0.0.1", int(port))
        elif secret:
            raise ValueError(f"tier {text!r}: a secret is for those it is shared with; give share=PORT, too")
        return cls(_size(plain.removeprefix("host:"), text), checked == "1", share, secret)


def _size(size: str, text: str) -> int:
    try:
        return parse_size(size)
    except ValueError as error:
        raise ValueError(f"tier {text!r}: {error}") from None


def _host(text: str) -> Opener:
    told = HostText.read(text)

    def opened() -> Tier:
        if told.share is not None:
            raise ValueError(
                f"tier {text!r}: an engine shares its host tier; memory alone is shared by `kvloom share SIZE`"
            )
        return HostTier(HostConfig(told.capacity, checked=told.checked))

    return opened


def _disk(text: str) -> Opener:
    plain, options = options_of(text, ("durable", "compression", "evict", "keys", "protect"))
    path, colon, size = plain.removeprefix("disk:").rpartition(":")
    if not colon or not path:
        raise ValueError(f"tier {text!r}: write it like disk:/path:1TiB")
    durable, evict = options.get("durable", "power"), options.get("evict", "least-used")
    compression = options.get("compression", "none")
    capacity = _size(size, text)
    try:
        config = DiskConfig(
            path,
            capacity,
            durable=cast(Literal["power", "process"], durable),
            compression=cast(Compression, compression),
            keys=options.get("keys"),
            protect=cast(Protect | None, options.get("protect")),
            evict=cast(Literal["oldest", "least-used"], evict),
        )
    except ValueError as error:
        raise ValueError(f"tier {text!r}: {error}") from None
    return partial(DiskTier, config)


def _lossy(text: str) -> Opener:
    """`int8:` or `fp8:` before any other tier's text: its pages are re-encoded on their way there."""
    coding, _, rest = text.partition(":")
    if scheme_of(rest) in CODINGS:
        raise ValueError(f"tier {text!r}: pages are re-encoded once; leave {coding}: or the other out")
    inner = SCHEMES[scheme_of(rest)](rest)
    return lambda: LossyTier(inner(), cast(Coding, coding))


def _from(module: str) -> Callable[[str], Opener]:
    """A store's own way to read its text, imported when it is asked for."""

    def read(text: str) -> Opener:
        store = import_module(f"kvloom.tiers.{module}")
        try:
            opener: Opener = store.opener(text)
        except ValueError as error:  # which of several, where it does not say so
            if shown(text) in str(error):
                raise
            raise ValueError(f"tier {hidden(text)!r}: {error}") from None
        return opener

    return read


SCHEMES: dict[str, Callable[[str], Opener]] = {
    "host": _host,
    "disk": _disk,
    "redis": _from("redis"),
    "rediss": _from("redis"),
    "mooncake": _from("mooncake"),
    "nixl": _from("nixl"),
    "peer": _from("peer"),
    "s3": _from("s3"),
    **dict.fromkeys(CODINGS, _lossy),
}
