"""MLA attention of long prompts, with expanded keys and values.

An MLA layer stores one latent per token. Keys and values of all heads are projections of the latent. There are two ways
to attend:

    absorbed   queries are projected into latent space, and read latents in pages (576 and 512 dims in DeepSeek)
    expanded   latents are projected to keys and values of each head (192 and 128 dims), which queries then read

Decode steps use the absorbed form, which reads few bytes. Long prompts use the expanded form, which needs a third of
the arithmetic. Expanded keys and values are temporary, and exist for a limited number of tokens at a time. If a
sequence has several parts, the results of the parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvloom.kernels.attention import attend_dense, merge_outputs
from kvloom.kernels.device import upload

__all__ = ["Absorbed", "ExpandedPlan", "absorb", "into_latent_space", "out_of_latent_space"]

MIN_QUERIES = 128
"""A sequence is expanded if its tokens are read by at least this many new tokens on average. Measured on an H200: with
fewer, the projection of its latents costs more time than it saves."""


def absorb(query: torch.Tensor, weight: torch.Tensor, rotated: int) -> torch.Tensor:
    """Return queries [tokens, heads, dim] in latent space. Their last `rotated` dims stay as they are. `weight` [heads,
    dims, rank] projects latents to keys and values."""
    plain, rest = torch.split(query, [query.shape[-1] - rotated, rotated], -1)
    return torch.cat((torch.einsum("thd,hdr->thr", plain, weight[:, : plain.shape[-1]]), rest), -1)


@torch.no_grad()
def into_latent_space(query: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply queries [tokens, heads, dim] by `weight`, the up-projection of keys [heads, dim, rank]. Writes the
    products to `out` [tokens, heads, rank]. All tensors may have any strides."""
    torch.bmm(query.transpose(0, 1), weight, out=out.transpose(0, 1))


