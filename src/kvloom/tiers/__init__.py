"""Places for pages below the device pool: the protocol, host memory, disk.

See docs/tiers.md. Nothing here imports torch; the disk tier needs the package xxhash.
"""

from .disk.disk_tier import DiskConfig, DiskTier
from .encoding.codec import Compression
from .host.host_tier import HostConfig, HostTier
from .host.lease import Lease
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
