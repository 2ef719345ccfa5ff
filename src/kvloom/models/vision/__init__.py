"""Images in prompts. Each image is encoded once, stored in pages, and inserted into the batch of a step.

`encoder` merges embeddings into the text. `cross_vision` supports models with separate layers that attend to
images. `embeddings` stores embeddings in pages of the pool. The vision towers are modules of Hugging Face.
"""

from .cross_vision import CrossVision, vision_of
from .embeddings import Embeddings, with_embeddings
from .encoder import VISION_FAMILIES, Vision

__all__ = ["VISION_FAMILIES", "CrossVision", "Embeddings", "Vision", "vision_of", "with_embeddings"]
