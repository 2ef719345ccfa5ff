"""Images' embeddings in pages of the pool: a kind of their own, named by content, evicted as everything else is.

    page   [token 0 | token 1 | … | rest]        as large as a slab, with as many tokens of an image as it holds whole

A page of the size of a slab leaves the layout of all other groups as it is. A sequence holds an image's pages while it computes
the image's tokens; the cache keeps them for the next prompt that shows it. Knows tensors; whose they are is `vision.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvloom.core import PROMPT, Field, Ids, LayerSpec, PoolLayout
from kvloom.kernels.shapes import upload
from kvloom.kernels.views import layer_views

__all__ = ["EMBEDDINGS", "Embeddings", "with_embeddings"]

EMBEDDINGS = "vision.embeddings"
"""The name of the layer, among those of a model."""


def with_embeddings(layers: Mapping[str, LayerSpec], layout: PoolLayout) -> PoolLayout:
    """The layout of these layers, `layout`, with pages for embeddings beside theirs."""
    block = layout.block_tokens
    spec = LayerSpec(
        "token", (Field("embedding", (layout.slab_bytes // block,), "int8"),), axis="media", lifetime=PROMPT
    )
    return PoolLayout.build({**layers, EMBEDDINGS: spec}, block)


class Embeddings:
    """The pages of a pool that embeddings of `hidden` numbers are in."""

    def __init__(self, layout: PoolLayout, buffer: torch.Tensor, hidden: int, dtype: torch.dtype) -> None:
        pages = layer_views(buffer, layout)[EMBEDDINGS].fields["embedding"].flatten(1).view(dtype)
        self._hidden, self._block = hidden, layout.block_tokens
        self.each = pages.shape[1] // hidden
        """Tokens of a page."""
        if not self.each:
            raise ValueError(
                f"an embedding of {hidden} numbers does not fit a page of {layout.slab_bytes:,} bytes: "
                "give block_tokens a larger number"
            )
        self._pages = pages[:, : self.each * hidden]

    def tokens(self, count: int) -> int:
        """What `count` embeddings take, in the cache's tokens: whole pages."""
        return -(-count // self.each) * self._block

    def write(self, rows: Ids, made: torch.Tensor) -> None:
        """Put an image's embeddings ([tokens, hidden]) into the pages of its run ([pages, 1])."""
        ids = upload(rows[:, 0].astype(np.int64), self._pages.device)
        whole = made.new_zeros((len(rows) * self.each, self._hidden))
        whole[: len(made)] = made
        self._pages.index_copy_(0, ids, whole.view(len(rows), -1))

    def read(self, rows: Ids, begin: int, end: int) -> torch.Tensor:
        """The embeddings [begin, end) of the image whose run this is; a copy."""
        first = begin // self.each
        some = rows[first : -(-end // self.each), 0].astype(np.int64)
        found = self._pages.index_select(0, upload(some, self._pages.device)).view(-1, self._hidden)
        return found[begin - first * self.each : end - first * self.each]
