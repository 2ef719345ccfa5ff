"""Places for pages below the device pool: the protocol, host memory, disk.

See docs/tiers.md. Nothing here imports torch; the disk tier needs the package xxhash.
"""

from .codec import Compression
from .disk import DiskConfig, DiskTier
from .host import HostConfig, HostTier
from .lease import Lease
from .tier import Form, Objects, Ranges, Tier, TierError
from .transfer import Outcome, TierStats, Transfer

__all__ = [
    "Compression",
    "DiskConfig",
    "DiskTier",
    "Form",
    "HostConfig",
    "HostTier",
    "Lease",
    "Objects",
    "Outcome",
    "Ranges",
    "Tier",
    "TierError",
    "TierStats",
    "Transfer",
]
