"""The messages between the scheduler side and the worker side in every step. vLLM transports them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

__all__ = ["Answer", "Answers", "Change", "Load", "Lookup", "Step", "Store"]


@dataclass(slots=True)
class Lookup:
    """A message of the scheduler: look up the blocks of tokens [start, end) in the tiers, and load them into host
    memory. `hashes` maps each block size to the block hashes of these tokens. `number` identifies this lookup, because
    a request may have several lookups.
    """

    request_id: str
    number: int
    start: int
    end: int
    hashes: dict[int, list[bytes]]


@dataclass(slots=True)
class Load:
    """A message of the scheduler: copy the pages of tokens [start, end) from host memory into vLLM's blocks. The lookup
    with the same `number` has loaded these pages into host memory. `block_ids` contains, for each group, the ids of
    vLLM's blocks. Id 0 means that no token reads the block any more, so it is not copied.
    """

    request_id: str
    number: int
    start: int
    end: int
    block_ids: list[list[int]]


@dataclass(slots=True)
class Store:
    """A message of the scheduler: store blocks of one group in the tiers. Block `block_ids[i]` has the hash
    `hashes[i]`.
    """

    group: int
    hashes: list[bytes]
    block_ids: list[int]


@dataclass
class Step(KVConnectorMetadata):
    """The message of the scheduler to every worker for one step. `ended` are the ids of requests whose leased pages are
    no longer needed.
    """

    lookups: list[Lookup] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    tokens: int = 0
    """Number of tokens that the step computes."""


@dataclass(slots=True)
class Answer:
    """The answer of one worker to the lookup `number`. `positions` are the positions at which the request can resume
    with the pages that this worker has leased in host memory. An empty list means a miss.
    """

    request_id: str
    number: int
    positions: list[int]


class Change(NamedTuple):
    """A tier has stored a page (`is_stored`), or removed it. `medium` is the kind of tier, as in vLLM's events."""

    medium: str
    is_stored: bool
    group: int
    block_hash: bytes


@dataclass
class Answers(KVConnectorWorkerMetadata):
    """The message of the workers to the scheduler after a step. Only one worker reports changes of tiers."""

    answers: list[Answer] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Answers)
        return Answers(self.answers + other.answers, self.changes + other.changes)
