"""Encode workers: image encoders on separate workers. Other workers get the embeddings by the hash of the image.

    this worker                                         encode worker (`kvloom serve --role encode`)
    images of a prompt that its cache lacks
      has(embeddings)?  ───────────peer connection────▶ host memory
      no: write the image ────────────────────────────▶ host memory ─▶ vision encoder ─▶ host memory
      read the embeddings ◀──────────────────────────── host memory
    the prompt and the embeddings enter the queue

    image_pages.py       images and embeddings as pages: hashes, packing, reads and writes
    remote_encoders.py   RemoteEncoders: asks encode workers for embeddings
    encoder.py           Encoder: the encode worker's side

The peer protocol of `tiers.peer` authenticates the connection and verifies bytes. If an encode worker is lost or
late, or refuses an image, the worker that needs the image encodes it.
"""

from .encoder import Encoder, open_encoder
from .image_pages import image_key
from .remote_encoders import EncodingStats, RemoteEncoders

__all__ = ["Encoder", "EncodingStats", "RemoteEncoders", "image_key", "open_encoder"]
