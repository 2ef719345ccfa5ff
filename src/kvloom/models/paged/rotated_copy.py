"""Copies the K and V of tokens from one sequence to another position of another sequence.

    source   | d0 | d1 | d2 | d3 |                   positions 0 to 3
    target   | t0 | t1 | d0 | d1 | d2 | d3 | …       the same tokens, two positions later

V does not depend on the position. K is rotated by the distance n of the two positions, because a rotary embedding at
position p + n equals the embedding at position p, rotated by n more positions. A test finds the rotation of each layer:
in a prompt of equal tokens, the K of all positions differ only by their rotation. If the K of a model differ in another
way, the model is refused.

With several ranks, rank 0 finds the rotations and plans each copy. Every rank runs the plan on its part of the pages: its
heads, or its tokens of each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import KVCache, PageGroup
from kvloom.kernels.device import upload
from kvloom.kernels.memory import LayerView
from kvloom.kernels.write import Rotary, apply_rotary, write
from kvloom.models.sharding import Ranks

from .pages import Pages

__all__ = ["AttentionSinks", "RotatedCopier", "RotatedCopy", "RotationError"]

Ints = npt.NDArray[np.int64]
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose angles depend on the length of the prompt."""


class RotationError(ValueError):
    """A layer whose K and V cannot be copied to another position. The text is the reason."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a layer rotates K: the angle per position of each pair of dims, and the order of pairs (see `Rotary`).
    Without angles, the layer does not rotate K."""

    angles: torch.Tensor
    form: Literal["halves", "pairs"] = "halves"
    tail: bool = False

    def by(self, distances: Ints) -> Rotary | None:
        """Return the rotation that moves each token by its number of positions. None if K is not rotated."""
        if not self.angles.numel():
            return None
        turned = upload(distances, self.angles.device)[:, None] * self.angles
        return Rotary(turned.cos().float(), turned.sin().float(), self.form, self.tail)


@dataclass(frozen=True, slots=True)
class RotatedCopy:
    """A copy of tokens [first, first + count) of one sequence to the tokens [at, at + count) of another. `source` and
    `target` are the page ids of the blocks that contain these tokens, [columns, blocks]."""

    source: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]
    first: int
    at: int
    count: int


