"""What a query may see: `Mask`, and the numbers by which kernels know layer kinds. Knows no shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.core import Visibility

__all__ = ["FULL", "SPAN_NUMBERS", "Mask"]

FULL = Visibility("full")
SPAN_NUMBERS = {"full": 0, "sliding": 1, "chunked": 2}
"""Numbers of layer kinds inside kernels (`triton_mask.first_visible`); above 0 a query may not see every earlier token."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Visible tokens of a query, and changes to its scores.

    `sinks` ([heads]) are logits that take part in the softmax and have no value. `trees` ([queries, longest]) marks the draft
    tokens that each query sees among its sequence's queries. `spans` ([queries]) joins the queries of an image, which see
    each other in both directions: equal ids, -1 for text.
    """

    span: Visibility = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    trees: torch.Tensor | None = None
    spans: torch.Tensor | None = None
