"""Prefix cache: finds the longest cached prefix of a prompt.

radix_tree      RadixTree: cached tokens and their pages
node            nodes, roots and checkpoints of the tree
checkpoints     resumable positions, window pages, unneeded pages
resume_rule     the positions at which a prompt may resume
lookup          Lookup: a prompt's match, and the miss reason
lookup_counts   counters of hits and misses
snapshot_interval  the number of tokens between state snapshots, by measurement
block_hash      block hashes
hash_index      HashIndex: pages of tiers, peers and workers by hash
publisher       hashes of nodes, and events
multimodal      images in a prompt; media runs (the pages of one image)
media_cache     MediaCache: cached media runs
pins            pins, prefixes of waiting requests, sessions
owners          BlockOwners: the accounts of public and private blocks
ghosts          records of recently evicted tokens
offload_batch   pages passed to the offload listener
in_transfer     pages that load jobs fill and tiers read
"""

from .block_hash import (
    HASH_BYTES,
    TOKEN_BYTES,
    BlockHash,
    hash_chain,
    media_hash,
    public_root_hash,
    root_hash,
    tail_hash,
    token_bytes,
    unit_hashes,
)
from .hash_index import HashIndex
from .in_transfer import Reservation
from .lookup import MISS_REASONS, NOT_CACHED, Match, Miss, Prefix
from .multimodal import Media, activation_mark, private_mark, public_length
from .offload_batch import OffloadBatch
from .pins import Pin, QueuedPrefix
from .snapshot_interval import SnapshotInterval

__all__ = [
    "HASH_BYTES",
    "MISS_REASONS",
    "NOT_CACHED",
    "TOKEN_BYTES",
    "BlockHash",
    "HashIndex",
    "Match",
    "Media",
    "Miss",
    "OffloadBatch",
    "Pin",
    "Prefix",
    "QueuedPrefix",
    "Reservation",
    "SnapshotInterval",
    "activation_mark",
    "hash_chain",
    "media_hash",
    "private_mark",
    "public_length",
    "public_root_hash",
    "root_hash",
    "tail_hash",
    "token_bytes",
    "unit_hashes",
]
