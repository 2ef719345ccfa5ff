"""The images and audio clips of a prompt as data: the model inputs, and the prompt tokens of each.

An audio clip is processed like an image. In the names of this file, "image" means both."""

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
"""Name of the layer that stores image embeddings."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """The model inputs of one image or audio clip, and the digest of its content.

    - `read` states whether the embeddings may be loaded from tiers, and `store` whether they may be stored in tiers.
    - `tenant` is the owner of the embeddings.
    - `embeddings` ([tokens, hidden]) are set if an encode worker computed them.
    """

    inputs: Mapping[str, torch.Tensor]
    digest: bytes
    tenant: str = ""
    read: bool = True
    store: bool = True
    embeddings: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """The images of a prompt. `places` are the prompt positions of all image tokens. Image `i` has the positions
    `places[bounds[i] : bounds[i + 1]]`. `media` describes the images to the cache.

    - `axes` ([3, tokens up to the end of the last image]) are rotary positions, or None if rotary positions equal token
      positions. The rotary position of a later token is its token position plus `shift`.
    - `whole` states that no step may end inside an image.
    - `cross_attended` states that tokens after an image may see it in cross-attention layers.
    - `is_prompt` states that the image is the text of the request, which an encoder reads.
    """

    images: tuple[Image, ...]
    media: tuple[Media, ...]
    places: Ints
    bounds: Ints
    axes: Ints | None = None
    shift: int = 0
    whole: bool = False
    cross_attended: bool = False
    is_prompt: bool = False

    def step_tokens(self, start: int, count: int) -> int:
        """Return how many tokens a step may compute from position `start` on, at most `count`. With `whole`, a step
        must not end inside an image, so the result may be smaller than `count`, or 0."""
        if self.whole:
            for item in self.media:
                if item.start < start + count < item.stop:
                    return max(0, item.start - start)
        return count

    @property
    def min_step_tokens(self) -> int:
        """The smallest token budget of a step that is sufficient for this prompt."""
        return max(item.stop - item.start for item in self.media) if self.whole else 1

    def affects_step(self, start: int) -> bool:
        """Return whether a step that starts at `start` needs the images. Otherwise token ids and shifted positions are
        sufficient."""
        return self.cross_attended or start < self.media[-1].stop


@dataclass(frozen=True, slots=True)
class ImageGroup:
    """`count` tokens of a step that see the same images. `pages` ([columns, blocks]) are the page ids of these
    images, with one column for each page of a block. `real` marks which token positions in the pages contain image
    tokens."""

    count: int
    pages: torch.Tensor
    real: torch.Tensor


@dataclass(frozen=True, slots=True)
class VisibleImages:
    """The packed tokens of a step that see images. `places` are the indices of these tokens, in order. `parts`
    divides them into groups that see the same images."""

    places: torch.Tensor
    parts: tuple[ImageGroup, ...]
