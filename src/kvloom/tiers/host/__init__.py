"""The host tier: pages in this process's memory.

host_tier.py       HostTier: read, write, leases
host_url.py        the URL `host:SIZE?…`
host_index.py      keys, accounts of tenants, eviction
slots.py           per-page state in arrays, order of use
arena.py           memory in slabs, fast copies of pages
lease.py           leases of arena pages
shared_memory.py   an arena that other processes can map
"""

from .arena import copy_pages
from .host_index import MAX_TENANTS
from .host_tier import HostConfig, HostTier
from .host_url import HostURL
from .lease import Lease
from .shared_memory import SharedMemory, map_shared_memory

__all__ = [
    "MAX_TENANTS",
    "HostConfig",
    "HostTier",
    "HostURL",
    "Lease",
    "SharedMemory",
    "copy_pages",
    "map_shared_memory",
]
