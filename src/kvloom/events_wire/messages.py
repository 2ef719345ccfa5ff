"""Events in msgpack, and block hashes in the form in which they are sent.

vLLM 0.32 writes an event as a map with the key `type`. Earlier versions write an array whose first element is the event
name. This module reads and writes both encodings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from kvloom.core import HASH_BYTES

__all__ = [
    "GPU",
    "MEDIA",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventDecoder",
    "WireEvent",
    "WireHash",
    "encode_batch",
    "raw_tokens",
    "wire_hash",
    "wire_hashes",
]

GPU = "GPU"
MEDIA = (GPU, "CPU", "DISK", "STORAGE")
"""Media in the order of their distance from the device: device pool, host memory, local disk, a store that workers
share."""
WireHash = int | bytes
_NO_TOKENS = msgspec.Raw(msgspec.msgpack.encode([]))


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Pages of layer group `group_idx` were stored for consecutive blocks with the hashes `block_hashes`. A partial
    last block has a separate event, with a smaller `block_size`.

    - `parent_block_hash` is the hash of the block before them. None means that the first block starts the prompt.
    - `token_ids` are the tokens of all blocks, with `block_size` tokens per hash. They stay encoded as msgpack until
      `tokens` is read, so readers that need only hashes save time.
    - The other fields are those of vLLM's event.
    """

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None

    @property
    def tokens(self) -> list[int]:
        """The token ids, decoded at each call."""
        return msgspec.msgpack.decode(self.token_ids, type=list[int])


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Pages of layer group `group_idx` were removed from `medium`. A group of None means the pages of all groups."""

    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """The worker has no pages any more. A snapshot starts with this event."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """The events of one step of a worker. `ts` is the Unix time of the step."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


def _array_form(kind: type[Any]) -> type[Any]:
    """Return the array form of the event class `kind`. vLLM wrote events in this form before version 0.32."""
    fields = [
        (field.name, field.type)
        if field.default is msgspec.NODEFAULT
        else (field.name, field.type, field.default)
        for field in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(kind.__name__, fields, tag=kind.__name__, array_like=True, gc=False)


_KINDS: dict[str, type[Any]] = {one.__name__: one for one in (BlockStored, BlockRemoved, AllBlocksCleared)}
_ARRAY_KINDS: dict[str, type[Any]] = {name: _array_form(kind) for name, kind in _KINDS.items()}
_ARRAYS: Any = tuple(_ARRAY_KINDS.values())


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ARRAYS[0] | _ARRAYS[1] | _ARRAYS[2]]
    data_parallel_rank: int | None = None


class EventDecoder:
    """Reads the batches of one publisher, and records which of the two encodings the publisher uses."""

    def __init__(self) -> None:
        self._maps = msgspec.msgpack.Decoder(EventBatch)
        self._arrays = msgspec.msgpack.Decoder(_ArrayBatch)
        self._reads_arrays = False

    def decode(self, payload: bytes) -> EventBatch:
        """Return the batch in `payload`. Raises msgspec.DecodeError if it is not a batch."""
        if self._reads_arrays:
            return self._from_arrays(payload)
        try:
            return self._maps.decode(payload)
        except msgspec.ValidationError:
            batch = self._from_arrays(payload)
        self._reads_arrays = bool(batch.events)
        return batch

    def _from_arrays(self, payload: bytes) -> EventBatch:
        found = self._arrays.decode(payload)
        events = [_KINDS[type(event).__name__](*msgspec.structs.astuple(event)) for event in found.events]
        return EventBatch(found.ts, events, found.data_parallel_rank)


_encoder = msgspec.msgpack.Encoder()


def encode_batch(batch: EventBatch, encoding: Literal["map", "array"] = "map") -> bytes:
    """Return the payload of a batch, with events as maps or as arrays."""
    if encoding == "map":
        return _encoder.encode(batch)
    events = [_ARRAY_KINDS[type(event).__name__](*msgspec.structs.astuple(event)) for event in batch.events]
    return _encoder.encode(_ArrayBatch(batch.ts, events, batch.data_parallel_rank))


def raw_tokens(tokens: bytes) -> msgspec.Raw:
    """Return token bytes as an encoded msgpack array, which `encode_batch` inserts unchanged."""
    return msgspec.Raw(_encoder.encode(np.frombuffer(tokens, "<i4").tolist())) if tokens else _NO_TOKENS


def wire_hash(block_hash: bytes) -> int:
    """Return the first eight bytes of a block hash as a signed 64-bit integer."""
    return int.from_bytes(block_hash[:8], "little", signed=True)


def wire_hashes(hashes: Sequence[bytes]) -> list[int]:
    """Return `wire_hash` of each hash. Takes about 30 ns per hash."""
    if not hashes:
        return []
    words: list[int] = np.frombuffer(b"".join(hashes), "<i8")[:: HASH_BYTES // 8].tolist()
    return words
