"""The router: one OpenAI endpoint over many workers.

fleet_index.py    which worker has which blocks, and in which medium
scoring.py        chooses a worker, mainly by the expected time to first token
"""

from .fleet_index import FleetIndex, Group
from .scoring import Choice, Scorer, ScoringOptions, SpeedModel, WorkerLoad

__all__ = [
    "Choice",
    "FleetIndex",
    "Group",
    "Scorer",
    "ScoringOptions",
    "SpeedModel",
    "WorkerLoad",
]
