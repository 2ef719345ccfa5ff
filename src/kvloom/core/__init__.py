"""The bookkeeping of one cache for all layer kinds. Imports only numpy: no torch, no I/O.

    kv_cache     KVCache, the interface of a scheduler
    state        CacheState, the components of a cache
    sequences/   operations on sequences: open, extend, commit, fork, rollback
    loading/     load plans, reservations, offloading (`cache.loading`)
    inspect/     counters, integrity check, pool map (`cache.inspect`)
    allocator    makes pages free: evicts and compacts
    prefix/      the prefix cache: radix tree, lookup, block hashes, pins
    eviction/    policies, eviction queues, tenants
    pool/        slabs, pages, block tables, compaction
    layout/      layer specs, page groups, slab size
    slo          SLO admission: predicts TTFT and TBT, and admits, defers or refuses
    events       events about stored and removed blocks
    control      caching options and objective of a request, checkpoint policy of a cache
    clock, histogram, sizes      small helpers

Other packages import only the names below, and only from this package.
"""

from .clock import Clock, VirtualClock, WallClock
from .control import PUBLIC_TENANT, CacheControl, CheckpointPolicy, Objective, RetainRange
from .events import BlockRemoved, BlockStored, Event, EventBus
from .eviction import (
    DEFAULT_POLICY,
    POLICIES,
    Account,
    Cost,
    Entry,
    Policy,
    Tenant,
    make_policy,
)
from .histogram import SECONDS, Histogram
from .inspect import PoolMap
from .kv_cache import KVCache
from .layout import (
    DTYPE_BYTES,
    HASH_TOKENS,
    MAX_WASTE,
    PROMPT,
    QUANTISED,
    WHOLE,
    ContextPart,
    Field,
    LayerSpec,
    Order,
    PageGroup,
    PageRange,
    PoolLayout,
    TensorPart,
    Visibility,
    attention_fields,
    divided_specs,
)
from .loading import Loading, LoadPlan, MissingPages, TierQuery
from .pool import CopyBatch, Ids, PagePool, plain_ids, unwatched
from .prefix import (
    HASH_BYTES,
    MISS_REASONS,
    NOT_CACHED,
    TOKEN_BYTES,
    BlockHash,
    HashIndex,
    Match,
    Media,
    Miss,
    OffloadBatch,
    Pin,
    QueuedPrefix,
    Reservation,
    activation_mark,
    hash_chain,
    private_mark,
    public_length,
    public_root_hash,
    root_hash,
    tail_hash,
    token_bytes,
    unit_hashes,
)
from .sequences import ColdRun, Sequence
from .sizes import format_bytes, parse_size
from .slo import (
    RATIOS,
    Backlog,
    Decision,
    Decoding,
    Prediction,
    PromptWork,
    SloAdmission,
    StepSize,
    StepTimes,
    Verdict,
)

__all__ = [
    "DEFAULT_POLICY",
    "DTYPE_BYTES",
    "HASH_BYTES",
    "HASH_TOKENS",
    "MAX_WASTE",
    "MISS_REASONS",
    "NOT_CACHED",
    "POLICIES",
    "PROMPT",
    "PUBLIC_TENANT",
    "QUANTISED",
    "RATIOS",
    "SECONDS",
    "TOKEN_BYTES",
    "WHOLE",
    "Account",
    "Backlog",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "CacheControl",
    "CheckpointPolicy",
    "Clock",
    "ColdRun",
    "ContextPart",
    "CopyBatch",
    "Cost",
    "Decision",
    "Decoding",
    "Entry",
    "Event",
    "EventBus",
    "Field",
    "HashIndex",
    "Histogram",
    "Ids",
    "KVCache",
    "LayerSpec",
    "LoadPlan",
    "Loading",
    "Match",
    "Media",
    "Miss",
    "MissingPages",
    "Objective",
    "OffloadBatch",
    "Order",
    "PageGroup",
    "PagePool",
    "PageRange",
    "Pin",
    "Policy",
    "PoolLayout",
    "PoolMap",
    "Prediction",
    "PromptWork",
    "QueuedPrefix",
    "Reservation",
    "RetainRange",
    "Sequence",
    "SloAdmission",
    "StepSize",
    "StepTimes",
    "Tenant",
    "TensorPart",
    "TierQuery",
    "Verdict",
    "VirtualClock",
    "Visibility",
    "WallClock",
    "activation_mark",
    "attention_fields",
    "divided_specs",
    "format_bytes",
    "hash_chain",
    "make_policy",
    "parse_size",
    "plain_ids",
    "private_mark",
    "public_length",
    "public_root_hash",
    "root_hash",
    "tail_hash",
    "token_bytes",
    "unit_hashes",
    "unwatched",
]
