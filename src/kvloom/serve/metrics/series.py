"""Names, help texts and label sets of all metrics, and Prometheus' text format.

A series has a kvloom name and, if vLLM has the same metric, vLLM's names with the labels `model_name` and `engine`.
Deprecated aliases are served for one version. This module counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvloom.core import MISS_REASONS, RATIOS, SECONDS, Histogram
from kvloom.serve.worker import EngineStats, HistogramCounts, TenantUsage

__all__ = [
    "PoolInfo",
    "Series",
    "Value",
    "age_histogram",
    "engine_series",
    "exposition",
    "expositions",
    "full_name",
    "tenant_series",
    "tier_series",
]

Labels = tuple[str, ...]
Value = float | Mapping[Any, float] | Histogram
"""The value of a series: a number, a number per label value (or tuple of label values), or a histogram."""
EVICTED = ("blocks", "window", "snapshot", "media")
BREAKERS = ("closed", "half-open", "open")


@dataclass(frozen=True, slots=True)
class Series:
    """One metric. `vllm_names` and `vllm_labels` are its names and labels in vLLM. `aliases` are former names."""

    name: str
    kind: str
    help: str
    value: Value
    vllm_names: tuple[str, ...] = ()
    labels: Labels = ()
    vllm_labels: Labels = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """Constants of a running engine: bytes per slab, tokens per block, and for each kind of layer the share of padding
    in its pages.
    """

    slab_bytes: int = 0
    block_tokens: int = 0
    padding: dict[str, float] = field(default_factory=dict)


def exposition(rows: Iterable[Series], model: str) -> str:
    """Return the series of one model in Prometheus' text format, version 0.0.4. Takes about a millisecond."""
    return expositions({model: rows}, is_labelled=False)


def expositions(
    models: Mapping[str, Iterable[Series]], is_labelled: bool, server: Iterable[Series] = ()
) -> str:
    """Return the series of several models and of the server in Prometheus' text format. Each metric name occurs once,
    with the samples of all models.

    With `is_labelled`, kvloom's series of a model have the label `model`. vLLM's series always have the label
    `model_name`.
    """
    families: dict[str, list[str]] = {}
    for row in server:
        _add(families, row, "", "")
    for model, rows in models.items():
        ours = f'model="{_escaped(model)}"' if is_labelled else ""
        vllm = f'engine="0",model_name="{_escaped(model)}"'
        for row in rows:
            _add(families, row, ours, vllm)
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _add(families: dict[str, list[str]], row: Series, ours: str, vllm: str) -> None:
    """Add the samples of a series under its kvloom name, its aliases and its vLLM names."""
    if row.name:
        _write(families, row.name, row, row.help, ours, row.labels)
    for name in row.aliases:
        alias = f"Deprecated alias of {full_name(row.name, row.kind)}"
        _write(families, name, row, alias, ours, row.labels)
    for name in row.vllm_names:
        _write(families, name, row, row.help, vllm, row.vllm_labels or row.labels)


def full_name(name: str, kind: str) -> str:
    """Return the name of a series as Prometheus shows it. Counters end in `_total`."""
    return f"{name}_total" if kind == "counter" else name


def _write(
    families: dict[str, list[str]], name: str, row: Series, help_: str, fixed: str, labels: Labels
) -> None:
    name = full_name(name, row.kind)
    lines = families.setdefault(name, [f"# HELP {name} {help_}", f"# TYPE {name} {row.kind}"])
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


