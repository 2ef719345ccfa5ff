"""The URL of a host tier: `host:SIZE?checked=1&ttl=SECONDS&exclusive=0&share=PORT&secret=FILE&tls=auto`.

The options `share` and `exclusive` work only for the host tier of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from kvloom.core import parse_size
from kvloom.tiers.options import Options

from .host_tier import HostConfig, HostTier

__all__ = ["HostURL", "parse_url"]


@dataclass(frozen=True, slots=True)
class HostURL:
    """A parsed URL of a host tier.

    - `capacity`: in bytes.
    - `checked`: the tier stores and verifies checksums.
    - `share`: with `share=PORT`, peers can connect on loopback, and with `share=HOST:PORT` at this address.
    - `secret`: the file with the secret of the peers.
    - `tls`: whether TCP connections are encrypted: auto, on or off.
    - `ttl`: the number of seconds after which a page expires.
    - `exclusive`: pages that are also in the pool are evicted first.
    """

    capacity: int
    checked: bool = False
    share: tuple[str, int] | None = None
    secret: str = ""
    ttl: float = 0
    tls: Literal["auto", "on", "off"] = "auto"
    exclusive: bool = True

    @classmethod
    def parse(cls, url: str) -> HostURL:
        """Parse a URL from which the option `write` was removed. Raises ValueError for an invalid URL."""
        plain, _, query = url.partition("?")
        options = Options(url, query)
        checked, address = options.text("checked", "0"), options.optional_text("share")
        secret, ttl = options.text("secret", ""), options.ttl()
        tls, exclusive = options.text("tls", "auto"), options.text("exclusive", "1")
        options.reject_unknown()
        for name, value in (("checked", checked), ("exclusive", exclusive)):
            if value not in ("0", "1"):
                raise ValueError(f"{options.url}: {name}={value!r} must be 0 or 1")
        if tls not in ("auto", "on", "off"):
            raise ValueError(f"{options.url}: tls={tls!r} is none of auto, on, off")
        share = None
        if address is not None:
            host, _, port = address.rpartition(":")
            if not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"{options.url}: share={address!r} is neither PORT nor HOST:PORT")
            share = (host.strip("[]") or "127.0.0.1", int(port))
        elif secret or tls != "auto":
            name = "secret" if secret else "tls"
            raise ValueError(f"{options.url}: {name}= has no effect without share=; give share=PORT")
        return cls(
            parse_size(plain.removeprefix("host:")),
            checked == "1",
            share,
            secret,
            ttl,
            cast(Literal["auto", "on", "off"], tls),
            exclusive == "1",
        )


def parse_url(url: str) -> Callable[[], HostTier]:
    """Parse a URL. Return the function that opens the tier. This function raises ValueError if the URL has the
    option `share`, because only an engine can share its host tier.
    """
    parsed = HostURL.parse(url)

    def open_host() -> HostTier:
        if parsed.share is not None:
            raise ValueError(
                f"tier {url!r}: only an engine can share its host tier; use `kvloom share SIZE` to share memory alone"
            )
        return HostTier(HostConfig(parsed.capacity, checked=parsed.checked, ttl=parsed.ttl))

    return open_host
