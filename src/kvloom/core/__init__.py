"""The bookkeeping of one cache for every kind of layer. No torch, no I/O: numpy at most.

The engine, the simulator and the router all import this, and only what is named here.
"""

from .arrivals import Arrival
from .cache import KVCache
from .clock import Clock, VirtualClock, WallClock
from .copies import CopyBatch
from .events import Dropped, Event, EventBus, Moved, Stored
from .hints import Foreseen, Pin
from .layers import DTYPE_BYTES, PROMPT, Field, LayerSpec, Span, attention_fields
from .layout import GRAIN, MAX_WASTE, PageGroup, PoolLayout
from .lookup import ABSENT, REASONS, Match, Stop
from .media import Media
from .names import NAME_BYTES, NameIndex, chain, root_name, tail_name
from .parcels import Parcel
from .policies import POLICIES, Cost, Entry, Policy, make_policy
from .pool import PagePool
from .prospect import Need, Prospect, Question
from .sequence import Control, Retain, Sequence, Snapshots
from .tenants import Tenant

__all__ = [
    "ABSENT",
    "DTYPE_BYTES",
    "GRAIN",
    "MAX_WASTE",
    "NAME_BYTES",
    "POLICIES",
    "PROMPT",
    "REASONS",
    "Arrival",
    "Clock",
    "Control",
    "CopyBatch",
    "Cost",
    "Dropped",
    "Entry",
    "Event",
    "EventBus",
    "Field",
    "Foreseen",
    "KVCache",
    "LayerSpec",
    "Match",
    "Media",
    "Moved",
    "NameIndex",
    "Need",
    "PageGroup",
    "PagePool",
    "Parcel",
    "Pin",
    "Policy",
    "PoolLayout",
    "Prospect",
    "Question",
    "Retain",
    "Sequence",
    "Snapshots",
    "Span",
    "Stop",
    "Stored",
    "Tenant",
    "VirtualClock",
    "WallClock",
    "attention_fields",
    "chain",
    "make_policy",
    "root_name",
    "tail_name",
]
