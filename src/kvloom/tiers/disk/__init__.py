"""The disk tier: pages in segment files of one directory.

disk_tier.py        DiskTier and its URL
segment.py          the file format: a segment file has frames, and a frame has page headers and bodies
segment_store.py    all segments, the index, eviction
segment_owners.py   segments and limits of tenants
segment_writer.py   threads that seal and append frames
segment_reader.py   threads that read and verify pages
disk_pages.py       lists all pages, for operators
recovery.py         finds the segments and pages in a directory when a tier is opened
tombstones.py       the file that lists dropped objects
files.py            system calls, locks, checks of ownership
"""

from .disk_pages import DiskPages
from .disk_tier import DiskConfig, DiskTier, disk_config
from .files import Files, SystemFiles

__all__ = ["DiskConfig", "DiskPages", "DiskTier", "Files", "SystemFiles", "disk_config"]
