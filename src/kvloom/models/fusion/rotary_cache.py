"""Reads cos and sin of rotary embeddings from a table, which saves launches on a GPU.

The rotary embedding itself computes the table. A step reads the entries of its positions. If the angles depend on
more than position and layer kind, the embedding is not replaced.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

__all__ = ["RotaryCache", "fuse_rotary_embedding"]

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose angles depend on the largest position of a call."""
TABLE_CHUNK = 16384


class RotaryCache:
    """Replaces the `forward` of a rotary embedding. Reads cos and sin of positions below `limit` from a table, instead
    of computing them."""

    def __init__(self, module: Any, limit: int, kinds: list[tuple[str, ...]], like: torch.Tensor) -> None:
        """`kinds` lists the extra arguments (layer kinds) that a call may have. Each kind has one table of 2 * head
        dim * limit numbers. The tables have the dtype and device of the tensor `like`."""
        self.own, self.limit = module.forward, limit
        self._tables = {kind: self._table(like, kind) for kind in kinds}

    def _table(self, like: torch.Tensor, kind: tuple[str, ...]) -> torch.Tensor:
        """Return cos and sin of every position: [positions, 2, dim]. `kind` has the extra arguments of the rotary
        embedding."""
        pieces = []
        for first in range(0, self.limit, TABLE_CHUNK):
            places = torch.arange(first, min(first + TABLE_CHUNK, self.limit), device=like.device)
            cos, sin = self.own(like, places[None], *kind)
            pieces.append(torch.stack((cos[0], sin[0]), 1))
        return torch.cat(pieces)

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._tables.get((*more, *named.values()))
        if table is None or table.dtype != x.dtype or position_ids.dim() != 2 or len(position_ids) != 1:
            return self.own(x, position_ids, *more, **named)  # type: ignore[no-any-return]
        rows = table.index_select(0, position_ids[0])[None]
        return rows[:, :, 0], rows[:, :, 1]


def fuse_rotary_embedding(module: Any, limit: int, like: torch.Tensor) -> bool:
    """Replace a rotary embedding by a table of `limit` positions if the table gives the same values. Return whether
    the embedding was replaced. The table has the dtype and device of the tensor `like`. A shorter table from an
    earlier call is extended.
    """
    if not type(module).__name__.endswith("RotaryEmbedding"):
        return False
    known = vars(module).get("forward")
    if isinstance(known, RotaryCache):
        if known.limit >= limit:
            return False
        module.forward = known.own
    types = getattr(module, "rope_type", "default")
    kinds: list[tuple[str, ...]] = [()]
    if isinstance(types, dict):
        kinds = [(kind,) for kind in types]
        types = " ".join(map(str, types.values()))
    names = list(signature(module.forward).parameters)
    wanted = ["x", "position_ids", *(["layer_type"] if kinds != [()] else [])]
    if any(way in str(types) for way in LENGTH_DEPENDENT) or names != wanted:
        return False
    some = torch.randint(0, limit, (1, 5), generator=torch.Generator().manual_seed(limit)).to(like.device)
    try:
        found = RotaryCache(module, limit, kinds, like)
        for kind in kinds:
            mine, own = found(like, some, *kind), module.forward(like, some, *kind)
            if not all(torch.equal(a, b) for a, b in zip(mine, own, strict=True)):
                return False
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # the embedding has other arguments or results, so it is not changed
    module.forward = found
    return True