def engine_series(stats: EngineStats, pool: PoolInfo) -> list[Series]:
    """Return the series of the engine's latest stats."""
    total = stats.slabs * pool.slab_bytes
    usage = stats.in_use_bytes / total if total else 0.0
    loaded = stats.offload.get("loaded_tokens", 0)
    from_pool = max(0, stats.hit_tokens - loaded)
    asked_tiers = stats.looked_up_tokens - from_pool if stats.tiers else 0
    config = (str(pool.block_tokens), str(stats.slabs), "True")
    gauges = [
        Series("kvloom_running", "gauge", "Running answers", stats.running, ("vllm:num_requests_running",)),
        Series("kvloom_waiting", "gauge", "Waiting answers", stats.waiting, ("vllm:num_requests_waiting",)),
        Series("kvloom_pool_bytes", "gauge", "Size of the page pool in bytes", total),
        Series("kvloom_pool_free_bytes", "gauge", "Bytes of free slabs", stats.free_slabs * pool.slab_bytes),
        Series("kvloom_in_use_bytes", "gauge", "Bytes of pages in use by running requests", stats.in_use_bytes, aliases=("kvloom_held_bytes",)),
        Series("kvloom_cached_bytes", "gauge", "Bytes of cached pages", stats.cached_bytes),
        Series("kvloom_pool_usage_ratio", "gauge", "Share of the pool in use by running requests", usage, ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        Series("kvloom_in_use_pages", "gauge", "Pages in use by running requests", stats.in_use_pages, aliases=("kvloom_held_pages",)),
        Series("kvloom_cached_pages", "gauge", "Cached pages", stats.cached_pages),
        Series("kvloom_fragmented_bytes", "gauge", "Bytes of free pages in slabs that other pages occupy", stats.fragmented_bytes),
        Series("kvloom_unused_tokens", "gauge", "Tokens of running requests with allocated pages that are not computed yet", stats.unused_tokens),
        Series("kvloom_padding_ratio", "gauge", "Share of padding in the pages of a kind of layer", pool.padding, labels=("kind",)),
        Series("", "gauge", "Configuration of the cache", {config: 1}, ("vllm:cache_config_info",), ("block_size", "num_gpu_blocks", "enable_prefix_caching")),
        Series("kvloom_prefix_nodes", "gauge", "Nodes of the radix tree", stats.nodes),
    ]  # fmt: skip
    counters = [
        Series("kvloom_steps", "counter", "Engine steps", stats.steps),
        *_speculation_series(stats),
        *_slo_series(stats),
        Series("kvloom_setting", "gauge", "Settings that measurements change, in tokens or bytes", {one.name: one.value for one in stats.settings}, labels=("setting",)),
        *_adapter_series(stats),
        *_policy_series(stats),
        Series("kvloom_preemptions", "counter", "Preemptions", stats.preemptions, ("vllm:num_preemptions",)),
        Series("kvloom_looked_up_tokens", "counter", "Prompt tokens looked up in the cache", stats.looked_up_tokens, ("vllm:prefix_cache_queries",)),
        Series("kvloom_hit_tokens", "counter", "Prompt tokens found in the pool or a tier", stats.hit_tokens),
        Series("", "counter", "Prompt tokens found in the pool", from_pool, ("vllm:prefix_cache_hits",)),
        Series("", "counter", "Prompt tokens looked up in tiers", asked_tiers, ("vllm:external_prefix_cache_queries",)),
        Series("", "counter", "Prompt tokens loaded from tiers", loaded, ("vllm:external_prefix_cache_hits",)),
        Series("kvloom_hit_pages", "counter", "Pages found, by kind of layer", stats.hit_pages, labels=("kind",)),
        Series("kvloom_lookups", "counter", "Lookups by miss reason", _labelled(stats.miss_reasons, MISS_REASONS), labels=("reason",)),
        Series("kvloom_evictions", "counter", "Entries evicted from the pool", stats.evictions),
        Series("kvloom_evicted_bytes", "counter", "Bytes evicted from the pool", stats.evicted_bytes),
        Series("kvloom_evicted_entries", "counter", "Entries evicted from the pool, by kind", _labelled(stats.evicted, EVICTED), labels=("kind",)),
        Series("kvloom_compacted_pages", "counter", "Pages moved by compaction to free slabs", stats.moved_pages, aliases=("kvloom_moved_pages",)),
    ]  # fmt: skip
    histograms = [
        Series("kvloom_eviction_age_seconds", "histogram", "Time since the last use of evicted entries", age_histogram(stats.eviction_age), ("vllm:kv_block_idle_before_evict_seconds",)),
        Series("kvloom_reuse_seconds", "histogram", "Time since the last use of hit entries", age_histogram(stats.reuse_age), ("vllm:kv_block_reuse_gap_seconds",)),
    ]  # fmt: skip
    return [*gauges, *counters, *histograms, *tier_series(stats)]


def _speculation_series(stats: EngineStats) -> list[Series]:
    """Return the series of drafts."""
    accepted = {str(position): count for position, count in enumerate(stats.accepted_tokens)}
    proposed = {str(position): count for position, count in enumerate(stats.proposed_tokens)}
    return [
        Series("kvloom_drafts", "counter", "Verified drafts", stats.drafts, ("vllm:spec_decode_num_drafts",)),
        Series("kvloom_proposed_tokens", "counter", "Draft tokens, by position in the draft", proposed, labels=("position",)),
        Series("kvloom_accepted_tokens", "counter", "Accepted draft tokens, by position in the draft", accepted, ("vllm:spec_decode_num_accepted_tokens_per_pos",), ("position",)),
        Series("", "counter", "Draft tokens", sum(stats.proposed_tokens), ("vllm:spec_decode_num_draft_tokens",)),
        Series("", "counter", "Accepted draft tokens", sum(stats.accepted_tokens), ("vllm:spec_decode_num_accepted_tokens",)),
        Series("kvloom_draft_saved_seconds", "gauge", "Estimated seconds that drafts saved", stats.draft_seconds_saved),
    ]  # fmt: skip


def _policy_series(stats: EngineStats) -> list[Series]:
    """Return the series that compare the adaptive eviction policy with LRU. All values are 0 if the engine uses another
    policy."""
    policy = stats.policy
    return [
        Series("kvloom_policy_off", "gauge", "1 while the adaptive policy evicts like LRU, because it lost hits against LRU", policy.get("is_off", 0)),
        Series("kvloom_policy_switched_off", "counter", "How often the adaptive policy was switched off", policy.get("times_off", 0)),
        Series("kvloom_policy_gained_tokens", "counter", "Tokens hit that LRU would not have hit", policy.get("gained_tokens", 0)),
        Series("kvloom_policy_lost_tokens", "counter", "Tokens not hit that LRU would have hit, estimated", policy.get("lost_tokens", 0)),
        Series("kvloom_policy_compared_tokens", "counter", "Tokens looked up while the adaptive policy was compared with LRU", policy.get("compared_tokens", 0)),
    ]  # fmt: skip


def _adapter_series(stats: EngineStats) -> list[Series]:
    """Return the series of LoRA adapters."""
    requests = {one.name: one.requests for one in stats.adapters}
    resident = {one.name: float(one.is_resident) for one in stats.adapters}
    return [
        Series("kvloom_adapters", "gauge", "Loaded LoRA adapters", len(stats.adapters)),
        Series("kvloom_adapter_resident", "gauge", "1 if a LoRA adapter has a slot on the device", resident, labels=("adapter",)),
        Series("kvloom_adapter_requests", "counter", "Requests with a LoRA adapter", requests, labels=("adapter",)),
    ]  # fmt: skip


def tier_series(stats: EngineStats) -> list[Series]:
    """Return the series of tiers and of loads from them."""
    tiers, offload = stats.tiers, stats.offload
    reads, writes = (
        {(t.name, o): n for t in tiers for o, n in getattr(t, verb).items()} for verb in ("reads", "writes")
    )
    breakers = {(t.name, state): float(t.breaker == state) for t in tiers for state in BREAKERS}
    faults = {(tier, verb, outcome): count for tier, verb, outcome, count in stats.tier_faults}
    at = ("tier",)
    roles = {(role,): float(role == stats.role) for role in ("both", "prefill", "decode", "encode")}
    return [
        Series("kvloom_role", "gauge", "1 for the role of this worker", roles, labels=("role",)),
        Series("kvloom_load_jobs", "counter", "Load jobs: copies of a request's pages from host memory into the pool", offload.get("load_jobs", 0), aliases=("kvloom_trips",)),
        Series("kvloom_loaded_tokens", "counter", "Prompt tokens loaded from tiers", offload.get("loaded_tokens", 0), aliases=("kvloom_landed_tokens",)),
        Series("kvloom_loaded_bytes", "counter", "Bytes loaded from tiers", offload.get("loaded_bytes", 0), aliases=("kvloom_landed_bytes",)),
        Series("kvloom_hand_overs", "counter", "Prompts of prefill workers whose pages all arrived", offload.get("hand_overs", 0)),
        Series("kvloom_cut_hand_overs", "counter", "Prompts whose prefill worker or pages were lost or late", offload.get("cut_hand_overs", 0)),
        Series("kvloom_handed_over_pages", "counter", "Pages pulled from prefill workers while they computed", offload.get("handed_over_pages", 0)),
        *_encoding_series(stats.encoding),
        Series("kvloom_load_failed_pages", "counter", "Pages that host memory evicted before they were loaded", offload.get("failed_pages", 0), aliases=("kvloom_missed_pages",)),
        Series("kvloom_loaded_images", "counter", "Images whose embeddings were loaded from tiers", offload.get("loaded_images", 0)),
        Series("kvloom_encoded_images", "counter", "Images that no tier had in time, so the vision encoder ran", offload.get("encoded_images", 0)),
        Series("kvloom_offloaded_pages", "counter", "Pages copied to host memory", offload.get("offloaded_pages", 0), aliases=("kvloom_kept_pages",)),
        Series("kvloom_cold_pages", "counter", "Pages of running requests that became cold: the pool is too small for them", offload.get("cold_pages", 0)),
        Series("kvloom_loads_slower_than_recompute", "counter", "Loads skipped because recomputing is faster", offload.get("not_worth_loading", 0), aliases=("kvloom_loads_not_worth",)),
        Series("kvloom_loads_without_free_pages", "counter", "Loads skipped because the pool had no free pages", offload.get("no_free_pages", 0), aliases=("kvloom_loads_without_room",)),
        Series("kvloom_tier_faults", "counter", "Pages that a tier failed to look up, load or store", faults, labels=("tier", "verb", "outcome")),
        Series("kvloom_tier_objects", "gauge", "Objects in a tier", {t.name: t.objects for t in tiers}, labels=at),
        Series("kvloom_tier_bytes", "gauge", "Bytes in a tier", {t.name: t.bytes for t in tiers}, labels=at),
        Series("kvloom_tier_capacity_bytes", "gauge", "Capacity of a tier in bytes", {t.name: t.capacity for t in tiers}, labels=at),
        Series("kvloom_tier_breaker", "gauge", "State of a tier's circuit breaker: 1 for the current one; closed means in use", breakers, labels=("tier", "state")),
        Series("kvloom_tier_reads", "counter", "Objects read from a tier, by outcome", reads, labels=("tier", "outcome")),
        Series("kvloom_tier_writes", "counter", "Objects written to a tier, by outcome", writes, labels=("tier", "outcome")),
        Series("kvloom_tier_read_bytes", "counter", "Bytes read from a tier", {t.name: t.bytes_read for t in tiers}, labels=at),
        Series("kvloom_tier_written_bytes", "counter", "Bytes written to a tier", {t.name: t.bytes_written for t in tiers}, labels=at),
        Series("kvloom_tier_evictions", "counter", "Objects evicted from a tier", {t.name: t.evicted for t in tiers}, labels=at),
    ]  # fmt: skip


def _encoding_series(counts: Mapping[str, float]) -> list[Series]:
    """Return the series about encode workers. An encode worker counts the series `kvloom_encoder_…`. A worker that
    requests embeddings from encode workers counts all others."""
    rows = (
        ("kvloom_handed_over_images", "Images whose embeddings came from encode workers", "handed_over_images"),
        ("kvloom_handed_over_image_bytes", "Bytes of embeddings that came from encode workers", "handed_over_bytes"),
        ("kvloom_handed_over_image_hits", "Handed over images that encode workers had encoded before", "hits"),
        ("kvloom_handed_over_image_seconds", "Seconds from request to embeddings, of handed over images", "seconds"),
        ("kvloom_sent_image_bytes", "Bytes of images sent to encode workers", "sent_bytes"),
        ("kvloom_image_fallbacks", "Images encoded here because their encode worker was lost, late, unknown or refused them", "fallbacks"),
        ("kvloom_encoder_images", "Images that this encode worker encoded", "encoded_images"),
        ("kvloom_encoder_refused_images", "Images that this encode worker could not encode", "refused_images"),
        ("kvloom_encoder_seconds", "Seconds in which this encode worker encoded images", "encode_seconds"),
        ("kvloom_encoder_embedding_bytes", "Bytes of embeddings that this encode worker computed", "embedding_bytes"),
    )  # fmt: skip
    return [Series(name, "counter", help_, counts.get(field, 0)) for name, help_, field in rows]


def tenant_series(tenants: Mapping[str, TenantUsage]) -> list[Series]:
    """Return the series of the given tenants. The caller decides which tenants the reader may see."""
    bytes_ = {
        (name, state): getattr(use, field_)
        for name, use in tenants.items()
        for state, field_ in (("used", "used"), ("in_use", "in_use"), ("held", "in_use"))
    }
    requests = {
        (name, state): getattr(use, state)
        for name, use in tenants.items()
        for state in ("running", "waiting")
    }

    def each(field_: str) -> dict[str, float]:
        return {name: getattr(use, field_) for name, use in tenants.items()}

    at = ("tenant",)
    in_tiers = {(name, tier): used for name, use in tenants.items() for tier, used in use.tiers.items()}
    return [
        Series("kvloom_tenant_bytes", "gauge", "Pool bytes of a tenant: used (all), in_use (running requests)", bytes_, labels=("tenant", "state")),
        Series("kvloom_tenant_tier_bytes", "gauge", "Bytes of a tenant with a share in a tier", in_tiers, labels=("tenant", "tier")),
        Series("kvloom_tenant_requests", "gauge", "Running and waiting prompts of a tenant", requests, labels=("tenant", "state")),
        Series("kvloom_tenant_looked_up_tokens", "counter", "Prompt tokens that a tenant looked up", each("looked_up_tokens"), labels=at),
        Series("kvloom_tenant_hit_tokens", "counter", "Prompt tokens found for a tenant", each("hit_tokens"), labels=at),
        Series("kvloom_tenant_evictions", "counter", "Entries of a tenant evicted from the pool", each("evictions"), labels=at),
    ]  # fmt: skip


def _labelled(counts: Mapping[str, int], known: Iterable[str]) -> dict[str, float]:
    """Return counts by label value, with underscores in place of spaces. All `known` values are included, even with
    count 0."""
    return {word.replace(" ", "_"): count for word, count in {**dict.fromkeys(known, 0), **counts}.items()}


def _slo_series(stats: EngineStats) -> list[Series]:
    """Return the series of requests with an objective: the numbers of admitted, deferred and refused requests, and
    histograms of the actual times divided by the predicted times.
    """
    admitted, deferred, refused = (stats.slo.get(verdict, 0) for verdict in ("admit", "defer", "refuse"))
    ttft, tbt = (age_histogram(one, RATIOS) for one in (stats.slo_ttft_ratio, stats.slo_tbt_ratio))
    return [
        Series("kvloom_slo_admitted", "counter", "Requests with an objective that were admitted at once", admitted),
        Series("kvloom_slo_deferred", "counter", "Requests with an objective and a deadline that had to wait", deferred),
        Series("kvloom_slo_refused", "counter", "Requests refused because they could not meet their objective", refused),
        Series("kvloom_slo_ttft_ratio", "histogram", "Actual divided by predicted time to first token", ttft),
        Series("kvloom_slo_tbt_ratio", "histogram", "Actual divided by predicted time between tokens", tbt),
    ]  # fmt: skip


def age_histogram(counts: HistogramCounts, bounds: Sequence[float] = SECONDS) -> Histogram:
    """Return the counts that the engine sent as a Histogram with the bucket bounds `bounds`."""
    found = Histogram(bounds)
    if counts[0]:
        found.counts, found.total = list(counts[0]), counts[1]
    return found
