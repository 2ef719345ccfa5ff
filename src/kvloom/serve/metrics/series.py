"""The names under which counts are served: one row a series, with the field's usual name beside ours where there is one.

Dashboards that people have ask for vLLM's names and its labels `model_name` and `engine`; those are given with the same
meaning and unit. Ours have what only we count. A counter's name gets `_total`, as the format wants. Counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvloom.core import MISS_REASONS
from kvloom.core.histogram import SECONDS, Histogram
from kvloom.serve.worker.messages import Counts, Stats, TenantUse

__all__ = ["Pool", "Row", "Value", "engine_rows", "exposition", "tenant_rows", "tier_rows"]

Labels = tuple[str, ...]
Value = float | Mapping[Any, float] | Histogram
"""A number, one for each value of a label (or tuple of several), or a spread."""
EVICTED = ("blocks", "window", "snapshot", "media")
BREAKERS = ("closed", "half-open", "open")


@dataclass(frozen=True, slots=True)
class Row:
    """One series. `value` is a number, a number for each value of `labels`, or a spread. `usual` are the field's names for
    it, and `usual_labels` what they call the labels."""

    name: str
    kind: str
    help: str
    value: Value
    usual: tuple[str, ...] = ()
    labels: Labels = ()
    usual_labels: Labels = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """What does not change while an engine runs: bytes of a slab, tokens of a block, and the share of each kind's pages that
    is padding."""

    slab_bytes: int = 0
    block_tokens: int = 0
    padding: dict[str, float] = field(default_factory=dict)


def exposition(rows: Iterable[Row], model: str) -> str:
    """The rows in Prometheus' text format, version 0.0.4. About a millisecond for all there are."""
    fixed = f'engine="0",model_name="{_escaped(model)}"'
    lines: list[str] = []
    for row in rows:
        if row.name:
            _write(lines, row.name, row, "", row.labels)
        for name in row.usual:
            _write(lines, name, row, fixed, row.usual_labels or row.labels)
    return "\n".join(lines) + "\n"


def _write(lines: list[str], name: str, row: Row, fixed: str, labels: Labels) -> None:
    name = name + "_total" if row.kind == "counter" else name
    lines += [f"# HELP {name} {row.help}", f"# TYPE {name} {row.kind}"]
    value = row.value
    if isinstance(value, Histogram):
        start = f"{fixed}," if fixed else ""
        reached = 0
        for bound, count in zip((*value.bounds, "+Inf"), value.counts, strict=True):
            reached += count
            lines.append(f'{name}_bucket{{{start}le="{bound}"}} {reached}')
        all_ = f"{{{fixed}}}" if fixed else ""
        lines += [f"{name}_count{all_} {reached}", f"{name}_sum{all_} {value.total}"]
    elif isinstance(value, Mapping):
        for words, number in value.items():
            given = (words,) if isinstance(words, str) else words
            pairs = [f'{key}="{_escaped(word)}"' for key, word in zip(labels, given, strict=True)]
            lines.append(f"{name}{{{','.join([fixed, *pairs] if fixed else pairs)}}} {number}")
    else:
        lines.append(f"{name}{{{fixed}}} {value}" if fixed else f"{name} {value}")