class RotatedCopier:
    """Copies tokens between sequences of one cache. Call `find_rotations` or `use_rotations` before the first copy.
    `ranks` divide the context, if it is divided: all of them must run every copy."""

    def __init__(self, cache: KVCache, pages: Pages, model: Any, ranks: Ranks | None = None) -> None:
        """Raises RotationError if a layer stores more than K and V, or if its angles depend on the prompt's length."""
        self._cache, self._pages, self._ranks = cache, pages, ranks
        self._rotations: dict[int, Rotation] = {}
        self.chosen: list[int] = []
        """The number of the rotation of each layer, for `use_rotations` on other ranks."""
        self._angles = _angles_of(model)
        for layer in pages.token_layers:
            fields = {name for name in pages.token_view(layer).fields if not name.endswith("_scale")}
            if fields not in ({"k", "v"}, {"latent"}):
                raise RotationError(f"layer {layer} stores {', '.join(sorted(fields))}, not only K and V")

    def find_rotations(self, row: int, tokens: int, tolerance: float) -> None:
        """Find the rotation of each layer from a sequence of `tokens` equal tokens in row `row` of the block tables.
        `tolerance` is the largest relative error of K and V. Raises RotationError for a layer without a rotation."""
        places, chosen = np.arange(tokens), []
        for layer in self._pages.token_layers:
            view = self._pages.token_view(layer)
            group, column = self._place_of(view)
            owner, inside = self._split(group, places)
            own = np.flatnonzero(owner == self._rank(group))
            pages = self._cache.page_tables[column, row, places // self._cache.block_tokens].astype(np.int64)
            k, v = self._read(view, pages[own], inside[own])
            if v is not None and _difference(v) > tolerance:
                raise RotationError(f"V of layer {layer} depends on the position of a token")
            errors = []
            for number, rotation in enumerate(self._candidates(k.shape[-1], is_latent=v is None)):
                rotary = rotation.by(-places[own])  # to position 0
                errors.append((_difference(k if rotary is None else apply_rotary(k, rotary)), number))
            error, found = min(errors)
            if not error <= tolerance:
                raise RotationError(f"K of layer {layer} at another position is not a rotation of its K")
            chosen.append(found)
        self.use_rotations(chosen)

    def use_rotations(self, chosen: Sequence[int]) -> None:
        """Use rotations that rank 0 has found. `chosen` has one number for each layer."""
        self.chosen = list(chosen)
        for layer, number in zip(self._pages.token_layers, chosen, strict=True):
            fields = self._pages.token_view(layer).fields
            is_latent = "latent" in fields
            dim = fields["latent" if is_latent else "k"].shape[-1]
            self._rotations[layer] = self._candidates(dim, is_latent)[number]

    def plan(self, source: int, first: int, target: int, at: int, count: int) -> RotatedCopy:
        """Return the copy of tokens [first, first + count) of the sequence in row `source` to the tokens
        [at, at + count) of the sequence in row `target`. Both sequences must have pages for these tokens."""
        tables, block = self._cache.page_tables, self._cache.block_tokens
        read, written = (
            tables[:, row, begin // block : -(-(begin + count) // block)].copy()
            for row, begin in ((source, first), (target, at))
        )
        return RotatedCopy(read, written, first, at, count)

    def copy(self, plan: RotatedCopy) -> None:
        """Copy tokens. No copy of their pages may be pending. Tokens outside a window have no page in the source and are
        not copied. Does not wait for the device. If ranks divide the context, this makes one or two collective calls for
        each divided layer."""
        block, device = self._cache.block_tokens, self._pages.device
        read, written = (np.arange(begin, begin + plan.count) for begin in (plan.first, plan.at))
        blocks = read // block - plan.first // block, written // block - plan.at // block
        for layer, rotation in self._rotations.items():
            view = self._pages.token_view(layer)
            group, column = self._place_of(view)
            pages, to = (
                ids[column, each].astype(np.int64)
                for ids, each in zip((plan.source, plan.target), blocks, strict=True)
            )
            owner, inside = self._split(group, read)
            k, v = self._read(view, pages, inside)
            if group.parts > 1:
                k, v = self._owned(k, owner), None if v is None else self._owned(v, owner)
            new_owner, place = self._split(group, written)
            is_own = (pages > 0) & (to > 0) & (new_owner == self._rank(group))
            slots = np.where(is_own, to * group.page_tokens + place, -1)
            fields, rotary = view.fields, rotation.by(np.full(plan.count, plan.at - plan.first))
            name = "latent" if v is None else "k"
            k_pages = fields[name][:, :, None] if v is None else fields[name]
            write(
                k_pages, None if v is None else fields["v"], upload(slots, device), k, v,
                k_scale=fields.get(f"{name}_scale"), v_scale=fields.get("v_scale"), rotary=rotary,
            )  # fmt: skip

    def _place_of(self, view: LayerView) -> tuple[PageGroup, int]:
        """Return the group of a layer, and the column of its pages in the block tables."""
        group = self._cache.layout.groups[view.group]
        return group, group.column + view.run

    def _split(self, group: PageGroup, places: Ints) -> tuple[Ints, Ints]:
        """Return the rank that stores each token in `places`, and the index of the token in its page. The rank is 0 if
        the blocks of the group are not divided."""
        owner, inside = np.divmod(places % self._cache.block_tokens, group.page_tokens)
        return owner, inside

    def _rank(self, group: PageGroup) -> int:
        """Return the number of this rank among the ranks that divide the blocks of a group."""
        return 0 if group.parts == 1 or self._ranks is None else self._ranks.shard.rank

    def _owned(self, values: torch.Tensor, owner: Ints) -> torch.Tensor:
        """Return the values of tokens from the ranks that store them. `values` is [tokens, …]; values of tokens that
        another rank stores are not used."""
        assert self._ranks is not None
        every = self._ranks.gather(values)
        return every[upload(owner, values.device), torch.arange(len(owner), device=values.device)]

    def _read(self, view: LayerView, pages: Ints, inside: Ints) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and V of tokens: [tokens, heads, dim]. Token i has index `inside[i]` in page `pages[i]`. Latents are
        returned as K with one head. Quantised values are returned in float32."""
        device = self._pages.device
        at = upload(pages, device), upload(inside, device)
        found = []
        for name in ("latent",) if "latent" in view.fields else ("k", "v"):
            field, scale = view.fields[name], view.fields.get(f"{name}_scale")
            is_byte = field.element_size() == 1  # not all devices can index fp8
            tokens = field.view(torch.uint8)[at].view(field.dtype) if is_byte else field[at]
            tokens = tokens[:, None] if name == "latent" else tokens
            if scale is not None:  # scales are in the pages, or static: one per head
                scale = scale[at].reshape(*tokens.shape[:2]) if scale.dim() == 3 else scale.flatten()
                tokens = tokens.float() * scale[..., None]
            elif is_byte:
                tokens = tokens.float()
            found.append(tokens)
        return found[0], found[1] if len(found) > 1 else None

    def _candidates(self, dim: int, is_latent: bool) -> list[Rotation]:
        """Return the possible rotations of heads with `dim` dims."""
        forms: tuple[Literal["halves", "pairs"], ...] = ("halves", "pairs")
        none = Rotation(torch.empty(0, device=self._pages.device))
        return [none] + [
            Rotation(angles.to(self._pages.device), form, is_latent)
            for angles in self._angles
            if 2 * len(angles) <= dim
            for form in forms
        ]


def _angles_of(model: Any) -> list[torch.Tensor]:
    """Return the different angles per position of a model's rotary embeddings, in float64."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or buffer.dim() != 1:
                continue
            kinds = getattr(module, "rope_type", "default")
            kinds = " ".join(map(str, kinds.values())) if isinstance(kinds, dict) else str(kinds)
            if any(kind in kinds for kind in LENGTH_DEPENDENT):
                raise RotationError(f"its rotary angles ({kinds}) depend on the length of the prompt")
            angles = buffer.double()
            if not any(len(angles) == len(known) and torch.equal(angles, known) for known in found):
                found.append(angles)
    return found


class AttentionSinks:
    """The attention sinks of a model (gpt-oss). `find_rotations` needs K and V that were computed without sinks: the part
    of a sink in attention depends on the number of tokens, so K and V of equal tokens would differ."""

    def __init__(self, model: Any) -> None:
        weights = [weight for name, weight in model.named_parameters() if name.endswith(".sinks")]
        self._weights = [(weight, weight.detach().clone()) for weight in weights]

    def set(self, is_on: bool) -> None:
        """Turn the sinks on or off. They are on at first."""
        for weight, value in self._weights:
            weight.data.copy_(value if is_on else torch.full_like(value, -1e4))


def _difference(tokens: torch.Tensor) -> float:
    """Return the relative difference of tokens that should be equal, [tokens, heads, dim]: a quarter of all pairs has at
    most this difference. Other pairs may differ more, because rounding can lead tokens of equal content to different
    experts."""
    flat, count = tokens.float().flatten(1), len(tokens)
    first, second = torch.triu_indices(count, count, 1, device=tokens.device)
    size = flat[first].norm(dim=1).clamp_min(1e-30)
    pairs = (flat[first] - flat[second]).norm(dim=1) / size
    return float(pairs.sort().values[len(pairs) // 4])
