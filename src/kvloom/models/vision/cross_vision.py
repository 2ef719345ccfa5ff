"""Images for models with cross-attention layers. In the prompt, an image is a single token.

    prompt   | text | ▪ | text … |          ▪ the token of an image
    media    | tokens of the image |        K and V of every cross-attention layer, in separate pages

The vision tower computes one state per token of an image. Each cross-attention layer projects these states to its K and
V. The pages are written once for each image content, and read by every later token that sees the image. The vision
tower and the projections are modules of Hugging Face. The cache owns the pages.

- A token sees the last image before it. If several images directly follow each other, the token sees all of them.
- A token that sees no image skips the cross-attention layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvloom.core import Ids, LayerSpec, Media, PoolLayout
from kvloom.kernels.device import upload
from kvloom.kernels.memory import LayerView
from kvloom.kernels.write import write
from kvloom.models.paged import Batch, Image, ImageGroup, ImageInputs, VisibleImages, Work

from .encoder import Vision
from .towers import Tensors, Tower

__all__ = ["CrossVision"]

INPUTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


class CrossVision(Vision):
    """The image part of a model in which only cross-attention layers see images."""

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, model.base_model
        self._towers = self._make_towers(model)
        self.token = self._towers[0].token
        self.joined, self.uses_mrope = None, False
        weight = model.get_input_embeddings().weight
        self._width = weight.shape[1]
        self._device, self._dtype = weight.device, weight.dtype
        self.encoder_runs = 0
        self._block = 0
        self._layers: list[tuple[Any, LayerView, int]] = []

    def _make_towers(self, model: Any) -> list[Tower]:
        return [_CrossTower(model)]

    def extend_layout(
        self, layers: Mapping[str, LayerSpec], layout: PoolLayout, granularity: int = 16
    ) -> PoolLayout:
        return layout

    def bind_pool(
        self, layout: PoolLayout, buffer: torch.Tensor, cross_views: Mapping[int, tuple[LayerView, int]]
    ) -> None:
        self._block = layout.block_tokens
        self._layers = [
            (module, *cross_views[module.layer_idx])
            for module in self._model.modules()
            if getattr(module, "layer_idx", None) in cross_views and hasattr(module, "k_proj")
        ]

    def read_prompt(
        self, prompt: Many[int], images: Many[Any], tenant: str = "", read: bool = True, store: bool = True
    ) -> ImageInputs:
        known = self._read_images(images, tenant, read, store)
        places = np.flatnonzero(np.asarray(prompt, dtype=np.int64) == self.token)
        if len(places) != len(known):
            raise ValueError(
                f"the prompt has {len(places)} image tokens (id {self.token}) for {len(known)} images: each needs one"
            )
        media = [
            Media(place, place + 1, image.digest, self._count(image))
            for place, image in zip(places.tolist(), known, strict=True)
        ]
        return ImageInputs(known, tuple(media), places, np.arange(len(known) + 1), cross_attended=True)

    def add_images(self, batch: Batch, works: Many[Work]) -> Batch:
        places: list[Any] = []
        parts: list[ImageGroup] = []
        for i, work in enumerate(works):
            if work.images is None:
                continue
            start, stop = batch.sizes[i] - len(work.tokens), batch.sizes[i]
            self._encode_new_images(work, start, stop)
            for begin, end, seen in _visible_ranges(work.images.places, start, stop):
                places.append(np.arange(begin, end) - start + batch.bounds[i])
                parts.append(self._image_group(work, end - begin, seen))
        if not parts:
            return batch
        return replace(batch, seen=VisibleImages(upload(np.concatenate(places), self._device), tuple(parts)))

    def _encode_new_images(self, work: Work, start: int, stop: int) -> None:
        """Fill the pages of images whose tokens are in [start, stop). Skips images whose pages are already cached."""
        image_inputs, sequence = work.images, work.sequence
        assert image_inputs is not None
        for place, item in enumerate(image_inputs.media):
            earlier = any(other.digest == item.digest for other in image_inputs.media[:place])
            if not start <= item.start < stop or earlier or sequence.media_is_cached(item.digest):
                continue
            states = self.find_embeddings(image_inputs.images[place])
            with torch.inference_mode():
                self._write_states(states, sequence.media_rows(item.digest))

    def _write_states(self, states: torch.Tensor, rows: Ids) -> None:
        """Project the states of an image ([tokens, hidden]) to K and V of each cross-attention layer, and write them to
        the pages `rows`."""
        for module, view, column in self._layers:
            shape = len(states), -1, module.head_dim
            key = module.k_norm(module.k_proj(states).view(shape))
            self._write(view, column, rows, key, module.v_proj(states).view(shape))

    def _write(self, view: LayerView, column: int, rows: Ids, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the K and V of one layer ([tokens, heads, dim]) to the pages `rows` of an image."""
        tokens = np.arange(len(key))
        pages = rows[tokens // self._block, column].astype(np.int64)
        slots = upload(pages * self._block + tokens % self._block, self._device)
        write(
            view.fields["k"], view.fields["v"], slots, key, value,
            k_scale=view.fields.get("k_scale"), v_scale=view.fields.get("v_scale"),
        )  # fmt: skip

    def _image_group(self, work: Work, count: int, seen: Iterable[int]) -> ImageGroup:
        assert work.images is not None
        rows, real, before = [], [], 0
        for place in seen:
            item = work.images.media[place]
            rows.append(work.sequence.media_rows(item.digest))
            real.append(before * self._block + np.arange(item.tokens))
            before += len(rows[-1])
        pages = np.concatenate(rows).T.astype(np.int64)
        return ImageGroup(
            count,
            upload(np.ascontiguousarray(pages), self._device),
            upload(np.concatenate(real), self._device),
        )

    def _count(self, image: Image) -> int:
        tiles = int(image.inputs["aspect_ratio_mask"].count_nonzero())
        return tiles * int(self._base.vision_model.num_patches)

    def has_count(self, image: Image) -> bool:
        return True


class _CrossTower:
    """The image tower of a model with cross-attention layers. Its embeddings are states that these layers read."""

    noun = "image"
    inputs: tuple[str, ...] = INPUTS

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, model.base_model
        self.token = int(model.config.image_token_id)

    def shaped(self, given: Tensors) -> Tensors:
        """Check the tensors of an image and return them. A check here affects only this request. A later error in the
        vision tower would affect all requests of a step."""
        pixels, ratio, mask = (given[name] for name in INPUTS)
        wanted, known = self._shape, int(self._model.config.vision_config.max_aspect_ratio_id)
        pixels = pixels[None] if pixels.dim() == 3 else pixels
        masks = mask.numel() == wanted[0] and bool(mask.any()) and bool(((mask == 0) | (mask == 1)).all())
        if tuple(pixels.shape) != wanted or not masks or ratio.numel() != 1:
            raise ValueError(
                f"an image of {type(self._model).__name__} is pixels {list(wanted)}, one aspect ratio and a mask of its "
                f"{wanted[0]} tiles (1: shown; one at least), not {list(pixels.shape)}, {list(ratio.shape)} and {mask.tolist()}"
            )
        if ratio.is_floating_point() or not 1 <= int(ratio) <= known:
            raise ValueError(f"aspect_ratio_ids {ratio.tolist()} is none of the model's: 1 to {known}")
        return {**given, "pixel_values": pixels}

    def embed(self, inputs: Tensors) -> torch.Tensor:
        """Run the vision tower. Return the states of an image ([tokens, hidden]), without padding tiles."""
        pixels, ratio, mask = (inputs[name] for name in INPUTS)
        found = self._base.vision_model(
            pixel_values=pixels[None, None],
            aspect_ratio_ids=ratio.view(1, 1),
            aspect_ratio_mask=mask.view(1, 1, -1),
        ).last_hidden_state[0, 0]
        states: torch.Tensor = self._base.multi_modal_projector(found[mask.bool()])
        return states.flatten(0, 1)

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        """The shape of an image's pixels: tiles, channels, height, width."""
        config = self._model.config.vision_config
        size = config.image_size
        high, wide = (size, size) if isinstance(size, int) else size
        return int(config.max_num_tiles), int(config.num_channels), int(high), int(wide)

    def sample(self) -> Tensors:
        tiles = torch.ones(self._shape[0], dtype=torch.int64)
        return dict(zip(INPUTS, (torch.zeros(self._shape), torch.tensor([1]), tiles), strict=True))

    def split(self, made: Mapping[str, Any]) -> list[Tensors]:
        pixels, ratios, masks = (torch.as_tensor(made[name]) for name in INPUTS)
        shown = torch.nonzero(ratios).tolist()  # 0 marks padding tiles
        return [
            dict(zip(INPUTS, (pixels[i, j], ratios[i, j, None], masks[i, j]), strict=True)) for i, j in shown
        ]


def _visible_ranges(places: Any, start: int, stop: int) -> list[tuple[int, int, range]]:
    """Divide [start, stop) into ranges whose tokens see the same images. Return (begin, end, images) for each range.
    Tokens before the first image are left out."""
    edges = [start, *(int(place) for place in places if start < place < stop), stop]
    found = []
    for begin, end in pairwise(edges):
        last = int(np.searchsorted(places, begin, "right")) - 1
        first = last
        while first > 0 and places[first - 1] == places[first] - 1:
            first -= 1
        if last >= 0:
            found.append((begin, end, range(first, last + 1)))
    return found
