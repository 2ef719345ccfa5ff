"""Image embeddings in pages of the pool. They are a separate layer kind, found by content and evicted like other
pages.

    page [token 0 | token 1 | … | rest]      as large as a slab; contains as many whole tokens as fit

A page has the size of a slab, so the embeddings do not change the layout of other groups. A sequence retains an
image's pages while it computes the image's tokens. Afterwards they stay cached for the next prompt with that image.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvloom.core import PROMPT, Field, Ids, LayerSpec, PoolLayout
from kvloom.kernels.device import upload
from kvloom.kernels.memory import layer_views
from kvloom.models.paged import EMBEDDINGS

__all__ = ["Embeddings", "with_embeddings"]


def with_embeddings(layers: Mapping[str, LayerSpec], layout: PoolLayout, granularity: int = 16) -> PoolLayout:
    """Return `layout` with additional pages for embeddings. The slab size is a multiple of `granularity`."""
    block = layout.block_tokens
    spec = LayerSpec(
        "token", (Field("embedding", (layout.slab_bytes // block,), "int8"),), axis="media", lifetime=PROMPT
    )
    return PoolLayout.build({**layers, EMBEDDINGS: spec}, block, granularity)


class Embeddings:
    """The pages of a pool that contain embeddings with `hidden` numbers each."""

    def __init__(self, layout: PoolLayout, buffer: torch.Tensor, hidden: int, dtype: torch.dtype) -> None:
        pages = layer_views(buffer, layout)[EMBEDDINGS].fields["embedding"].flatten(1).view(dtype)
        self._hidden, self._block = hidden, layout.block_tokens
        self.each = pages.shape[1] // hidden
        """Number of embeddings in a page."""
        if not self.each:
            raise ValueError(
                f"an embedding of {hidden} numbers does not fit a page of {layout.slab_bytes:,} bytes: "
                "give block_tokens a larger number"
            )
        self._pages = pages[:, : self.each * hidden]

    def tokens(self, count: int) -> int:
        """Return for how many media tokens the cache must allocate pages, so that they have space for `count`
        embeddings. The cache allocates one page per block of media tokens, but a page may contain more or fewer
        embeddings than a block has tokens. The result is a multiple of the tokens of a block."""
        return -(-count // self.each) * self._block

    def write(self, rows: Ids, made: torch.Tensor) -> None:
        """Write `made`, the embeddings of an image ([tokens, hidden]), to the pages of the image. `rows` [pages, 1] has
        the page ids."""
        ids = upload(rows[:, 0].astype(np.int64), self._pages.device)
        whole = made.new_zeros((len(rows) * self.each, self._hidden))
        whole[: len(made)] = made
        self._pages.index_copy_(0, ids, whole.view(len(rows), -1))

    def read(self, rows: Ids, begin: int, end: int) -> torch.Tensor:
        """Return a copy of the embeddings [begin, end) of the image in the pages `rows` [pages, 1]."""
        first = begin // self.each
        some = rows[first : -(-end // self.each), 0].astype(np.int64)
        found = self._pages.index_select(0, upload(some, self._pages.device)).view(-1, self._hidden)
        return found[begin - first * self.each : end - first * self.each]
