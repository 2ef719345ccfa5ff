"""Scheduling: decides which requests run, and which tokens each step computes.

scheduler.py      Scheduler: picks the work of each step
waiting_queue.py  WaitingQueue: waiting requests in order, and those that wait for pages
admission.py      Admission: whether a request fits the pool, given the projected growth of running requests
slo_gate.py       SloGate: whether a request meets its objective; else it waits, or is refused
feasibility.py    Feasibility: refuses requests that can never run
document_reuse.py DocumentReuse: copies the K and V of documents instead of computing them
chunk_size.py     ChunkSize: prompt tokens of a step, for objectives of decoding requests
step_limit.py     StepLimit: tokens of a step that several tenants share
preemption.py     choose_victim: the running request that releases its pages
lookahead.py      Lookahead: protects cached pages of queued requests
"""

from .admission import Admission
from .document_reuse import DocumentReuse
from .feasibility import Feasibility
from .preemption import Scheduled
from .scheduler import Scheduler
from .slo_gate import SloGate
from .waiting_queue import WaitingQueue

__all__ = [
    "Admission",
    "DocumentReuse",
    "Feasibility",
    "Scheduled",
    "Scheduler",
    "SloGate",
    "WaitingQueue",
]
