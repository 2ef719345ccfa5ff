"""The router: one OpenAI endpoint over many workers.

fleet_index.py    which worker has which blocks, by medium: filled from events
scoring.py        the choice of a worker: expected time to first token and more
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
