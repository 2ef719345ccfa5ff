"""What a prompt shows: its images as their model takes them, and which of its tokens are theirs. Data, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import Media

__all__ = ["EMBEDDINGS", "Image", "ImageGroup", "ImageInputs", "VisibleImages"]

Ints = npt.NDArray[np.int64]
EMBEDDINGS = "vision.embeddings"
"""The name of the layer, among those of a model."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One image as its model takes it, and the name of its content."""

    inputs: Mapping[str, torch.Tensor]
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """What a prompt shows. Image `i` has the prompt's tokens `places[bounds[i] : bounds[i + 1]]`; `media` says the same to
    the cache. `axes` ([3, tokens up to the last image's end]) are the positions that rotary embeddings turn by, where those
    are not the tokens' places; what follows stands at its place plus `shift`. `whole`: no step may end inside an image.
    `cross_attended`: every token behind an image may see it, in layers of their own."""

    images: tuple[Image, ...]
    media: tuple[Media, ...]
    places: Ints
    bounds: Ints
    axes: Ints | None = None
    shift: int = 0
    whole: bool = False
    cross_attended: bool = False

    def step_tokens(self, start: int, count: int) -> int:
        """How many of the `count` tokens from `start` a step may take, so that it ends in no image that must stay whole; 0
        where that leaves none."""
        if self.whole:
            for item in self.media:
                if item.start < start + count < item.stop:
                    return max(0, item.start - start)
        return count

    @property
    def min_step_tokens(self) -> int:
        """Tokens that a step must have room for."""
        return max(item.stop - item.start for item in self.media) if self.whole else 1

    def affects_step(self, start: int) -> bool:
        """Whether a step from `start` on needs more than ids and shifted positions."""
        return self.cross_attended or start < self.media[-1].stop

    def content_key(self, end: int) -> bytes:
        """What stands for the images that begin before `end`, where prompts are compared by their tokens."""
        return b"".join(item.digest for item in self.media if item.start < end)


@dataclass(frozen=True, slots=True)
class ImageGroup:
    """So many tokens of a step that see the same images: `pages` ([columns, blocks]) are theirs, and of the tokens in those
    the `real` ones."""

    count: int
    pages: torch.Tensor
    real: torch.Tensor


@dataclass(frozen=True, slots=True)
class VisibleImages:
    """Which tokens of a step's packed row see images, in their order, and what they see."""

    places: torch.Tensor
    parts: tuple[ImageGroup, ...]
