"""Tiers: locations for pages outside the device pool, from host memory to other machines.

    tier.py             the Tier protocol; batches of pages (Objects), their byte layout (Form), their memory (Ranges)
    transfer.py         transfers, outcomes and counts
    registry.py         opens tiers by URL; other packages can add URL schemes
    options.py          parses the options of a tier's URL
    page_changes.py     the pages that a tier stored and removed, for block events
    shares.py           limits and guaranteed parts of a tier's capacity, per tenant
    lossy_tier.py       a tier that re-encodes pages inside another tier
    unit_tier.py        a tier that splits pages into units of HASH_TOKENS tokens, for servers with other block sizes
    value_tier.py       a tier that stores pages as float32 values, for servers with different KV dtypes
    wrapped_tier.py     WrappedTier: the base class of LossyTier, UnitTier and ValueTier
    stored_page.py      the interface to list, verify and drop a tier's pages, for operators
    tiers_command.py    `kvloom tiers`
    workers.py          threads that run jobs in order
    aligned_memory.py   memory aligned to disk blocks
    host/ disk/ remote/ peer/    one folder per medium
    encoding/           codec, checksums, encryption, re-encoding, formats of other systems
    transfers/          the transfer manager: one queue per tier
    testing/            the conformance suite and fault injection, for tests of tiers

A new tier is one file with a `Tier` and a `parse_url`, and one row of `registry.SCHEMES` (or an entry point). See
docs/tiers.md. This package does not import torch. The disk tier needs the package xxhash.
"""

from .aligned_memory import aligned_bytes
from .disk import DiskConfig, DiskTier
from .encoding import CODINGS, Coding, Compression, PageFields, PageValues, lossy_form
from .host import HostConfig, HostTier, Lease
from .lossy_tier import LossyTier
from .options import Options, redact_url, url_label
from .page_changes import PageChange, PageChanges, SupportsChanges
from .registry import (
    OpenTier,
    WritePolicy,
    check_tiers,
    is_optional,
    known_schemes,
    mark_optional,
    open_tier,
    open_with_policy,
    parse_tier,
    scheme_of,
    short_tier_names,
    split_write_policy,
)
from .shares import Share, Shares, SupportsShares, tenant_shares
from .tier import Form, Objects, Ranges, Tier, TierError, part_range
from .transfer import Outcome, TierStats, Transfer, TransferCounts, failed_transfer
from .unit_tier import UnitForm, UnitTier
from .value_tier import ValueForm, ValueTier
from .workers import Workers

__all__ = [
    "CODINGS",
    "Coding",
    "Compression",
    "DiskConfig",
    "DiskTier",
    "Form",
    "HostConfig",
    "HostTier",
    "Lease",
    "LossyTier",
    "Objects",
    "OpenTier",
    "Options",
    "Outcome",
    "PageChange",
    "PageChanges",
    "PageFields",
    "PageValues",
    "Ranges",
    "Share",
    "Shares",
    "SupportsChanges",
    "SupportsShares",
    "Tier",
    "TierError",
    "TierStats",
    "Transfer",
    "TransferCounts",
    "UnitForm",
    "UnitTier",
    "ValueForm",
    "ValueTier",
    "Workers",
    "WritePolicy",
    "aligned_bytes",
    "check_tiers",
    "failed_transfer",
    "is_optional",
    "known_schemes",
    "lossy_form",
    "mark_optional",
    "open_tier",
    "open_with_policy",
    "parse_tier",
    "part_range",
    "redact_url",
    "scheme_of",
    "short_tier_names",
    "split_write_policy",
    "tenant_shares",
    "url_label",
]