@torch.no_grad()
def out_of_latent_space(
    found: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply `found`, the attention results in latent space [tokens, heads, rank], by `weight`, the up-projection of
    values [heads, dim, rank]. Return the products [tokens, heads, dim]. Writes to `out` if it is given."""
    if out is None:
        out = found.new_empty((*found.shape[:2], weight.shape[1]))
    torch.bmm(found.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries of the step (`queries`), and the tokens that these queries read. Both belong to one or more
    sequences.

    - `starts`: the index of each sequence's first query among the queries of the part.
    - `token_starts`: the index of each sequence's first token among the tokens of the part.
    - `rows`, `positions`: for each token, its row of the block table and its position in its sequence.
    - `merges`: an earlier part has the same queries. The results of both parts are merged.
    """

    queries: slice
    starts: list[int]
    token_starts: list[int]
    rows: torch.Tensor
    positions: torch.Tensor
    causal: bool
    merges: bool


@dataclass(frozen=True, slots=True)
class Absorbed:
    """The sequences of a step that are not expanded.

    - `queries` selects their queries in the step, and `rows` their rows of the block tables.
    - `bounds` has the index of each sequence's first query among the selected queries.
    - `lengths` has the number of tokens of each sequence.
    """

    bounds: tuple[int, ...]
    lengths: tuple[int, ...]
    queries: slice | torch.Tensor
    rows: slice | torch.Tensor


class ExpandedPlan:
    """Divides the sequences of a step for MLA attention. Long prompts read expanded keys and values, which are
    projected from latents. All other sequences (`absorbed`) are computed in latent space. A plan is made once per
    step, and every layer runs it."""

    def __init__(
        self,
        chosen: Sequence[int],
        bounds: Sequence[int],
        lengths: Sequence[int],
        limit: int,
        device: torch.device,
    ) -> None:
        """`chosen` has the indexes, in the step, of the sequences to expand. For each sequence of the step, `bounds`
        has the index of its first query, and `lengths` its number of tokens, including new tokens. At most `limit`
        tokens are expanded at a time. Exception: in a sequence of more than `limit` tokens, all new tokens are expanded
        together."""
        self._limit = limit
        self._parts: list[_Part] = []
        group: list[int] = []
        for place in chosen:
            adjacent = not group or place == group[-1] + 1
            if group and (not adjacent or sum(lengths[i] for i in [*group, place]) > limit):
                self._add_group(group, bounds, lengths, device)
                group = []
            if lengths[place] > limit:
                self._add_long(place, bounds, lengths, device)
            else:
                group.append(place)
        if group:
            self._add_group(group, bounds, lengths, device)
        self.absorbed = self._others(set(chosen), bounds, lengths, device)

    @classmethod
    def of_step(
        cls, bounds: Sequence[int], lengths: Sequence[int], limit: int, device: torch.device
    ) -> ExpandedPlan | None:
        """Return the plan of a step. Return None if no sequence has enough new tokens to be expanded
        (`MIN_QUERIES`)."""
        chosen = []
        for place, length in enumerate(lengths):
            queries = bounds[place + 1] - bounds[place]
            # On average, a new token reads only half of the new tokens.
            if queries * (1 - queries / (2 * length)) >= MIN_QUERIES:
                chosen.append(place)
        return cls(chosen, bounds, lengths, limit, device) if chosen else None

    @staticmethod
    def _others(
        chosen: set[int], bounds: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> Absorbed | None:
        """Return the sequences that are not expanded, or None if there are none. If they are the first sequences of
        the step, slices select their queries and rows, so nothing is copied."""
        others = [place for place in range(len(lengths)) if place not in chosen]
        if not others:
            return None
        counts = [bounds[place + 1] - bounds[place] for place in others]
        starts = (0, *np.cumsum(counts).tolist())
        own = tuple(lengths[place] for place in others)
        if others[-1] == len(others) - 1:
            return Absorbed(starts, own, slice(0, starts[-1]), slice(0, len(others)))
        queries = np.concatenate([np.arange(bounds[place], bounds[place + 1]) for place in others])
        return Absorbed(starts, own, upload(queries, device), upload(np.array(others), device))

    def _add_group(
        self, group: list[int], bounds: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> None:
        """Add one part for several adjacent sequences, with all of their tokens."""
        begin = bounds[group[0]]
        counts = np.array([lengths[i] for i in group])
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        self._parts.append(
            _Part(
                slice(begin, bounds[group[-1] + 1]),
                [bounds[i] - begin for i in group] + [bounds[group[-1] + 1] - begin],
                [0, *ends.tolist()],
                upload(np.repeat(np.array(group), counts), device),
                upload(positions, device),
                True,
                False,
            )
        )

    def _add_long(
        self, place: int, bounds: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> None:
        """Add the parts of the sequence with index `place`, which is longer than the limit: first a part with its new
        tokens, then parts of at most `limit` cached tokens."""
        queries = slice(bounds[place], bounds[place + 1])
        count = queries.stop - queries.start
        cached = lengths[place] - count
        pieces = [(cached, lengths[place])]
        pieces += [(at, min(at + self._limit, cached)) for at in range(0, cached, self._limit)]
        for begin, end in pieces:
            positions = np.arange(begin, end)
            rows = upload(np.full(end - begin, place), device)
            own = begin == cached
            self._parts.append(
                _Part(
                    queries,
                    [0, count],
                    [0, end - begin],
                    rows,
                    upload(positions, device),
                    own,
                    merges=not own,
                )
            )

    def attend(
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        tables: torch.Tensor,
        weight: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write attention of all expanded sequences to `out` [tokens, heads, dim of v].

        - `query` [tokens, heads, dim] are the packed queries of the whole step.
        - `latents` [pages, tokens, dim] are the layer's pages, and `tables` its block tables.
        - `weight` [heads, dims, rank] projects latents to keys and values.
        """
        block, (heads, wide, rank) = latents.shape[1], weight.shape
        v_dim = out.shape[2]
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for part in self._parts:
            pages = tables[part.rows, part.positions // block].long()
            found = latents[pages, part.positions % block]
            keys = found.new_empty((len(found), heads, wide - v_dim + found.shape[1] - rank))
            keys[..., wide - v_dim :] = found[:, None, rank:]
            shared = found[:, None, :rank].expand(-1, heads, -1)
            out_of_latent_space(shared, weight[:, : wide - v_dim], keys[..., : wide - v_dim])
            values = out_of_latent_space(shared, weight[:, wide - v_dim :])
            own = query[part.queries], keys, values, part.starts, part.token_starts, part.causal, scale
            results = out[part.queries], lse[part.queries]
            if part.merges:
                merge_outputs(*results, *attend_dense(*own), *results)
            else:
                attend_dense(*own, None, *results)
