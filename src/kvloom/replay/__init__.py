"""Replays recorded traffic through the real cache core, to find hit rates, cache sizes and waiting times.

command.py       `kvloom replay`
traces.py        reads public trace formats
recording.py     reads recordings of `kvloom serve --record`
traffic.py       Traffic: requests as block numbers and times
simulator.py     replay: traffic through the core under a policy
tier_rules.py    which blocks tiers store and evict
fleet.py         replay_fleet: traffic over several simulated workers, which the real router's scoring chooses
fleet_plan.py    plan_fleet: how many workers a trace needs, and in which roles
routes.py        names of the ways to choose workers and to refuse requests
bounds.py        upper bounds: unlimited cache, and Belady's MIN
sizing.py        size_cache: the capacity that a hit rate needs
cost.py          estimate: waiting times on given hardware
plot.py          hit-rate curves
"""

from .cost import CostModel, Load, estimate
from .recording import Recorder
from .simulator import NAMES, Outcome, Tier, TierUse, replay
from .sizing import Sizing, size_cache
from .tier_rules import TIER_RULES
from .traces import read_traces
from .traffic import Request, Traffic, number_blocks

__all__ = [
    "NAMES",
    "TIER_RULES",
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
    "number_blocks",
    "read_traces",
    "replay",
    "size_cache",
]
