"""Generates the server's Grafana dashboard: `python tools/grafana.py` writes src/kvloom/serve/grafana.json.

SECTIONS lists the panels: title, description, unit, and queries with their legends. Knows Grafana's schema and the names
of kvloom's metrics.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FILE", "dashboard", "main"]

FILE = Path(__file__).parent.parent / "src" / "kvloom" / "serve" / "grafana.json"
SCHEMA = 39
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
AT = 'instance=~"$instance"'
QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` are pairs of expression and legend; `kind` is Grafana's panel type; `width` is in columns of 24."""

    title: str
    help: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False


def rate(name: str, by: str = "") -> str:
    """Return the query for a counter's increase per second."""
    inner = f"rate({name}{{{AT}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def share(part: str, whole: str, by: str = "") -> str:
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({q}, {rate(name + '_bucket', 'le')})", legend) for q, legend in QUANTILES
    )


def mean(name: str) -> str:
    return share(f"{name}_sum", f"{name}_count")


def total(name: str, by: str = "") -> str:
    return f"sum by ({by}) ({name}{{{AT}}})" if by else f"sum({name}{{{AT}}})"


HIT_RATE = share("kvloom_hit_tokens_total", "kvloom_looked_up_tokens_total")
SECTIONS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel("Hit rate", "Share of looked-up tokens that were found", "percentunit", ((HIT_RATE, ""),), "stat", 4),
        Panel("Time to first token", "95th percentile", "s", (quantiles("kvloom_time_to_first_token_seconds")[1],), "stat", 4),
        Panel("Output tokens", "Per second", "short", ((rate("kvloom_output_tokens_total"), ""),), "stat", 4),
        Panel("Running", "Running answers", "short", ((total("kvloom_running"), ""),), "stat", 4),
        Panel("Waiting", "Waiting answers", "short", ((total("kvloom_waiting"), ""),), "stat", 4),
        Panel("Engines up", "Ready engines", "short", ((total("kvloom_engine_up"), ""),), "stat", 4),
    ),
    "Hits and misses": (
        Panel("Hit rate", "Share of looked-up tokens that were found", "percentunit", ((HIT_RATE, "hit rate"),)),
        Panel("Miss reasons", "Lookups per second, by miss reason", "short", ((rate("kvloom_lookups_total", "reason"), "{{reason}}"),), stacked=True),
        Panel("Hits by tier", "Tokens found per second, by tier", "short", ((rate("kvloom_tier_hit_tokens_total", "tier"), "{{tier}}"),), stacked=True),
        Panel("Hit rate by tier", "Share of prompt tokens found in the pool (device) and in each tier", "percentunit", ((f"{rate('kvloom_tier_hit_tokens_total', 'tier')} / ignoring(tier) group_left {rate('kvloom_prompt_tokens_total')}", "{{tier}}"),), stacked=True),
        Panel("Saved prefill", "Prefill seconds saved per second by cached tokens, less load time (an estimate)", "s", ((rate("kvloom_saved_prefill_seconds_total"), "seconds"),)),
        Panel("Saved tokens", "Prompt tokens per second that were not computed", "short", ((rate("kvloom_cached_prompt_tokens_total"), "tokens"),)),
        Panel("Hits by kind", "Pages found per second, by kind of layer", "short", ((rate("kvloom_hit_pages_total", "kind"), "{{kind}}"),), stacked=True),
        Panel("Reuse age", "Time since the last use of hit entries", "s", quantiles("kvloom_reuse_seconds")),
        Panel("Eviction age", "Time since the last use of evicted entries; if below the reuse age, the pool is too small", "s", quantiles("kvloom_eviction_age_seconds")),
    ),
    "Latency": (
        Panel("Time to first token", "Time from request to first token", "s", quantiles("kvloom_time_to_first_token_seconds")),
        Panel("Time between tokens", "Time between output tokens of a request", "s", quantiles("kvloom_inter_token_seconds")),
        Panel("Request latency", "Time from request to the end of its answers", "s", quantiles("kvloom_request_seconds")),
        Panel("Latency by phase", "Mean seconds of a request in each phase", "s", tuple((mean(f"kvloom_{part}_seconds"), part) for part in ("queue", "prefill", "decode")), stacked=True),
    ),
    "Pool": (
        Panel("Page pool", "Bytes in use, cached and free", "bytes", ((total("kvloom_in_use_bytes"), "in use"), (total("kvloom_cached_bytes"), "cached"), (total("kvloom_pool_free_bytes"), "free")), stacked=True),
        Panel("Fragmentation", "Free pages in occupied slabs", "bytes", ((total("kvloom_fragmented_bytes"), "fragmented"),)),
        Panel("Allocated, not computed", "Tokens of running requests with allocated pages that are not computed yet", "short", ((total("kvloom_unused_tokens"), "tokens"),)),
        Panel("Padding", "Share of padding in pages, by kind of layer", "percentunit", ((f"max by (kind) (kvloom_padding_ratio{{{AT}}})", "{{kind}}"),)),
        Panel("Evictions", "Evicted entries per second, by kind", "short", ((rate("kvloom_evicted_entries_total", "kind"), "{{kind}}"),), stacked=True),
        Panel("Prefix tree", "Nodes of the radix tree", "short", ((total("kvloom_prefix_nodes"), "nodes"),)),
    ),
    "Traffic": (
        Panel("Tokens", "Tokens per second", "short", ((rate("kvloom_prompt_tokens_total"), "prompt"), (rate("kvloom_cached_prompt_tokens_total"), "cached prompt"), (rate("kvloom_output_tokens_total"), "output"))),
        Panel("Queues", "Running and waiting answers, open requests", "short", ((total("kvloom_running"), "running"), (total("kvloom_waiting"), "waiting"), (total("kvloom_open_requests"), "open requests"))),
        Panel("Finish reasons", "Finished answers per second, by reason", "short", ((rate("kvloom_finished_answers_total", "reason"), "{{reason}}"),), stacked=True),
        Panel("HTTP", "Responses per second, by status", "short", ((rate("kvloom_requests_total", "status"), "{{status}}"),), stacked=True),
        Panel("Preemptions", "Preemptions per second", "short", ((rate("kvloom_preemptions_total"), "preemptions"),)),
        Panel("Engine restarts", "Restarts of the engine", "short", ((total("kvloom_engine_restarts_total"), "restarts"),)),
    ),
    "Tiers": (
        Panel("Bytes in tiers", "Stored bytes, by tier", "bytes", ((total("kvloom_tier_bytes", "tier"), "{{tier}}"),)),
        Panel("Reads", "Objects per second, by tier and outcome", "short", ((rate("kvloom_tier_reads_total", "tier, outcome"), "{{tier}} {{outcome}}"),)),
        Panel("Writes", "Objects per second, by tier and outcome", "short", ((rate("kvloom_tier_writes_total", "tier, outcome"), "{{tier}} {{outcome}}"),)),
        Panel("Transfers", "Bytes per second, by tier", "Bps", ((rate("kvloom_tier_read_bytes_total", "tier"), "{{tier}} read"), (rate("kvloom_tier_written_bytes_total", "tier"), "{{tier}} written"))),
        Panel("Loads", "Prompt tokens loaded from tiers per second", "short", ((rate("kvloom_loaded_tokens_total"), "tokens"),)),
        Panel("Faults", "Failed pages per second, by tier and outcome", "short", ((rate("kvloom_tier_faults_total", "tier, outcome"), "{{tier}} {{outcome}}"),)),
        Panel("Circuit breakers", "1 while a tier is disabled after faults", "short", ((f'max by (tier) (kvloom_tier_breaker{{state="open", {AT}}})', "{{tier}}"),)),
    ),
    "Tenants (scraped with an admin key)": (
        Panel("Pool bytes by tenant", "Used bytes of the pool", "bytes", ((f'sum by (tenant) (kvloom_tenant_bytes{{state="used", {AT}}})', "{{tenant}}"),), stacked=True),
        Panel("Hit rate by tenant", "Share of its looked-up tokens", "percentunit", ((share("kvloom_tenant_hit_tokens_total", "kvloom_tenant_looked_up_tokens_total", "tenant"), "{{tenant}}"),)),
        Panel("Waiting by tenant", "Waiting prompts", "short", ((f'sum by (tenant) (kvloom_tenant_requests{{state="waiting", {AT}}})', "{{tenant}}"),)),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's import format."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, section in SECTIONS.items():
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )  # fmt: skip
        top += 1
        left = height = 0
        for panel in section:
            if left + panel.width > WIDTH:
                top, left = top + height, 0
            height = 4 if panel.kind == "stat" else 8
            panels.append(
                _panel(panel, len(panels) + 1, {"h": height, "w": panel.width, "x": left, "y": top})
            )
            left += panel.width
        top += height
    return {
        "uid": "kvloom-cache",
        "title": "kvloom",
        "description": "KV cache: hits and miss reasons, latency, page pool, traffic, tiers, tenants",
        "tags": ["kvloom", "llm", "kv-cache"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": SCHEMA,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"datasource": SOURCE, "editorMode": "code", "expr": expression, "legendFormat": legend, "range": True, "refId": chr(65 + i)}
        for i, (expression, legend) in enumerate(panel.queries)
    ]  # fmt: skip
    drawn: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 30 if panel.stacked else 0, "showPoints": "never"}
    drawn["stacking"] = {"group": "A", "mode": "normal" if panel.stacked else "none"}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    options: dict[str, Any] = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area", "colorMode": "value", "textMode": "auto"}  # fmt: skip
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = drawn
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(kvloom_engine_up, instance)"
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0, "current": {}, "refresh": 1},
        {
            "name": "instance", "label": "Server", "type": "query", "datasource": SOURCE,
            "query": {"query": query, "refId": "instances"}, "multi": True, "includeAll": True, "allValue": ".*",
            "current": {"text": "All", "value": "$__all"}, "refresh": 2, "sort": 1, "hide": 0,
        },
    ]  # fmt: skip


def main() -> int:
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
