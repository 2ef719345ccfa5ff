"""Moves accepted tokens of draft trees to the slots where plain decoding writes them.

    slots before   | last | d1 | d2 | d3 | d4 |     accepted: d2, d4
    slots after    | last | d2 | d4 |    …    |

A token of a tree is written to the slot of its index in the tree, but its position follows from its depth. Before
accepted tokens are committed, their bytes move to the slots of their positions, in every layer of every group. Pages
are therefore the same as without speculation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import KVCache, PageGroup
from kvloom.kernels.device import upload
from kvloom.kernels.memory import layer_views

__all__ = ["TokenMover"]

Ints = npt.NDArray[np.int64]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TokenMover:
    """Moves tokens inside the sequences of one cache. `buffer` is the pool."""

    def __init__(self, cache: KVCache, buffer: torch.Tensor) -> None:
        self._cache, self._device = cache, buffer.device
        self._fields: list[tuple[PageGroup, list[torch.Tensor]]] = []
        """The fields of each group: [pages, layers, tokens, ...]."""
        views = layer_views(buffer, cache.layout)
        for group in cache.layout.of("token"):
            first = views[group.layers[0]].fields.values()
            self._fields.append((group, [_all_layers(field, group) for field in first]))

    def places(self, rows: Ints, sources: Ints, targets: Ints) -> list[Ints]:
        """Return the places of tokens that move inside their sequences, for each group of layers. A place is a page and
        an index in the page, before and after the move. Token i moves from index `sources[i]` to index `targets[i]` of
        the sequence in row `rows[i]` of the block tables.
        """
        block = self._cache.block_tokens
        tables = self._cache.page_tables
        found = []
        for group, _ in self._fields:
            columns = np.arange(group.column, group.column + group.runs)[:, None]
            parts = []
            for tokens in (sources, targets):
                parts.append(tables[columns, rows, tokens // block].reshape(-1))
                parts.append(np.tile(tokens % block, group.runs))
            found.append(np.stack([part.astype(np.int64) for part in parts]))
        return found

    def move(self, places: Sequence[Ints]) -> None:
        """Move tokens, all at once. `places` is the result of the method `places`, of this object or of the one on
        another rank. Does not wait for the device. The number of launches does not depend on the number of layers.
        """
        for (_, fields), group_places in zip(self._fields, places, strict=True):
            from_page, from_place, to_page, to_place = upload(group_places, self._device)
            for field in fields:
                field[to_page, :, to_place] = field[from_page, :, from_place]


def _all_layers(field: torch.Tensor, group: PageGroup) -> torch.Tensor:
    """Return a view of one field in all layers that share a page. `field` is the view of the first layer. The result
    has an integer dtype, because not all devices can index fp8."""
    field = field.view(_INTEGERS[field.element_size()])
    step = group.layer_bytes // field.element_size()
    return field.as_strided(
        (field.shape[0], group.run_layers, *field.shape[1:]),
        (field.stride(0), step, *field.stride()[1:]),
        field.storage_offset(),
    )
