"""Attention over pages wherever the tensors are: a plan made once a step, run by every layer.

| rows                      | on a GPU                            | on a CPU    |
|---------------------------|-------------------------------------|-------------|
| 1 to 64 queries each      | `decode.DecodePlan`, in CUDA graphs | the oracle  |
| any number of queries     | `prefill.PrefillPlan`               | `CpuPlan`   |

Both kinds take `make(starts, lengths)` and `attend(q, k, v, tables, …)`, and give what `reference.attend` gives.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvloom.core import Span

from .cascade import SharedRuns
from .cpu_plan import CpuPlan, ReferencePlan
from .mask import FULL, Mask
from .shape import Shape

__all__ = ["Plan", "decode_plan", "prefill_plan"]


class Plan(Protocol):
    """What a step's attention looks like to a layer."""

    shape: Shape
    span: Span

    def make(self, starts: Any, lengths: Any) -> None:
        """Take the step's rows: where their queries begin in q ([rows + 1]), and their lengths with those included."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: torch.Tensor,
        mask: Mask | None = None,
        scale: float | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        new_k: torch.Tensor | None = None,
        new_v: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs [queries, heads, v_dim] and the natural log-sum-exp of scores [queries, heads], or None for it where
        it would cost something and no `lse` was given to fill. `new_k` and `new_v` are
        the new tokens' keys and values as they were written to the pages: whoever can spares reading them there."""
        ...


def decode_plan(
    shape: Shape,
    sequences: int,
    queries: int = 1,
    span: Span = FULL,
    device: torch.device | str = "cuda",
    sharing: SharedRuns | None = None,
) -> Plan:
    """A plan for up to `sequences` rows of up to `queries` query tokens; `starts` and `lengths` are int32 tensors on
    the device. On a CPU nothing is shared: it reads what it needs and gives the same."""
    if torch.device(device).type == "cpu":
        return ReferencePlan(shape, span)
    from .decode import DecodePlan

    return DecodePlan(shape, sequences, queries, span, device, sharing)


def prefill_plan(shape: Shape, span: Span = FULL, device: torch.device | str = "cuda") -> Plan:
    """A plan for rows of any number of queries; `starts` and `lengths` are the host's."""
    if torch.device(device).type == "cpu":
        return CpuPlan(shape, span)
    from .prefill import PrefillPlan

    return PrefillPlan(shape, span, device)
