"""Copies the files of LMCache's `fs` and `fs_native` adapters into kvloom's tiers.

Each file contains the bytes of one object, and its name contains the key of the object. A file has no checksum,
so its bytes are not verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.adapters.common import TierPages, WaitingPages

from .object_keys import as_objects, parse_file_name
from .settings import Settings

__all__ = ["ImportedFiles", "import_files"]


@dataclass
class ImportedFiles:
    """Numbers of files and bytes of an import."""

    objects: int = 0
    bytes: int = 0
    present: int = 0
    """Objects that a tier already had."""
    failed: int = 0
    """Files that could not be read or stored."""
    other_files: int = 0
    """Files whose names contain no key of LMCache."""


def import_files(folder: Path, params: Mapping[str, Any]) -> ImportedFiles:
    """Store the objects of all files in `folder`. `params` are the settings of KvloomL2Adapter. Does not change the
    files. Raises ValueError for wrong settings, and NotADirectoryError if `folder` is not a folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder: give the base_path of LMCache's fs adapter")
    settings, found = Settings.parse(params), ImportedFiles()
    pages = WaitingPages(TierPages(settings.tiers, settings.max_object_bytes), settings.load_seconds)
    try:
        for path in sorted(folder.iterdir()):
            key = parse_file_name(path.name) if path.is_file() else None
            if key is None:
                found.other_files += path.is_file()
                continue
            try:
                data = np.fromfile(path, np.uint8)
                objects = as_objects([key], len(data), settings.namespace)
                if pages.lookup([objects])[0].all():
                    found.present += 1
                    continue

                def copy(
                    _: npt.NDArray[np.int64],
                    offsets: npt.NDArray[np.int64],
                    data: npt.NDArray[np.uint8] = data,
                ) -> None:
                    for offset in offsets.tolist():
                        pages.tiers.arena[offset : offset + len(data)] = data

                stored = bool(pages.store(objects, copy).all())
            except (OSError, ValueError):  # unreadable, empty, or larger than max_object_bytes
                stored = False
            if stored:
                found.objects, found.bytes = found.objects + 1, found.bytes + len(data)
            else:
                found.failed += 1
    finally:
        pages.close()
    found.failed += sum(queue.skipped_stores for queue in pages.tiers.manager.queues)
    return found
