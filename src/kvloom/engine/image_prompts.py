"""Reads prompts of text and images with the model's processor. The result is token ids with expanded placeholders,
and the tensors of each image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.models.vision import Vision

__all__ = ["encode_image_prompt", "load_processor"]


def load_processor(model: str) -> Any:
    """Load the processor of a folder or hub id. Raises ValueError if there is no processor. Takes seconds."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"images need the model's processor, which cannot be loaded: {error}") from error


def encode_image_prompt(
    processor: Any, vision: Vision, text: str, images: Sequence[Any], **options: Any
) -> tuple[list[int], list[Any]]:
    """Return the token ids of a text with placeholders, and its images in the form that the engine accepts.

    `options` are passed to the processor. Runs on the CPU and uses no state of the engine, so any thread may call
    this function.
    """
    made = processor(text=text, images=list(images), return_tensors="pt", **options)
    return made["input_ids"][0].tolist(), vision.split(made)
