"""Addresses and format of a worker's events. Needs no package beyond the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

__all__ = ["EventSettings", "is_local", "offset_port"]


@dataclass(frozen=True, slots=True)
class EventSettings:
    """The addresses at which a worker publishes events, and the format of the events.

    | field         | meaning                                                                                   |
    |---------------|-------------------------------------------------------------------------------------------|
    | `endpoint`    | ZMQ address to bind, such as tcp://127.0.0.1:5557, from which batches are sent            |
    | `replay`      | ZMQ address to bind, which answers requests for past batches and snapshots                |
    | `hashes`      | form of block hashes: signed 64-bit integers ("int64", which Dynamo's indexer needs), or  |
    |               | all their bytes ("bytes")                                                                 |
    | `topic`       | the first frame of each batch                                                             |
    | `encoding`    | form of events: maps ("map", vLLM since version 0.32), or arrays ("array", before 0.32)   |
    | `tier_tokens` | true: events of tiers contain parents and tokens, which Dynamo's indexer needs; vLLM's    |
    |               | events of its offloaded blocks contain neither                                            |
    | `rank`        | the data-parallel rank in each batch                                                      |
    | `key`         | file of a `CurveKey`; only subscribers with this key get events                           |
    """

    endpoint: str
    replay: str | None = None
    hashes: Literal["int64", "bytes"] = "int64"
    topic: str = ""
    encoding: Literal["map", "array"] = "map"
    tier_tokens: bool = False
    rank: int = 0
    key: str | None = None

    def __post_init__(self) -> None:
        for name, address in (("kv_events", self.endpoint), ("kv_events_replay", self.replay)):
            if address is not None and not _is_address(address):
                raise ValueError(
                    f"{name} {address!r} is not an address like tcp://127.0.0.1:5557 or ipc:///run/e"
                )
        if self.hashes not in ("int64", "bytes"):
            raise ValueError(f"kv_events_hashes {self.hashes!r} is not one of int64, bytes")
        if self.encoding not in ("map", "array"):
            raise ValueError(f"kv_events_encoding {self.encoding!r} is not one of map, array")


def is_local(address: str) -> bool:
    """Whether only programs on this machine can reach a ZMQ address."""
    host = urlsplit(address).hostname if address.startswith("tcp:") else "localhost"
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return bool(
            (parts.scheme == "tcp" and parts.hostname and parts.port is not None)
            or (parts.scheme in ("ipc", "inproc") and (parts.netloc or parts.path))
        )
    except ValueError:
        return False


def offset_port(address: str | None, offset: int) -> str | None:
    """Return the address for rank `offset`, derived as in vLLM. A TCP address gets `offset` added to its port. Any
    other address gets `offset` as a suffix."""
    if address is None or not offset:
        return address
    if not address.startswith("tcp://"):
        return f"{address}_{offset}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + offset}"
