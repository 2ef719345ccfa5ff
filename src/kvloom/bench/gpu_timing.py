"""Times the calls of `kvloom bench kernels` as alternating replays of CUDA graphs. Also defines the rates of the
roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from .gpu_peers import Call

__all__ = ["COPY_RATE", "FLOP_RATE", "LINK_RATE", "READ_RATE", "Row", "agreement", "timed"]

READ_RATE = 4.55e12
COPY_RATE = 4.19e12
FLOP_RATE = 770e12
LINK_RATE = 55e9
"""The four constants are measured rates of an H200, in bytes or FLOPs per second: memory reads, memory copies, bf16
matrix products, and one direction of the host link.
"""


@dataclass
class Row:
    """One line of the report: microseconds of kvloom's call and of each peer's call, and the lower bound of the
    time."""

    section: str
    work: str
    floor_us: float
    us: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def ours(self) -> float:
        return self.us["kvloom"]

    @property
    def best_peer(self) -> float | None:
        return min((us for name, us in self.us.items() if not name.startswith("kvloom")), default=None)


def _captured(call: Call) -> Call:
    """Return the call as a CUDA graph, or unchanged if it cannot be captured."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def _replay(call: Call, times: int) -> float:
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(found))


def timed(calls: dict[str, Call], rounds: int = 5, times: int = 7) -> dict[str, float]:
    """Return the microseconds of each call. The calls alternate. In each of `rounds` rounds, each call runs `times`
    times. The result of a call is the smallest of its `rounds` medians.
    """
    graphs = {name: _captured(call) for name, call in calls.items()}
    best = dict.fromkeys(graphs, math.inf)
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            us = _replay(graph, times)
            if turn:  # the first round warms up
                best[name] = min(best[name], us)
    return best


def agreement(calls: dict[str, Call]) -> str:
    """Return a text with the relative difference between the results of the first two calls (kvloom and a peer). It
    shows whether both did the same work."""
    results = []
    for call in list(calls.values())[:2]:
        out = call()
        results.append((out[0] if isinstance(out, tuple) else out).float().reshape(-1))
    if len(results) < 2:
        return ""
    return f"differ by {float((results[0] - results[1]).norm() / results[1].norm()):.1e}"
