"""The bookkeeping of one cache for every kind of layer. No torch, no I/O: numpy at most.

The engine, the simulator and the router all import this, and only what is named here.
"""

from .clock import Clock, VirtualClock, WallClock
from .events import BlockMoved, BlockRemoved, BlockStored, Event, EventBus
from .eviction.policies import POLICIES, Cost, Entry, Policy, make_policy
from .eviction.tenants import Tenant
from .kv_cache import KVCache
from .layout.layer_spec import DTYPE_BYTES, PROMPT, Field, LayerSpec, Visibility, attention_fields
from .layout.pool_layout import HASH_TOKENS, MAX_WASTE, PageGroup, PoolLayout
from .loading.load_plan import LoadPlan, MissingPages, TierQuery
from .loading.reservation import Reservation
from .lookup import MISS_REASONS, NOT_CACHED, Match, Miss
from .pool.page_pool import PagePool
from .pool.pending_copies import CopyBatch
from .prefix.block_hash import HASH_BYTES, HashIndex, hash_chain, root_hash, tail_hash
from .prefix.multimodal import Media
from .prefix.offload_batch import OffloadBatch
from .sequences.pins import Pin, QueuedPrefix
from .sequences.sequence import CacheControl, CheckpointPolicy, RetainRange, Sequence

__all__ = [
    "DTYPE_BYTES",
    "HASH_BYTES",
    "HASH_TOKENS",
    "MAX_WASTE",
    "MISS_REASONS",
    "NOT_CACHED",
    "POLICIES",
    "PROMPT",
    "BlockMoved",
    "BlockRemoved",
    "BlockStored",
    "CacheControl",
    "CheckpointPolicy",
    "Clock",
    "CopyBatch",
    "Cost",
    "Entry",
    "Event",
    "EventBus",
    "Field",
    "HashIndex",
    "KVCache",
    "LayerSpec",
    "LoadPlan",
    "Match",
    "Media",
    "Miss",
    "MissingPages",
    "OffloadBatch",
    "PageGroup",
    "PagePool",
    "Pin",
    "Policy",
    "PoolLayout",
    "QueuedPrefix",
    "Reservation",
    "RetainRange",
    "Sequence",
    "Tenant",
    "TierQuery",
    "VirtualClock",
    "Visibility",
    "WallClock",
    "attention_fields",
    "hash_chain",
    "make_policy",
    "root_hash",
    "tail_hash",
]
