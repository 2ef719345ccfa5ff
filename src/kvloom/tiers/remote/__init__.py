"""Tiers behind a connection: key-value stores, and a disk tier that transfers pages by NIXL.

    remote_tier.py       RemoteTier: threads, timeouts, reconnection
    store_tier.py        pages as values of a key-value store
    redis.py             Redis or Valkey
    redis_protocol.py    the Redis protocol (RESP) on one socket
    redis_pages.py       lists all pages of a database, for operators
    mooncake.py          Mooncake Store
    mooncake_client.py   the client of Mooncake Store, one per tier
    s3.py                an S3 bucket
    capacity_tracker.py  capacity and tenant shares, for stores that do not count their values
    nixl.py              a disk tier with NIXL as transport
    bounded_calls.py     timeouts for libraries that have none
    byte_stream.py       bytes over a socket, with checksums

A store's client library is imported when the tier is opened.
"""

from .byte_stream import ByteStream
from .capacity_tracker import CapacityTracker
from .mooncake import open_mooncake
from .mooncake_client import MooncakeClient, MooncakeConfig
from .nixl import NixlFiles, make_agent, open_nixl
from .redis import RedisAddress, open_redis
from .redis_pages import RedisPages
from .remote_tier import Connection, Job, Link, RemoteConfig, RemoteTier, StoreError, Usage, remote_config
from .s3 import S3Bucket, open_s3
from .store_tier import Destination, Store, ValueRange, store_tier

__all__ = [
    "ByteStream",
    "CapacityTracker",
    "Connection",
    "Destination",
    "Job",
    "Link",
    "MooncakeClient",
    "MooncakeConfig",
    "NixlFiles",
    "RedisAddress",
    "RedisPages",
    "RemoteConfig",
    "RemoteTier",
    "S3Bucket",
    "Store",
    "StoreError",
    "Usage",
    "ValueRange",
    "make_agent",
    "open_mooncake",
    "open_nixl",
    "open_redis",
    "open_s3",
    "remote_config",
    "store_tier",
]
