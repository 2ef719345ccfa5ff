"""Recorded traffic through the real cache core: hit rates, sizes, waiting times."""

from .cost import CostModel, Load, estimate
from .recording import Recorder
from .simulator import NAMES, Outcome, Tier, TierUse, replay
from .sizing import Sizing, size_cache
from .traces import read_traces
from .traffic import Request, Traffic

__all__ = [
    "NAMES",
    "CostModel",
    "Load",
    "Outcome",
    "Recorder",
    "Request",
    "Sizing",
    "Tier",
    "TierUse",
    "Traffic",
    "estimate",
    "read_traces",
    "replay",
    "size_cache",
]
