"""Transfers between host memory and the other tiers.

transfer_manager.py   TransferManager: lookup, fetch, write to tiers
tier_queue.py         one queue and thread per tier
queue_items.py        lookups, loads and batches in a queue
throughput.py         measured throughput of a tier
circuit_breaker.py    stops requests to a failing tier; logs faults
open_tiers.py         opens configured tiers
unavailable_tier.py   stand-in for a tier that cannot be opened yet
"""

from .circuit_breaker import CircuitBreaker, CircuitBreakerConfig, FaultLog
from .open_tiers import open_required, open_tiers
from .throughput import Throughput
from .tier_queue import TierQueue, TierQueueConfig
from .transfer_manager import FetchJob, TierLookup, TransferConfig, TransferManager
from .unavailable_tier import UnavailableTier

__all__ = [
    "CircuitBreaker",
    "CircuitBreakerConfig",
    "FaultLog",
    "FetchJob",
    "Throughput",
    "TierLookup",
    "TierQueue",
    "TierQueueConfig",
    "TransferConfig",
    "TransferManager",
    "UnavailableTier",
    "open_required",
    "open_tiers",
]
