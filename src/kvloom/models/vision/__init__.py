"""Images and audio clips in prompts. Each is encoded once, stored in pages, and inserted into the batch of a step.

`towers` has the families and their encoders, which are modules of Hugging Face. `encoder` merges embeddings into the
text. `cross_vision` supports models with separate layers that attend to images. `encoder_decoder` runs the
encoder of models such as T5 and Whisper. `embeddings` stores embeddings in pages of the pool.
"""

from .cross_vision import CrossVision
from .embeddings import Embeddings, with_embeddings
from .encoder import Vision
from .encoder_decoder import EncoderDecoder, vision_of
from .towers import AUDIO_FAMILIES, VISION_FAMILIES

__all__ = [
    "AUDIO_FAMILIES",
    "VISION_FAMILIES",
    "CrossVision",
    "Embeddings",
    "EncoderDecoder",
    "Vision",
    "vision_of",
    "with_embeddings",
]