def _escaped(word: str) -> str:
    return word.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def engine_rows(stats: Stats, pool: Pool) -> list[Row]:
    """What the engine told last."""
    total = stats.slabs * pool.slab_bytes
    usage = stats.held_bytes / total if total else 0.0
    landed = stats.lower.get("loaded_tokens", 0)
    own = max(0, stats.hit_tokens - landed)
    beyond = stats.looked_up_tokens - own if stats.tiers else 0
    config = (str(pool.block_tokens), str(stats.slabs), "True")
    gauge = [
        Row("kvloom_running", "gauge", "Answers that hold pages", stats.running, ("vllm:num_requests_running",)),
        Row("kvloom_waiting", "gauge", "Answers that wait for their turn", stats.waiting, ("vllm:num_requests_waiting",)),
        Row("kvloom_pool_bytes", "gauge", "Bytes of the pool", total),
        Row("kvloom_pool_free_bytes", "gauge", "Bytes of the pool that are lent to nobody", stats.free_slabs * pool.slab_bytes),
        Row("kvloom_held_bytes", "gauge", "Bytes of pages that requests hold", stats.held_bytes),
        Row("kvloom_cached_bytes", "gauge", "Bytes of pages that stay for later requests", stats.cached_bytes),
        Row("kvloom_pool_usage_ratio", "gauge", "Share of the pool that requests hold", usage, ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        Row("kvloom_held_pages", "gauge", "Pages that requests hold", stats.held_pages),
        Row("kvloom_cached_pages", "gauge", "Pages that stay for later requests", stats.cached_pages),
        Row("kvloom_fragmented_bytes", "gauge", "Bytes of free pages in slabs that other pages keep lent", stats.fragmented_bytes),
        Row("kvloom_unused_tokens", "gauge", "Tokens that running requests have room for and have not computed", stats.unused_tokens),
        Row("kvloom_padding_ratio", "gauge", "Share of the pages of a kind of layers that is padding", pool.padding, labels=("kind",)),
        Row("", "gauge", "What the cache is made of", {config: 1}, ("vllm:cache_config_info",), ("block_size", "num_gpu_blocks", "enable_prefix_caching")),
        Row("kvloom_prefix_nodes", "gauge", "Nodes of the prefix tree", stats.nodes),
    ]  # fmt: skip
    counter = [
        Row("kvloom_steps", "counter", "Steps of the engine", stats.steps),
        Row("kvloom_preemptions", "counter", "Times an answer gave its pages up and waited again", stats.preemptions, ("vllm:num_preemptions",)),
        Row("kvloom_looked_up_tokens", "counter", "Tokens that were looked up in the cache", stats.looked_up_tokens, ("vllm:prefix_cache_queries",)),
        Row("kvloom_hit_tokens", "counter", "Of those, tokens that were found in any tier", stats.hit_tokens),
        Row("", "counter", "Tokens that the pool had", own, ("vllm:prefix_cache_hits",)),
        Row("", "counter", "Tokens that the pool did not have, and lower tiers were asked for", beyond, ("vllm:external_prefix_cache_queries",)),
        Row("", "counter", "Tokens that were brought from lower tiers", landed, ("vllm:external_prefix_cache_hits",)),
        Row("kvloom_hit_pages", "counter", "Pages that were found, by the kind of layers they serve", stats.hit_pages, labels=("kind",)),
        Row("kvloom_lookups", "counter", "Lookups by why they hit no further", _words(stats.stops, MISS_REASONS), labels=("reason",)),
        Row("kvloom_evictions", "counter", "Entries that left the cache", stats.evictions),
        Row("kvloom_evicted_bytes", "counter", "Bytes that left with them", stats.evicted_bytes),
        Row("kvloom_evicted_entries", "counter", "Entries that left the cache, by what they were", _words(stats.evicted, EVICTED), labels=("kind",)),
        Row("kvloom_moved_pages", "counter", "Pages moved together to free slabs", stats.moved_pages),
    ]  # fmt: skip
    spread = [
        Row("kvloom_eviction_age_seconds", "histogram", "How long what left had not been used", _spread(stats.idle), ("vllm:kv_block_idle_before_evict_seconds",)),
        Row("kvloom_reuse_seconds", "histogram", "How long what was hit had not been used", _spread(stats.reused), ("vllm:kv_block_reuse_gap_seconds",)),
    ]  # fmt: skip
    return [*gauge, *counter, *spread, *tier_rows(stats)]


def tier_rows(stats: Stats) -> list[Row]:
    """What lower tiers hold and moved, what was brought from them, and whether they are used at all."""
    tiers, lower = stats.tiers, stats.lower
    reads, writes = (
        {(t.name, o): n for t in tiers for o, n in getattr(t, verb).items()} for verb in ("reads", "writes")
    )
    breakers = {(t.name, state): float(t.breaker == state) for t in tiers for state in BREAKERS}
    faults = {(tier, verb, outcome): count for tier, verb, outcome, count in stats.faults}
    at = ("tier",)
    return [
        Row("kvloom_trips", "counter", "Times that pages were brought into the pool from below for a request", lower.get("load_jobs", 0)),
        Row("kvloom_landed_tokens", "counter", "Tokens that came that way", lower.get("loaded_tokens", 0)),
        Row("kvloom_landed_bytes", "counter", "Bytes that came that way", lower.get("loaded_bytes", 0)),
        Row("kvloom_missed_pages", "counter", "Pages that had left host memory when they were wanted", lower.get("failed_pages", 0)),
        Row("kvloom_kept_pages", "counter", "Pages copied to host memory", lower.get("offloaded_pages", 0)),
        Row("kvloom_loads_not_worth", "counter", "Loads left undone, for computing is faster", lower.get("not_worth_loading", 0)),
        Row("kvloom_loads_without_room", "counter", "Loads left undone for want of room in the pool", lower.get("no_room", 0)),
        Row("kvloom_tier_faults", "counter", "Pages that a tier failed to look up, load or store", faults, labels=("tier", "verb", "outcome")),
        Row("kvloom_tier_objects", "gauge", "Objects in a lower tier", {t.name: t.objects for t in tiers}, labels=at),
        Row("kvloom_tier_bytes", "gauge", "Bytes in a lower tier", {t.name: t.bytes for t in tiers}, labels=at),
        Row("kvloom_tier_capacity_bytes", "gauge", "Bytes that a lower tier may hold", {t.name: t.capacity for t in tiers}, labels=at),
        Row("kvloom_tier_breaker", "gauge", "1 at the state a tier's breaker is in: closed while it is used", breakers, labels=("tier", "state")),
        Row("kvloom_tier_reads", "counter", "Objects read from a lower tier, by outcome", reads, labels=("tier", "outcome")),
        Row("kvloom_tier_writes", "counter", "Objects written to a lower tier, by outcome", writes, labels=("tier", "outcome")),
        Row("kvloom_tier_read_bytes", "counter", "Bytes read from a lower tier", {t.name: t.bytes_read for t in tiers}, labels=at),
        Row("kvloom_tier_written_bytes", "counter", "Bytes written to a lower tier", {t.name: t.bytes_written for t in tiers}, labels=at),
        Row("kvloom_tier_evictions", "counter", "Objects that left a lower tier to make room", {t.name: t.evicted for t in tiers}, labels=at),
    ]  # fmt: skip


def tenant_rows(tenants: Mapping[str, TenantUse]) -> list[Row]:
    """What tenants use and find. Names and numbers; who may see whose is for the caller to say."""
    bytes_ = {
        (name, state): getattr(use, state) for name, use in tenants.items() for state in ("used", "held")
    }
    queued = {
        (name, state): getattr(use, state)
        for name, use in tenants.items()
        for state in ("running", "waiting")
    }

    def each(what: str) -> dict[str, float]:
        return {name: getattr(use, what) for name, use in tenants.items()}

    at = ("tenant",)
    return [
        Row("kvloom_tenant_bytes", "gauge", "Bytes of the pool that a tenant uses, and holds", bytes_, labels=("tenant", "state")),
        Row("kvloom_tenant_requests", "gauge", "Prompts of a tenant that run, and wait", queued, labels=("tenant", "state")),
        Row("kvloom_tenant_looked_up_tokens", "counter", "Tokens that a tenant looked up", each("looked_up_tokens"), labels=at),
        Row("kvloom_tenant_hit_tokens", "counter", "Of those, tokens that were found", each("hit_tokens"), labels=at),
        Row("kvloom_tenant_evictions", "counter", "Entries of a tenant that left the cache", each("evictions"), labels=at),
    ]  # fmt: skip


def _words(counts: Mapping[str, int], known: Iterable[str]) -> dict[str, float]:
    """Counts by words as labels have them; those that nothing was counted for are there from the beginning."""
    return {word.replace(" ", "_"): count for word, count in {**dict.fromkeys(known, 0), **counts}.items()}


def _spread(told: Counts) -> Histogram:
    found = Histogram(SECONDS)
    if told[0]:
        found.counts, found.total = list(told[0]), told[1]
    return found
