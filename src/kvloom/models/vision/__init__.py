"""Images in prompts: encoded once for each content, stored in pages, inserted into a step's batch.

`encoder` merges embeddings into the text. `cross_vision` supports models with separate layers that attend to images.
`embeddings` stores embeddings in pages of the pool. The vision tower is Hugging Face's.
"""

from .cross_vision import CrossVision, vision_of
from .embeddings import Embeddings, with_embeddings
from .encoder import VISION_FAMILIES, Vision

__all__ = ["VISION_FAMILIES", "CrossVision", "Embeddings", "Vision", "vision_of", "with_embeddings"]
