"""Images and audio clips in prompts. Each is encoded once, stored in pages, and inserted into the batch of a step.

`towers` has the families and their encoders, which are modules of Hugging Face. `encoder` merges embeddings into the
text. `cross_vision` supports models with separate layers that attend to images. `embeddings` stores embeddings in pages
of the pool.
"""

from .cross_vision import CrossVision, vision_of
from .embeddings import Embeddings, with_embeddings
from .encoder import Vision
from .towers import AUDIO_FAMILIES, VISION_FAMILIES

__all__ = [
    "AUDIO_FAMILIES",
    "VISION_FAMILIES",
    "CrossVision",
    "Embeddings",
    "Vision",
    "vision_of",
    "with_embeddings",
]
