"""KV events in vLLM's ZMQ format. A worker publishes them, and a router receives them.

    settings.py      addresses and format of the events
    curve.py         keys with which the sockets are encrypted and authenticated
    messages.py      BlockStored, BlockRemoved, AllBlocksCleared in msgpack; reads both encodings of vLLM
    publisher.py     the worker's side: a PUB socket, a replay socket, a mirror for snapshots
    tier_blocks.py   the blocks of host memory and of disk tiers
    block_tokens.py  parents and tokens of published blocks, for events of tiers
    subscriber.py    the router's side: applies batches in order, and fills gaps by replays or snapshots

A batch has three frames: topic, sequence number (8 bytes, big-endian), and msgpack of [time, events, data-parallel
rank]. The package needs pyzmq and msgspec. It imports `kvloom.core` only, because both the engine and the router import
it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .settings import EventSettings, offset_port

if TYPE_CHECKING:
    from .curve import CurveKey
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
    from .tier_blocks import TierBlocks

__all__ = [
    "GPU",
    "MEDIA",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CurveKey",
    "EventBatch",
    "EventDecoder",
    "EventSettings",
    "Followed",
    "Subscriber",
    "TierBlocks",
    "WireEvent",
    "WireHash",
    "WirePublisher",
    "encode_batch",
    "offset_port",
    "raw_tokens",
    "wire_hash",
    "wire_hashes",
]

_MODULE_OF = {
    "CurveKey": "curve",
    "WirePublisher": "publisher",
    "Followed": "subscriber",
    "Subscriber": "subscriber",
    "TierBlocks": "tier_blocks",
}


def __getattr__(name: str) -> Any:
    """Import the other names on first use, so that an engine without events needs neither pyzmq nor msgspec."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF.get(name, 'messages')}", __name__), name)
