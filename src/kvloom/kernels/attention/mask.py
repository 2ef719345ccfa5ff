"""`Mask`: the tokens that a query may see; and the numbers of layer kinds inside kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.core import Visibility

__all__ = ["FULL", "SPAN_NUMBERS", "Mask"]

FULL = Visibility("full")
SPAN_NUMBERS = {"full": 0, "sliding": 1, "chunked": 2}
"""Numbers of layer kinds inside kernels (`triton_mask.first_visible`). Above 0, a query may not see every earlier token."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Visible tokens of a query, and changes to its scores.

    `sinks` ([heads]) are logits that take part in the softmax and have no value. `trees` ([queries, longest]) marks
    the draft tokens that each query sees among its sequence's queries. `spans` ([queries]) are image ids, -1 for
    text: queries of the same image see each other in both directions."""

    span: Visibility = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    trees: torch.Tensor | None = None
    spans: torch.Tensor | None = None
