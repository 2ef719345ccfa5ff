"""KV events on the wire, in vLLM's ZMQ format: what a worker publishes, and how a router follows it.

    settings.py      addresses
    messages.py      BlockStored, BlockRemoved, AllBlocksCleared in msgpack; both encodings of vLLM are read
    publisher.py     the worker's side: a PUB socket, a replay socket, a mirror for snapshots
    subscriber.py    the router's side: batches in order; a gap is filled by replay, else by a snapshot

Frames of a batch: topic, sequence (8 bytes, big-endian), msgpack of [time, events, data-parallel rank]. Needs pyzmq and
msgspec. Imports `kvloom.core` only, because both the engine and the router import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .settings import EventSettings, offset_port

if TYPE_CHECKING:
    from .messages import (
        GPU,
        MEDIA,
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        EventBatch,
        EventDecoder,
        WireEvent,
        WireHash,
        encode_batch,
        raw_tokens,
        wire_hash,
        wire_hashes,
    )
    from .publisher import WirePublisher
    from .subscriber import Followed, Subscriber

__all__ = [
    "GPU",
    "MEDIA",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventDecoder",
    "EventSettings",
    "Followed",
    "Subscriber",
    "WireEvent",
    "WireHash",
    "WirePublisher",
    "encode_batch",
    "offset_port",
    "raw_tokens",
    "wire_hash",
    "wire_hashes",
]

_MODULE_OF = {"WirePublisher": "publisher", "Followed": "subscriber", "Subscriber": "subscriber"}


def __getattr__(name: str) -> Any:
    """Import the other names on first use: an engine without events needs neither pyzmq nor msgspec."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF.get(name, 'messages')}", __name__), name)
