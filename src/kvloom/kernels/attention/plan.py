"""The attention interface, for GPU and CPU tensors. A plan is made once per step, and every layer runs it.

| sequences with        | on a GPU                            | on a CPU        |
|-----------------------|-------------------------------------|-----------------|
| 1 to 64 queries       | `decode.DecodePlan`, in CUDA graphs | `ReferencePlan` |
| any number of queries | `prefill.PrefillPlan`               | `CpuPlan`       |

Every plan returns the same results as `reference.attend`. This module does not depend on the cache or on models.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvloom.core import WHOLE, ContextPart, Visibility

from .cascade import SharedRuns
from .cpu_plan import CpuPlan, ReferencePlan
from .mask import FULL, SPAN_NUMBERS, Mask
from .shape import Shape

__all__ = ["Plan", "decode_plan", "prefill_plan"]


class Plan(Protocol):
    """Computes attention for the layers of a step. `make` plans the step once. Every layer then calls `attend`."""

    shape: Shape
    span: Visibility

    def make(self, starts: Any, lengths: Any) -> None:
        """Set the sequences of the step. `starts` ([sequences + 1]) contains the index in q of each sequence's
        first query. `lengths` ([sequences]) is the number of tokens of each sequence, including its queries."""

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
        """Return outputs [queries, heads, v_dim] and the natural log-sum-exp of scores [queries, heads].

        A plan may return None for the log-sum-exp if no `lse` buffer is given. `new_k` and `new_v` are the keys and
        values of the new tokens, which are also in the pages. A plan may read either copy.
        """
        ...


def decode_plan(
    shape: Shape,
    sequences: int,
    queries: int = 1,
    span: Visibility = FULL,
    device: torch.device | str = "cuda",
    sharing: SharedRuns | None = None,
    part: ContextPart = WHOLE,
) -> Plan:
    """Return a plan for up to `sequences` sequences with up to `queries` query tokens each. `span` is the
    visibility rule of the layers. `part` is the part of each block that the pages contain. Masks must have the same
    part.

    On a GPU, the `starts` and `lengths` passed to `Plan.make` must be int32 tensors on the device. `sharing`
    has the page ranges that several sequences share. A GPU plan reads each range once. A CPU plan ignores
    `sharing`. Results are the same with and without it.
    """
    if torch.device(device).type == "cpu":
        return ReferencePlan(shape, span)
    _check_span(span)
    from .decode import DecodePlan

    return DecodePlan(shape, sequences, queries, span, device, sharing, part=part)


def prefill_plan(
    shape: Shape,
    span: Visibility = FULL,
    device: torch.device | str = "cuda",
    part: ContextPart = WHOLE,
) -> Plan:
    """Return a plan for sequences with any number of queries. The `starts` and `lengths` passed to `Plan.make` are
    arrays on the host. `part` is as in `decode_plan`."""
    if torch.device(device).type == "cpu":
        return CpuPlan(shape, span)
    _check_span(span)
    from .prefill import PrefillPlan

    return PrefillPlan(shape, span, device, part=part)


def _check_span(span: Visibility) -> None:
    """Raise ValueError for a visibility rule that the GPU kernels do not support."""
    if span.kind not in SPAN_NUMBERS or span.has_holes:
        raise ValueError(
            f"the GPU kernels do not support layers of kind {span}; they support {', '.join(SPAN_NUMBERS)}: "
            "run the model on a CPU, or add a mask rule (CONTRIBUTING.md)"
        )
