"""What the API's process and the engine's process tell each other, and how it stands on the wire. Data; nothing is pickled.

    API    ──▶ engine    Start (once, first), Add, Cancel, ExpectSession, EndSession, Look
    engine ──▶ API       Ready or Failed (once), then Outputs: everything a step brought, in one message; Beat, all the time

A message is msgpack behind its length, four bytes. Log-probabilities are triples of token, value and rank.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from kvloom.engine import SamplingParams

__all__ = [
    "HEADER_BYTES",
    "Add",
    "Beat",
    "Cancel",
    "Delta",
    "EndSession",
    "ExpectSession",
    "Failed",
    "FromEngine",
    "Look",
    "Outputs",
    "Ready",
    "Refused",
    "Start",
    "Stats",
    "Story",
    "TenantRules",
    "TenantUse",
    "TierUse",
    "ToEngine",
    "TokenTold",
    "frame",
    "length_of",
]

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size

TokenTold = tuple[int, float, int]
"""A token, its log-probability, and its place among all."""


class TenantRules(msgspec.Struct, frozen=True, array_like=True):
    """A tenant's name, the most bytes of the pool it may use, and its share of a full pool: see `core.Tenant`."""

    name: str
    quota: int | None = None
    weight: float = 0.0
    firm: bool = True


class Start(msgspec.Struct, frozen=True, tag=True):
    """What the engine is to be. `pool_bytes` None: what `memory_fraction` of the device leaves; `cpu_dtype` is what "auto"
    means on a CPU, if not the checkpoint's own; `threads` None: as engine/threads.py has it; `progress` shows bars; without
    `observe` the engine tells no stats and no stories. `grammar_seconds` and `grammar_memory` are the limits of one grammar."""

    model: str
    dtype: str = "auto"
    cpu_dtype: str = "auto"
    kv_dtype: str | None = None
    kv_scales: str = "dynamic"
    batch_invariant: bool = False
    tiers: tuple[str, ...] = ()
    device: str | None = None
    load_format: Literal["auto", "random"] = "auto"
    pool_bytes: int | None = None
    memory_fraction: float = 0.9
    token_budget: int | None = None
    max_running: int = 256
    threads: int | None = None
    tenants: tuple[TenantRules, ...] = ()
    progress: bool = False
    observe: bool = True
    grammar_seconds: float = 2.0
    grammar_memory: int = 256 << 20


class Add(msgspec.Struct, frozen=True, tag=True):
    """One prompt. Its answers carry `id`; with `stream` they come as they grow, else each when all have ended. What was
    computed under one `salt` is found under that alone. `ends_session`: nothing more comes of its session. `lossy`: pages that
    a tier re-encoded may serve it."""

    id: int
    prompt: list[int]
    params: SamplingParams
    stream: bool = False
    tenant: str = ""
    session: str | None = None
    priority: int = 0
    ttl: float | None = None
    store: bool = True
    read: bool = True
    salt: str = ""
    ends_session: bool = False
    lossy: bool = False


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a prompt's answers; nothing more is told of them. Unknown ids are those that have ended already."""

    id: int


class ExpectSession(msgspec.Struct, frozen=True, tag=True):
    """This session of a tenant is about to come back: its pages may be brought up before it asks."""

    tenant: str
    session: str


class EndSession(msgspec.Struct, frozen=True, tag=True):
    """What only this session of a tenant used may leave the cache first."""

    tenant: str
    session: str


