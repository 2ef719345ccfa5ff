"""What a query may see, and how the kernels know it: the one place where a layer kind meets its mask rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.core import Span

__all__ = ["FULL", "SPAN_NUMBERS", "Mask"]

FULL = Span("full")
SPAN_NUMBERS = {"full": 0, "sliding": 1, "chunked": 2}
"""Numbers of layer kinds inside kernels (`triton_mask.first_visible`); above 0 a query may not see every earlier token."""


@dataclass(frozen=True, slots=True)
class Mask:
    """What a query sees and how its scores are shaped.

    `sinks` ([heads]) are logits that take part in the softmax and carry no value. `trees` ([queries, longest])
    allows the draft tokens each query may see among its sequence's own queries, for draft trees. `spans`
    ([queries]) joins the queries of one image, which see each other both ways: equal ids, -1 for text.
    """

    span: Span = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    trees: torch.Tensor | None = None
    spans: torch.Tensor | None = None
