"""Copies the K and V of tokens from one sequence to another position of another sequence.

    source   | d0 | d1 | d2 | d3 |                   positions 0 to 3
    target   | t0 | t1 | d0 | d1 | d2 | d3 | …       the same tokens, two positions later

V does not depend on the position. K is rotated by the distance n of the two positions, because a rotary embedding at
position p + n equals the embedding at position p, rotated by n more positions. A test finds the rotation of each layer:
in a prompt of equal tokens, the K of all positions differ only by their rotation. If the K of a model differ in another
way, the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import KVCache
from kvloom.kernels.device import upload
from kvloom.kernels.memory import LayerView
from kvloom.kernels.write import Rotary, apply_rotary, write

from .pages import Pages

__all__ = ["RotatedCopier", "RotationError", "without_sinks"]

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


class RotatedCopier:
    """Copies tokens between sequences of one cache. Call `find_rotations` before the first copy."""

    def __init__(self, cache: KVCache, pages: Pages, model: Any) -> None:
        """Raises RotationError if a layer stores more than K and V, or if its angles depend on the prompt's length."""
        self._cache, self._pages = cache, pages
        self._rotations: dict[int, Rotation] = {}
        self._angles = _angles_of(model)
        for layer in pages.token_layers:
            fields = {name for name in pages.token_view(layer).fields if not name.endswith("_scale")}
            if fields not in ({"k", "v"}, {"latent"}):
                raise RotationError(f"layer {layer} stores {', '.join(sorted(fields))}, not only K and V")

    def find_rotations(self, row: int, tokens: int, tolerance: float) -> None:
        """Find the rotation of each layer from a sequence of `tokens` equal tokens in row `row` of the block tables.
        `tolerance` is the largest relative error of K and V. Raises RotationError for a layer without a rotation."""
        places = np.arange(tokens)
        for layer in self._pages.token_layers:
            view = self._pages.token_view(layer)
            k, v = self._read(view, self._page_ids(view, row, places), places)
            if v is not None and _difference(v) > tolerance:
                raise RotationError(f"V of layer {layer} depends on the position of a token")
            errors = []
            for rotation in self._candidates(k.shape[-1], is_latent=v is None):
                rotary = rotation.by(-places)  # to position 0
                errors.append((_difference(k if rotary is None else apply_rotary(k, rotary)), rotation))
            error, found = min(errors, key=lambda one: one[0])
            if not error <= tolerance:
                raise RotationError(f"K of layer {layer} at another position is not a rotation of its K")
            self._rotations[layer] = found

    def copy(self, source: int, first: int, target: int, at: int, count: int) -> None:
        """Copy tokens [first, first + count) of the sequence in row `source` to the tokens [at, at + count) of the
        sequence in row `target`. Both sequences must have pages for these tokens, and no copy of these pages may be
        pending. Tokens outside a window have no page in the source and are not copied. Does not wait for the device."""
        block = self._cache.block_tokens
        read, written = np.arange(first, first + count), np.arange(at, at + count)
        for layer, rotation in self._rotations.items():
            view = self._pages.token_view(layer)
            pages, to = self._page_ids(view, source, read), self._page_ids(view, target, written)
            slots = np.where((pages > 0) & (to > 0), to * block + written % block, -1)
            k, v = self._read(view, pages, read)
            fields, rotary = view.fields, rotation.by(np.full(count, at - first))
            name = "latent" if v is None else "k"
            k_pages = fields[name][:, :, None] if v is None else fields[name]
            write(
                k_pages, None if v is None else fields["v"], upload(slots, self._pages.device), k, v,
                k_scale=fields.get(f"{name}_scale"), v_scale=fields.get("v_scale"), rotary=rotary,
            )  # fmt: skip

    def _page_ids(self, view: LayerView, row: int, places: Ints) -> Ints:
        """Return the page id of each token in `places` of a sequence; 0 if the token has no page."""
        column = self._cache.layout.groups[view.group].column + view.run
        found: Ints = self._cache.page_tables[column, row, places // self._cache.block_tokens].astype(
            np.int64
        )
        return found

    def _read(self, view: LayerView, pages: Ints, places: Ints) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and V of tokens: [tokens, heads, dim]. Latents are returned as K with one head. Quantised values are
        returned in float32."""
        device = self._pages.device
        at = upload(pages, device), upload(places % self._cache.block_tokens, device)
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


@contextmanager
def without_sinks(model: Any) -> Iterator[None]:
    """Turn off the attention sinks of a model (gpt-oss). The part of a sink in attention depends on the number of tokens,
    so K and V of equal tokens would differ."""
    sinks = [weight for name, weight in model.named_parameters() if name.endswith(".sinks")]
    before = [weight.detach().clone() for weight in sinks]
    try:
        for weight in sinks:
            weight.data.fill_(-1e4)
        yield
    finally:
        for weight, old in zip(sinks, before, strict=True):
            weight.data.copy_(old)


def _difference(tokens: torch.Tensor) -> float:
    """Return the relative difference of tokens that should be equal, [tokens, heads, dim]: a quarter of all pairs has at
    most this difference. Other pairs may differ more, because rounding can lead tokens of equal content to different
    experts."""
    flat, count = tokens.float().flatten(1), len(tokens)
    first, second = torch.triu_indices(count, count, 1, device=tokens.device)
    size = flat[first].norm(dim=1).clamp_min(1e-30)
    pairs = (flat[first] - flat[second]).norm(dim=1) / size
    return float(pairs.sort().values[len(pairs) // 4])
