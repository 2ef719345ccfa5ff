"""Make the Grafana dashboard that comes with the server: `python tools/grafana.py` writes src/kvloom/serve/grafana.json.

A panel is a row of SECTIONS: its title, what it shows, the unit, and its queries with their legends. Knows Grafana's schema, and
nothing of kvloom but the names of its series.
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
QUANTILES = ((0.5, "half"), (0.95, "95 %"), (0.99, "99 %"))


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries` are pairs of an expression and its legend. `kind` is Grafana's; `width` of 24 columns."""

    title: str
    help: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False


def rate(name: str, by: str = "") -> str:
    """A counter's increase a second."""
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
        Panel("Hit rate", "Of the tokens looked up, those that the cache had", "percentunit", ((HIT_RATE, ""),), "stat", 4),
        Panel("First token", "95 % of requests had theirs within", "s", (quantiles("kvloom_time_to_first_token_seconds")[1],), "stat", 4),
        Panel("Tokens made", "A second, of answers", "short", ((rate("kvloom_output_tokens_total"), ""),), "stat", 4),
        Panel("Running", "Answers that hold pages", "short", ((total("kvloom_running"), ""),), "stat", 4),
        Panel("Waiting", "Answers that wait for their turn", "short", ((total("kvloom_waiting"), ""),), "stat", 4),
        Panel("Engines up", "Engines that are ready", "short", ((total("kvloom_engine_up"), ""),), "stat", 4),
    ),
    "Why it hits, why it misses": (
        Panel("Hit rate", "Of the tokens looked up, those that the cache had", "percentunit", ((HIT_RATE, "hit rate"),)),
        Panel("Why lookups hit no further", "Lookups by the reason for their end", "short", ((rate("kvloom_lookups_total", "reason"), "{{reason}}"),), stacked=True),
        Panel("Hits by tier", "Tokens found a second, by the tier that had them", "short", ((rate("kvloom_tier_hit_tokens_total", "tier"), "{{tier}}"),), stacked=True),
        Panel("Hits by kind", "Pages found a second, by the kind of layers they serve", "short", ((rate("kvloom_hit_pages_total", "kind"), "{{kind}}"),), stacked=True),
        Panel("Time between uses", "How long what was hit had not been used", "s", quantiles("kvloom_reuse_seconds")),
        Panel("Age of what leaves", "How long what was evicted had not been used: below the time between uses, the cache is too small", "s", quantiles("kvloom_eviction_age_seconds")),
    ),
    "Latency": (
        Panel("Time to first token", "From request to first token", "s", quantiles("kvloom_time_to_first_token_seconds")),
        Panel("Between tokens", "Between the tokens of an answer", "s", quantiles("kvloom_inter_token_seconds")),
        Panel("Whole requests", "From request to the end of its answer", "s", quantiles("kvloom_request_seconds")),
        Panel("Where the time goes", "Mean seconds of a request in each part of its way", "s", tuple((mean(f"kvloom_{part}_seconds"), part) for part in ("queue", "prefill", "decode")), stacked=True),
    ),
    "Pool": (
        Panel("Bytes of the pool", "Held by requests, kept for later ones, lent to nobody", "bytes", ((total("kvloom_held_bytes"), "held"), (total("kvloom_cached_bytes"), "cached"), (total("kvloom_pool_free_bytes"), "free")), stacked=True),
        Panel("Waste", "Free pages in lent slabs", "bytes", ((total("kvloom_fragmented_bytes"), "fragmented"),)),
        Panel("Reserved, not computed", "Tokens that running requests have room for and have not computed", "short", ((total("kvloom_unused_tokens"), "tokens"),)),
        Panel("Padding", "Share of the pages of a kind of layers that is padding", "percentunit", ((f"max by (kind) (kvloom_padding_ratio{{{AT}}})", "{{kind}}"),)),
        Panel("Evictions", "Entries that leave a second, by what they are", "short", ((rate("kvloom_evicted_entries_total", "kind"), "{{kind}}"),), stacked=True),
        Panel("Prefix tree", "Nodes", "short", ((total("kvloom_prefix_nodes"), "nodes"),)),
    ),
    "Traffic": (
        Panel("Tokens", "A second", "short", ((rate("kvloom_prompt_tokens_total"), "of prompts"), (rate("kvloom_cached_prompt_tokens_total"), "of those, cached"), (rate("kvloom_output_tokens_total"), "of answers"))),
        Panel("Queues", "Answers that run and wait, requests that are open", "short", ((total("kvloom_running"), "running"), (total("kvloom_waiting"), "waiting"), (total("kvloom_open_requests"), "open requests"))),
        Panel("How answers end", "A second, by reason", "short", ((rate("kvloom_finished_answers_total", "reason"), "{{reason}}"),), stacked=True),
        Panel("HTTP", "Answers a second, by status", "short", ((rate("kvloom_requests_total", "status"), "{{status}}"),), stacked=True),
        Panel("Preemptions", "Answers a second that gave their pages up and waited again", "short", ((rate("kvloom_preemptions_total"), "preemptions"),)),
        Panel("Engine restarts", "Times the engine was started again", "short", ((total("kvloom_engine_restarts_total"), "restarts"),)),
    ),
    "Tiers": (
        Panel("Bytes in tiers", "What lower tiers hold", "bytes", ((total("kvloom_tier_bytes", "tier"), "{{tier}}"),)),
        Panel("Reads", "Objects a second, by tier and outcome", "short", ((rate("kvloom_tier_reads_total", "tier, outcome"), "{{tier}} {{outcome}}"),)),
        Panel("Writes", "Objects a second, by tier and outcome", "short", ((rate("kvloom_tier_writes_total", "tier, outcome"), "{{tier}} {{outcome}}"),)),
        Panel("Transfers", "Bytes a second", "Bps", ((rate("kvloom_tier_read_bytes_total", "tier"), "{{tier}} read"), (rate("kvloom_tier_written_bytes_total", "tier"), "{{tier}} written"))),
        Panel("Brought from below", "Tokens a second that came into the pool from lower tiers", "short", ((rate("kvloom_landed_tokens_total"), "tokens"),)),
        Panel("Faults", "Pages a second that tiers failed with", "short", ((rate("kvloom_tier_faults_total", "tier, outcome"), "{{tier}} {{outcome}}"),)),
        Panel("Breakers", "1 where a tier is left alone after faults", "short", ((f'max by (tier) (kvloom_tier_breaker{{state="open", {AT}}})', "{{tier}}"),)),
    ),
    "Tenants (asked with an operator's key)": (
        Panel("Bytes by tenant", "Of the pool", "bytes", ((f'sum by (tenant) (kvloom_tenant_bytes{{state="used", {AT}}})', "{{tenant}}"),), stacked=True),
        Panel("Hit rate by tenant", "Of the tokens it looked up", "percentunit", ((share("kvloom_tenant_hit_tokens_total", "kvloom_tenant_looked_up_tokens_total", "tenant"), "{{tenant}}"),)),
        Panel("Waiting by tenant", "Prompts that wait", "short", ((f'sum by (tenant) (kvloom_tenant_requests{{state="waiting", {AT}}})', "{{tenant}}"),)),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
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
        "description": "The cache at work: hits and why not more, latency, the pool, traffic, tiers, tenants",
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
