"""The options after the `?` of a tier's URL: `capacity=64GiB&compression=lz4&readers=4`.

A parser reads every option that it supports, then calls `reject_unknown`. A misspelt option is therefore an error.
"""

from __future__ import annotations

import re
from typing import Any, get_args
from urllib.parse import parse_qsl

from kvloom.core import parse_size

from .encoding import Compression
from .ttl import check_ttl

__all__ = ["Options", "redact_url", "url_label"]


def redact_url(url: str) -> str:
    """Return a URL without its user and password, for messages."""
    return re.sub(r"//[^?]*@", "//…@", url)


def url_label(url: str) -> str:
    """Return a URL for logs: without options, user and password."""
    return redact_url(url.partition("?")[0])


class Options:
    """The options of one URL. `url` is the URL without user and password, for messages."""

    def __init__(self, url: str, query: str) -> None:
        self.url = redact_url(url)
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError as error:
            raise ValueError(f"{self.url}: write options as ?name=value&name=value ({error})") from None
        self._remaining = dict(pairs)
        self._known: list[str] = []

    def text(self, name: str, default: str) -> str:
        """Return the text of an option, or `default`."""
        self._known.append(name)
        return self._remaining.pop(name, default)

    def optional_text(self, name: str) -> Any:
        """Return the text of an option, or None if it is absent."""
        self._known.append(name)
        return self._remaining.pop(name, None)

    def integer(self, name: str, default: int) -> int:
        """Return a whole number. Raises ValueError for other text."""
        return int(self._parse(name, default, int))

    def seconds(self, name: str, default: float) -> float:
        """Return a number of seconds. Raises ValueError for other text."""
        return float(self._parse(name, default, float))

    def ttl(self) -> float:
        """Return the time to live of pages in seconds. 0 means that pages never expire."""
        ttl = self.seconds("ttl", 0)
        try:
            check_ttl(ttl)
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}") from None
        return ttl

    def size(self, name: str, default: int | None = None) -> int:
        """Return a size in bytes. Raises ValueError if the option is absent and there is no `default`."""
        if default is None and name not in self._remaining:
            raise ValueError(f"{self.url}: {name} is missing; give ?{name}=64GiB")
        return int(self._parse(name, default, parse_size))

    def compression(self) -> Compression:
        """Return the compression method. Raises ValueError for an unknown method."""
        value = self.text("compression", "none")
        for known in get_args(Compression):
            if value == known:
                found: Compression = known
                return found
        raise ValueError(f"{self.url}: compression={value!r} is none of {', '.join(get_args(Compression))}")

    def reject_unknown(self) -> None:
        """Raises ValueError if the URL has an option that was not read."""
        if self._remaining:
            unknown, known = sorted(self._remaining), sorted([*self._known, "write"])
            raise ValueError(f"{self.url}: unknown options {', '.join(unknown)}; known: {', '.join(known)}")

    def _parse(self, name: str, default: Any, parse: Any) -> Any:
        self._known.append(name)
        if name not in self._remaining:
            return default
        value = self._remaining.pop(name)
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{self.url}: {name}={value!r}: {error}") from None
