"""Opens encoded images. The API process checks their headers, and the engine process decodes them."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["FORMATS", "decode_image", "open_image"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Accepted formats. Decoders of other formats never get bytes of a request."""


def open_image(data: bytes) -> Image.Image:
    """Read the header of an image, but not its pixels. Raises ValueError if the bytes are not an image, or if the
    image has far too many pixels.
    """
    from PIL import Image

    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # damaged headers make decoders raise many kinds of errors
        raise ValueError(f"not an image of the formats {', '.join(FORMATS)}") from error


def decode_image(data: bytes) -> Image.Image:
    """Return the pixels of an image as RGB, upright. For an animation, return the first frame.

    Raises ValueError for damaged bytes. Memory and time grow with the number of pixels, so check the header first.
    """
    from PIL import ImageOps

    image = open_image(data)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # damaged images make decoders raise many kinds of errors
        raise ValueError(f"the image is damaged: {type(error).__name__}") from error
