"""What stands after the `?` of a tier's address: `capacity=64GiB&compression=lz4&readers=4`.

Every option is asked for once, and one that nobody asked for is an error: a misspelt word never passes for a default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args
from urllib.parse import parse_qsl

from kvloom.core.sizes import parse_size

from .codec import Compression
from .disk import DiskConfig
from .opening import hidden
from .remote import RemoteConfig

__all__ = ["Options"]


class Options:
    """`told` is the address without what is secret, for messages."""

    def __init__(self, address: str, query: str) -> None:
        self.told = hidden(address)
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError as error:
            raise ValueError(f"{self.told}: the options are not NAME=VALUE&NAME=VALUE: {error}") from None
        self._left = dict(pairs)
        self._known: list[str] = []

    def text(self, name: str, otherwise: str) -> str:
        self._known.append(name)
        return self._left.pop(name, otherwise)

    def given(self, name: str) -> Any:
        """Returns an option's text, None where it is not given."""
        self._known.append(name)
        return self._left.pop(name, None)

    def whole(self, name: str, otherwise: int) -> int:
        return int(self._parsed(name, otherwise, int))

    def seconds(self, name: str, otherwise: float) -> float:
        return float(self._parsed(name, otherwise, float))

    def size(self, name: str, otherwise: int | None = None) -> int:
        """A size; without `otherwise` it must be given."""
        if otherwise is None and name not in self._left:
            raise ValueError(f"{self.told}: how large? Give ?{name}=64GiB")
        return int(self._parsed(name, otherwise, parse_size))

    def compression(self) -> Compression:
        told = self.text("compression", "none")
        for known in get_args(Compression):
            if told == known:
                found: Compression = known
                return found
        raise ValueError(f"{self.told}: compression={told!r} is none of {get_args(Compression)}")

    def remote(self) -> RemoteConfig:
        """The options of a store, and no others."""
        plain = RemoteConfig(capacity=self.size("capacity"))
        config = replace(
            plain,
            compression=self.compression(),
            keys=self.given("keys"),
            protect=self.given("protect"),
            readers=self.whole("readers", plain.readers),
            writers=self.whole("writers", plain.writers),
            timeout=self.seconds("timeout", plain.timeout),
            pending_bytes=self.size("pending", plain.pending_bytes),
        )
        self.done()
        return config

    def disk(self, directory: str) -> DiskConfig:
        """The options of a disk tier, and no others."""
        plain = DiskConfig(directory, self.size("capacity"))
        durable: Any = self.text("durable", plain.durable)
        evict: Any = self.text("evict", plain.evict)
        config = replace(
            plain,
            durable=durable,
            evict=evict,
            compression=self.compression(),
            keys=self.given("keys"),
            protect=self.given("protect"),
            readers=self.whole("readers", plain.readers),
            pending_bytes=self.size("pending", plain.pending_bytes),
        )
        self.done()
        return config

    def done(self) -> None:
        """A ValueError if something was given that means nothing here."""
        if self._left:
            raise ValueError(
                f"{self.told}: unknown {', '.join(sorted(self._left))}; known: {', '.join(sorted([*self._known, 'write']))}"
            )

    def _parsed(self, name: str, otherwise: Any, parse: Any) -> Any:
        self._known.append(name)
        if name not in self._left:
            return otherwise
        value = self._left.pop(name)
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{self.told}: {name}={value!r}: {error}") from None
