"""Folders that a request may name: only those below folders that the server's options allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvloom.serve.errors import bad_request

__all__ = ["allowed_folder"]


def allowed_folder(asked: str, allowed: Sequence[Path], field: str, option: str) -> Path:
    """Return the folder with the path `asked`. The path may be absolute, or relative to one of the `allowed` folders.
    Raises ApiError unless the folder exists below an allowed folder. The error names `field`, the field of the request,
    and `option`, the server's option that lists the allowed folders.
    """
    for above in allowed:
        try:
            folder = (above / asked).resolve()  # an absolute path replaces `above`
            if folder != above and folder.is_relative_to(above) and folder.is_dir():
                return folder
        except (OSError, ValueError, RuntimeError):  # RuntimeError: links that form a loop
            continue
    raise bad_request(f"{field} {asked[:200]!r} is not a folder below those of {option}", field)
