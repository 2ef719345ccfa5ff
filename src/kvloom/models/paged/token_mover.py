"""Moves accepted tokens of draft trees to the slots where plain decoding writes them.

    slots before   | last | d1 | d2 | d3 | d4 |     accepted: d2, d4
    slots after    | last | d2 | d4 |    …    |

A token of a tree is written to the slot of its index in the tree, but its position follows from its depth. Before
accepted tokens are committed, their bytes move to the slots of their positions, in every layer of every group. Pages
are therefore the same as without speculation. If ranks divide the context, a token may move to another rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import KVCache, PageGroup
from kvloom.kernels.device import upload
from kvloom.kernels.memory import layer_views
from kvloom.models.sharding import Ranks

__all__ = ["TokenMover"]

Ints = npt.NDArray[np.int64]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TokenMover:
    """Moves tokens inside the sequences of one cache. `buffer` is the pool. With context parallelism, `ranks` are the
    ranks that divide the context."""

    def __init__(self, cache: KVCache, buffer: torch.Tensor, ranks: Ranks | None = None) -> None:
        self._cache, self._device, self._ranks = cache, buffer.device, ranks
        self._fields: list[tuple[PageGroup, list[torch.Tensor]]] = []
        """The fields of each group: [pages, layers, tokens, ...]."""
        views = layer_views(buffer, cache.layout)
        for group in cache.layout.of("token"):
            first = views[group.layers[0]].fields.values()
            self._fields.append((group, [_all_layers(field, group) for field in first]))

    def places(self, rows: Ints, sources: Ints, targets: Ints) -> list[Ints]:
        """For each group of layers, return the places of tokens that move inside their sequences. A place is a page
        and an index in its block. Each token has a place before the move and a place after it. Token i moves from
        index `sources[i]` to index `targets[i]` of the sequence in row `rows[i]` of the block tables."""
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
        """Copy tokens, all at once. `places` is a result of `places`, here or on another rank. Does not wait for the
        device. The number of launches does not depend on the number of layers. If ranks divide the context, all of them
        must make this call, which makes one collective call for each divided group."""
        for (group, fields), group_places in zip(self._fields, places, strict=True):
            if group.parts > 1:
                self._move_between_ranks(group, fields, group_places)
                continue
            from_page, from_place, to_page, to_place = upload(group_places, self._device)
            for field in fields:
                field[to_page, :, to_place] = field[from_page, :, from_place]

    def _move_between_ranks(self, group: PageGroup, fields: list[torch.Tensor], places: Ints) -> None:
        """Copy tokens of a group whose blocks are divided between ranks. Every rank gets the bytes of all moved tokens,
        and writes those that it stores after the move."""
        assert self._ranks is not None
        from_page, from_place, to_page, to_place = places
        owner, place = np.divmod(from_place, group.page_tokens)
        moved = upload(np.stack((from_page, place)), self._device)
        read = [
            field[moved[0], :, moved[1]] for field in fields
        ]  # bytes of other tokens if another rank has them
        sizes = [each[0].numel() * each.element_size() for each in read]
        every = self._ranks.gather(torch.cat([_as_bytes(each) for each in read], 1))
        found = every[upload(owner, self._device), torch.arange(len(owner), device=self._device)]
        new_owner, place = np.divmod(to_place, group.page_tokens)
        own = np.flatnonzero(new_owner == self._ranks.shard.rank)
        chosen, pages, inside = upload(np.stack((own, to_page[own], place[own])), self._device)
        for field, like, part in zip(fields, read, torch.split(found, sizes, 1), strict=True):
            field[pages, :, inside] = part[chosen].contiguous().view(field.dtype).view(-1, *like.shape[1:])


def _as_bytes(tokens: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each token: [tokens, bytes]."""
    return tokens.contiguous().view(len(tokens), -1).view(torch.uint8)


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
