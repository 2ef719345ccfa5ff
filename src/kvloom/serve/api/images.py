"""The images of a request: data URLs, and files in the folders of --image-dir. Nothing is fetched from the network.

This module reads only bytes and headers. The engine process decodes the pixels. Call the functions outside the
event loop.
"""

from __future__ import annotations

import binascii
import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvloom.combinations import refused
from kvloom.serve.auth import Limits
from kvloom.serve.errors import ApiError, bad_request
from kvloom.serve.images import open_image

__all__ = ["URL_CHARACTERS", "RequestImages", "decode_base64"]

URL_CHARACTERS = 64
"""Number of characters of a URL that an error message repeats."""


class RequestImages:
    """Collects the images of one request within the server's limits. `refusal` is the reason why the model accepts no
    images, or "" if it accepts images.
    """

    def __init__(self, limits: Limits, model: str, refusal: str) -> None:
        self.found: list[bytes] = []
        self._limits, self._model, self._refusal = limits, model, refusal
        self._bytes = self._pixels = 0

    def add(self, part: dict[str, Any], where: str) -> None:
        """Read the image of a content part (a part of a message). `where` names the part in error messages. Raises
        ApiError if the image is invalid or exceeds a limit."""
        if self._refusal:
            raise bad_request(
                refused("images, model", where=where, model=self._model, reason=self._refusal), "messages"
            )
        limits = self._limits
        if len(self.found) >= limits.images:
            raise bad_request(
                f"{where}: more than {limits.images} images, the limit of a request (--max-images): send fewer",
                "messages",
            )
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str):
            raise bad_request(
                f'{where}: a part of type image_url needs {{"image_url": {{"url": "data:…"}}}}', "messages"
            )
        data = self._read(url, where)
        self._bytes += len(data)
        self._check_bytes(self._bytes, where)
        try:
            wide, high = open_image(data).size
        except ValueError as error:
            raise bad_request(f"{where}: {error}: send another image", "messages") from None
        self._pixels += wide * high
        if self._pixels > limits.image_pixels:
            raise bad_request(
                f"{where}: an image of {wide} x {high} pixels brings the images of the request to {self._pixels:,} "
                f"pixels; the limit is {limits.image_pixels:,} (--max-image-pixels): send smaller ones",
                "messages",
            )
        self.found.append(data)

    def _check_bytes(self, count: int, where: str) -> None:
        if count > self._limits.image_bytes:
            raise bad_request(
                f"{where}: the images of the request have {count:,} bytes; the limit is "
                f"{self._limits.image_bytes:,} (--max-image-bytes): send smaller ones",
                "messages",
            )

    def _read(self, url: str, where: str) -> bytes:
        scheme = url[:URL_CHARACTERS].partition(":")[0].lower()
        if scheme == "data":
            return self._read_data(url, where)
        if scheme == "file":
            return self._read_file(url, where)
        shown = f"{where}: image URL {url[:URL_CHARACTERS]!r}"
        if scheme in ("http", "https"):
            raise bad_request(
                f"{shown}: nothing is fetched from the network: send a data: URL with base64", "messages"
            )
        raise bad_request(f"{shown} is not supported: send a data: URL with base64", "messages")

    def _read_data(self, url: str, where: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise bad_request(
                f"{where}: a data URL needs base64, such as data:image/png;base64,iVBOR…", "messages"
            )
        self._check_bytes(self._bytes + len(body) * 3 // 4 - 2, where)
        return decode_base64(body, f"{where}: the data URL")

    def _read_file(self, url: str, where: str) -> bytes:
        """Return the bytes of a file in an allowed folder. A file in another folder and a missing file cause the same
        error, so a client cannot find out which files exist."""
        parts = urlsplit(url)
        refused = _refused_file(url, where, bool(self._limits.image_folders))
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise refused
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in self._limits.image_folders):
                raise refused
            # A link or pipe that replaces the file now is not followed or waited for.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                state = os.fstat(file.fileno())
                if not stat.S_ISREG(state.st_mode):
                    raise refused
                self._check_bytes(self._bytes + state.st_size, where)
                return file.read(self._limits.image_bytes + 1)
        except (OSError, ValueError):
            raise refused from None


def decode_base64(text: str, what: str) -> bytes:
    """Return the bytes of a base64 text. Raises ApiError if it is not valid; `what` names the text."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise bad_request(f"{what} is not valid base64", "messages") from None


def _refused_file(url: str, where: str, has_folders: bool) -> ApiError:
    why = "is not a readable file below a folder of --image-dir" if has_folders else "needs --image-dir"
    return bad_request(f"{where}: image URL {url[:URL_CHARACTERS]!r} {why}: send a data: URL", "messages")