class Look(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants to see the cache: the next outputs have its picture."""


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What is new of the `index`th answer to prompt `id`. Text may lag behind tokens. `cached` is how many of the prompt's
    tokens were found in the cache; `finish` comes with the last piece. `prompt` is told of the prompt's own tokens but the
    first, where that was asked for, with the first answer."""

    id: int
    index: int
    text: str
    tokens: list[int]
    cached: int = 0
    finish: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[list[TokenTold]] | None = None
    prompt: list[list[TokenTold]] | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that can never run, and why; `busy`: it may run later."""

    id: int
    why: str
    busy: bool = False


class Story(msgspec.Struct, frozen=True, array_like=True):
    """How a prompt went so far: told when it begins, when its first token is there, and when it has ended. Times are those
    of the machine's monotonic clock, 0 where it has not come to that. `hits` are tokens found, by tier; `reason` (one of
    the core's REASONS) says why they end at token `stop`: what had left did so at `left`, by `policy`. `elsewhere`: another
    tenant has more of this prompt. `loads` are those from lower tiers: which, from when to when, how many tokens."""

    id: int
    looked_up: float
    began: float
    first: float
    cached: int
    hits: dict[str, int]
    stop: int
    reason: str
    left: float | None = None
    policy: str | None = None
    elsewhere: bool = False
    preemptions: int = 0
    loads: list[tuple[str, float, float, int]] = []


Counts = tuple[list[int], float]
"""A core Spread's counts, and the sum of its values."""


class TenantUse(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the pool that a tenant uses, and of them holds; tokens it looked up and found; its entries that left; its
    requests that run and wait."""

    used: int = 0
    held: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    running: int = 0
    waiting: int = 0


class TierUse(msgspec.Struct, frozen=True, array_like=True):
    """A lower tier: what it holds, and objects and bytes that went through it. `breaker` is "closed" while it is used, "open"
    while it is left alone after faults, "half-open" while it is tried again."""

    name: str
    objects: int = 0
    bytes: int = 0
    capacity: int = 0
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    bytes_read: int = 0
    bytes_written: int = 0
    evicted: int = 0
    breaker: str = "closed"


class Stats(msgspec.Struct, frozen=True):
    """Counters of the engine and its cache; they begin again when it is restarted. `fragmented_bytes` are free pages in slabs
    that are lent, `unused_tokens` have room and are not computed. `stops` are lookups by why they ended, `evicted` evictions by what left, `hit_pages` pages found by kind of layers; `idle` and `reused`
    are spreads of seconds. `lower` are counts of what was brought from tiers, `faults` what went wrong there: tier, verb, outcome."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    slabs: int = 0
    free_slabs: int = 0
    held_pages: int = 0
    cached_pages: int = 0
    held_bytes: int = 0
    cached_bytes: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    moved_pages: int = 0
    nodes: int = 0
    fragmented_bytes: int = 0
    unused_tokens: int = 0
    steps: int = 0
    output_tokens: int = 0
    stops: dict[str, int] = {}
    evicted: dict[str, int] = {}
    hit_pages: dict[str, int] = {}
    idle: Counts = ([], 0.0)
    reused: Counts = ([], 0.0)
    tenants: dict[str, TenantUse] = {}
    tiers: list[TierUse] = []
    lower: dict[str, int] = {}
    faults: list[tuple[str, str, str, int]] = []


class Outputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What one step brought. `stats` come now and then, and whenever the engine falls idle; `picture` is JSON, for those who
    asked to look."""

    deltas: list[Delta] = []
    refused: list[Refused] = []
    stats: Stats | None = None
    picture: bytes | None = None
    stories: list[Story] = []


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded. `longest` is the most tokens one request can have, prompt and answer together, and
    `tenants_longest` what that is for tenants with a quota. `tiers` are those below the pool: name, capacity and pages that
    are there already; `left_out` those that could not be opened, and why."""

    device: str
    dtype: str
    vocabulary: int
    longest: int
    tenants_longest: dict[str, int]
    pool_bytes: int
    slab_bytes: int
    block_tokens: int
    bytes_per_token: int
    layout: list[dict[str, Any]]
    seconds: float
    tiers: list[tuple[str, int, int]] = []
    left_out: list[tuple[str, str]] = []


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot be loaded, and trying again would not help."""

    why: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The engine's process runs, and is in its `step`th step; 0 while it loads or has nothing to do."""

    step: int = 0


ToEngine = Start | Add | Cancel | ExpectSession | EndSession | Look
FromEngine = Ready | Failed | Outputs | Beat

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it stands on the wire."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """How many bytes of body follow a header."""
    return int(_LENGTH.unpack(header)[0])
