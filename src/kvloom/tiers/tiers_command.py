"""`kvloom tiers`: lists, verifies and purges the pages of tiers, even while a server uses them.

    ls URL…       objects, bytes, capacity, tenants, formats, versions
    check URL…    compares checksums; exit code 1 if a page is damaged
    purge URL     drops pages

`disk/disk_pages.py` and `remote/redis_pages.py` access the pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from functools import partial
from typing import Any

from kvloom.core import format_bytes

from .disk import DiskConfig, DiskPages, DiskTier
from .encoding import CODINGS
from .options import url_label
from .registry import open_tier, parse_tier, scheme_of, split_write_policy
from .remote import RedisPages, open_redis
from .stored_page import StoredPages
from .tier import TierError
from .transfer import Outcome

__all__ = ["arguments", "run"]

_URL = "a tier as `kvloom serve --tier` takes it, such as disk:/nvme/kv:1TiB or redis://host:6379/0?capacity=64GiB"
_HEADS = 10_000
"""Largest number of pages whose headers `ls` reads from a Redis server."""


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="ls | check | purge")
    ls = _verb(verbs, "ls", "show objects, bytes, capacity, tenants, formats and versions")
    check = _verb(verbs, "check", "compare the checksums of all pages; exit code 1 if one is damaged")
    purge = _verb(verbs, "purge", "drop pages; without --yes only count them")
    for verb in (ls, check):
        verb.add_argument("urls", nargs="+", metavar="URL", help=_URL)
    purge.add_argument("urls", nargs=1, metavar="URL", help=_URL)
    check.add_argument(
        "--sample", type=int, metavar="N", help="check at most N pages of each tier (default: all)"
    )
    purge.add_argument("--tenant", metavar="T", help="only pages of this tenant, if it has a share")
    purge.add_argument(
        "--older-than",
        type=float,
        metavar="S",
        help="only pages not used for S seconds (Redis), or whose file was not written for S seconds (disk)",
    )
    purge.add_argument(
        "--expired", action="store_true", help="only pages older than the ttl of the URL (disk:…?ttl=3600)"
    )
    purge.add_argument("--yes", action="store_true", help="drop the pages")
    for verb in (ls, check, purge):
        verb.add_argument("--json", action="store_true", help="print JSON")


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, words: str
) -> argparse.ArgumentParser:
    """Add a subcommand. Its own help begins with the words that `kvloom tiers --help` shows."""
    return verbs.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")


def run(args: argparse.Namespace) -> int:
    """Run one subcommand and return the exit code. The code is 1 if `check` found a damaged page. Raises
    ValueError if a tier cannot be used.
    """
    report = {"ls": _ls, "check": _check, "purge": _purge}[args.verb]
    found = []
    for url in args.urls:
        try:
            found.append(report(url, args))
        except TierError as error:
            raise ValueError(str(error)) from error
    if args.json:
        print(json.dumps(found if len(args.urls) > 1 else found[0], indent=2))
    else:
        for one in found:
            _print(one)
    return int(any(one.get("damaged") for one in found))


def _print(report: dict[str, Any]) -> None:
    print(report.pop("tier"))
    for name, value in report.items():
        if isinstance(value, dict | list):
            items = (
                [f"{key}: {count:,}" for key, count in value.items()] if isinstance(value, dict) else value
            )
            for number, line in enumerate(items):
                print(f"  {name.replace('_', ' ') if not number else '':12} {line}")
        else:
            text = format_bytes(value) if name in ("bytes", "capacity") else str(value)
            print(f"  {name.replace('_', ' '):12} {text}")


def _open_pages(url: str) -> StoredPages | None:
    """Return the pages of a tier, or None if the tier cannot list its pages. A prefix such as `int8:` is ignored."""
    url, _ = split_write_policy(url)
    while scheme_of(url) in CODINGS:
        url = url.partition(":")[2]
    opener = parse_tier(url)
    if isinstance(opener, partial) and opener.func is DiskTier:
        config: DiskConfig = opener.args[0]
        return DiskPages(config)
    if isinstance(opener, partial) and opener.func is open_redis:
        return RedisPages(*opener.args[:2])
    return None


def _listed(url: str, verb: str) -> StoredPages:
    pages = _open_pages(url)
    if pages is None:
        raise ValueError(
            f"kvloom tiers {verb}: the pages of {url_label(url)} cannot be listed; use a disk or Redis tier"
        )
    return pages


def _ls(url: str, args: argparse.Namespace) -> dict[str, Any]:
    label, (plain, _) = url_label(url), split_write_policy(url)
    if scheme_of(url) == "host":
        raise ValueError(f"{label} is memory of its server: see /metrics or `kvloom top`")
    pages = _open_pages(url)
    if pages is None:
        tier = open_tier(plain)
        try:
            stats = tier.stats()
        finally:
            tier.close()
        return {
            "tier": label,
            "objects": stats.objects,
            "bytes": stats.bytes,
            "capacity": stats.capacity,
            "notes": ["this medium lists no pages: tenants and formats are unknown", *stats.notes],
        }
    try:
        formats: Counter[str] = Counter()
        tenants: Counter[str] = Counter()
        objects = size = expired = 0
        for page in pages.pages(_HEADS):
            objects, size = objects + 1, size + page.stored_bytes
            expired += page.is_expired
            formats[page.format] += 1
            tenants[page.tenant.hex() or "without a share"] += 1
        return {
            "tier": label,
            "objects": objects,
            "expired": expired,
            "bytes": size,
            "capacity": pages.capacity,
            "version": pages.version,
            "tenants": dict(tenants.most_common()),
            "formats": dict(formats.most_common()),
            "notes": pages.notes,
        }
    finally:
        pages.close()


def _check(url: str, args: argparse.Namespace) -> dict[str, Any]:
    if args.sample is not None and args.sample < 1:
        raise ValueError(f"--sample {args.sample} must be 1 or more")
    pages = _listed(url, "check")
    try:
        todo = list(pages.pages(0))[: args.sample]
        counts: Counter[Outcome] = Counter()
        damaged = []
        is_shown = not args.json and sys.stderr.isatty()
        for number, page in enumerate(todo, 1):
            outcome = pages.verify(page)
            counts[outcome] += 1
            if outcome not in (Outcome.OK, Outcome.MISSING):
                damaged.append(f"{page.key.hex()}: {outcome.name.lower()}")
            if is_shown and (number % 100 == 0 or number == len(todo)):
                text = f"checked {number:,} of {len(todo):,} pages, {len(damaged):,} damaged"
                print(f"\r{text}", end="" if number < len(todo) else "\n", file=sys.stderr, flush=True)
        return {
            "tier": url_label(url),
            "checked": len(todo),
            "intact": counts[Outcome.OK],
            "incomplete": counts[Outcome.MISSING],
            "expired": sum(page.is_expired for page in todo),
            "damaged": len(damaged),
            "damaged_pages": damaged,
            "notes": pages.notes,
        }
    finally:
        pages.close()


def _purge(url: str, args: argparse.Namespace) -> dict[str, Any]:
    pages = _listed(url, "purge")
    try:
        owner = None if args.tenant is None else pages.owner_of(args.tenant)
        chosen = [
            page
            for page in pages.pages(0)
            if (owner is None or page.tenant == owner)
            and (page.is_expired or not args.expired)
            and (args.older_than is None or page.idle_seconds >= args.older_than)
        ]
        report = {"tier": url_label(url), "chosen": len(chosen), "bytes": sum(p.stored_bytes for p in chosen)}
        if not args.yes:
            return {**report, "dropped": 0, "notes": ["nothing was dropped: add --yes"]}
        return {**report, "dropped": pages.drop(chosen) if chosen else 0}
    finally:
        pages.close()
