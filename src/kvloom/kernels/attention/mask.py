"""`Mask` describes the tokens that a query may see. `SPAN_NUMBERS` maps each layer kind to its number inside
kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvloom.core import WHOLE, ContextPart, Visibility

__all__ = ["FULL", "SPAN_NUMBERS", "Mask"]

FULL = Visibility("full")
SPAN_NUMBERS = {"full": 0, "sliding": 1, "chunked": 2}
"""Number of each layer kind inside kernels (`triton_mask.first_visible`). Kinds above 0 hide some earlier tokens."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The tokens that each query sees, and changes to its scores.

    | field                               | meaning                                                             |
    |-------------------------------------|---------------------------------------------------------------------|
    | `span`                              | visibility rule of the layer                                        |
    | `softcap`                           | limit of the scores' absolute value                                 |
    | `sinks` ([heads])                   | logits that count in the softmax but have no value vector           |
    | `spans` ([queries])                 | image ids, -1 for text; queries of the same image see each other in |
    |                                     | both directions                                                     |
    | `trees` ([queries, longest], uint8) | draft trees                                                         |
    | `part`                              | the tokens that the pages contain, if another rank has the others   |

    `trees[i, j]` is 0 if query i does not see query j of its own sequence. Otherwise it is 1 plus the position
    of query j, counted from the first query of the sequence. Every query sees itself. Branches of a tree have
    the same positions, but different slots. Windows count positions, not slots.

    With a `part`, a query sees only tokens in these pages. The lengths of sequences still count all tokens. The GPU
    kernels support parts with full attention, without trees. No plan supports parts with images.
    """

    span: Visibility = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    trees: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    part: ContextPart = WHOLE
