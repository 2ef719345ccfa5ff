"""Shows the state of a server in a terminal, as rich renderables that fit any terminal size. This module is independent
of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvloom.serve.words import fault_text, tier_word

from .text_formats import format_ago, format_bytes, format_count, format_percent, format_seconds

__all__ = ["MODES", "screen"]

MODES = ("kind", "state", "tenant")
KINDS = {"full": "blue", "sliding": "yellow", "state": "magenta", "latent": "green", "chunked": "red", "cross": "cyan"}  # fmt: skip
STATES = {"in use": "red", "cached": "cyan", "pinned": "yellow", "unbacked": "bright_black"}
TENANTS = ("blue", "yellow", "green", "magenta", "cyan", "red")
GLYPHS = {"in use": "█", "pinned": "▓", "cached": "▒", "unknown": "▒", "unbacked": "x"}
MAX_TENANTS = 6
BARS = "▁▂▃▄▅▆▇█"
State = dict[str, Any]
Series = Sequence[float | None]


def screen(state: State, requests: list[State] | None, mode: str = "kind", note: str = "") -> Layout:
    """Return the whole screen. `mode` selects the colours of the pool map. `note` is the end of the last line."""
    whole = Layout()
    whole.split_column(
        Layout(_head(state), size=2),
        Layout(_Curves(state["history"]["series"], state["totals"]), size=5),
        Layout(name="middle", ratio=3, minimum_size=6),
        Layout(name="below", ratio=4, minimum_size=6),
        Layout(_foot(mode, note), size=1),
    )
    engine = state["engine"]
    if engine is None:
        whole["middle"].update(Panel("no snapshot of the cache yet", border_style="bright_black"))
        whole["below"].visible = False
        return whole
    whole["middle"].split_row(
        Layout(_titled("pool", _Map(engine, mode), _pool(engine)), ratio=2),
        Layout(_titled("tiers, and why lookups ended", _tiers(engine, state["totals"]), "")),
    )
    branches = engine["tree"]["nodes"]
    whole["below"].split_row(
        Layout(
            _titled("prefix tree", _Tree(engine), f"{branches:,} branch{'' if branches == 1 else 'es'}"),
            ratio=1,
        ),
        Layout(_titled("requests", _Requests(requests), ""), ratio=1),
    )
    return whole


def _titled(title: str, inside: Any, subtitle: str) -> Panel:
    about = Text(subtitle, style="bright_black") if subtitle else None
    return Panel(
        inside, title=f"[b]{title}[/b]", subtitle=about, title_align="left", subtitle_align="right", border_style="bright_black", padding=(0, 1)
    )  # fmt: skip


def _head(state: State) -> Table:
    server = state["server"]
    facts = [server["device"], server["dtype"], server["pool_bytes"] and f"{format_bytes(server['pool_bytes'])} pool", f"up {format_seconds(state['now'] - server['since'])}"]  # fmt: skip
    late = 0.0 if state["engine_at"] is None else state["now"] - state["engine_at"]
    ok = server["status"] == "ok" and late < 5
    word = (
        "live" if ok else server["status"] if server["status"] != "ok" else f"busy for {format_seconds(late)}"
    )
    table = Table.grid(expand=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    title = Text.assemble(("kvloom", "bold"), (" / ", "bright_black"), (str(server["model"]), "bold"))
    table.add_row(title, Text(f"● {word}", style="green" if ok else "yellow"))
    table.add_row(Text(" · ".join(fact for fact in facts if fact), style="bright_black"), "")
    return table


def _foot(mode: str, note: str) -> Text:
    keys = f" q quit   m colours by {mode}   "
    return Text.assemble((keys, "bright_black"), (note, "yellow"), no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True, slots=True)
class _Curves:
    """Five figures in a row: hit rate, TTFT, ITL (time between tokens), tokens per second and running requests. Each
    has details and a curve of its history.
    """

    series: dict[str, Series]
    totals: State

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        series = self.series
        hits = [_hit_rate(series, i) for i in range(len(series["hit_rate"]))]
        output, prompt = (_known(series[name][-5:]) for name in ("output_rate", "prompt_rate"))
        running, waiting = (series[name][-1] if series[name] else 0 for name in ("running", "waiting"))
        totals = self.totals
        overall = totals["cached_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else None
        rate = hits[-1] if hits and hits[-1] is not None else overall
        saved = f"saved {format_count(totals['cached_tokens'])} tok {format_seconds(totals['saved_seconds'])}"
        found = (
            ("hit rate", format_percent(rate), saved, hits, "green", 1.0),
            ("TTFT p50", *self._latency("ttft"), series["ttft_p50"], "yellow", None),
            ("ITL p50", *self._latency("itl"), series["itl_p50"], "cyan", None),
            ("tokens/s", _mean(output), f"{_mean(prompt)} prompt", series["output_rate"], "blue", None),
            ("running", f"{running:,.0f}", f"{waiting:,.0f} waiting", series["running"], "magenta", None),
        )
        width = max(8, options.max_width // len(found) - 2)
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for _ in found:
            table.add_column(ratio=1, no_wrap=True)
        table.add_row(
            *(Text.assemble((name + " ", "bright_black"), (figure, "bold")) for name, figure, *_ in found)
        )
        table.add_row(*(Text(details, style="bright_black") for _, _, details, *_ in found))
        curves = [_curve(values, width, top, 2) for _, _, _, values, _, top in found]
        for line in range(2):
            table.add_row(*(Text(curve[line], style=one[4]) for curve, one in zip(curves, found, strict=True)))  # fmt: skip
        yield table

    def _latency(self, name: str) -> tuple[str, str]:
        """Return two texts about TTFT or ITL: p50, and p95 with p99. Uses the latest sample that has values, otherwise
        the values since the start of the server.
        """
        p50, p95, p99 = (
            next((value for value in reversed(self.series[f"{name}_{q}"]) if value is not None), None)
            or self.totals["latency"][name][q]
            for q in ("p50", "p95", "p99")
        )
        return format_seconds(p50), f"p95 {format_seconds(p95)} p99 {format_seconds(p99)}"


def _curve(values: Series, width: int, top: float | None, high: int) -> list[str]:
    """Return the last values as a bar chart, `high` lines tall."""
    shown = list(values[-width:])
    most = top or max(_known(shown), default=0.0) or 1.0
    eighths = [0 if value is None else min(8 * high, round(8 * high * value / most)) for value in shown]
    lines = []
    for line in range(high - 1, -1, -1):
        rest = [min(8, max(0, n - 8 * line)) for n in eighths]
        lowest = BARS[0] if line == 0 else " "
        lines.append("".join(BARS[n - 1] if n else lowest for n in rest).rjust(width))
    return lines


@dataclass(frozen=True, slots=True)
class _Map:
    """The map of the page pool. The map consists of cells, and each cell is a range of slabs. Each character shows
    one or more cells.

    The pages that fill most of these cells decide how the character looks. Its colour shows the kind or tenant
    of these pages, and its shape their state.
    """

    engine: State
    mode: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, max(2, (options.height or 8) - 1)
        cells = self.engine["map"]["cells"]
        wide = max(1, min(4, width * height // cells))  # columns per character, if there are few cells
        width //= wide
        signs = min(cells, width * height)
        shares: list[dict[int, float]] = [{} for _ in range(signs)]
        found = self.engine["map"]
        for at, what, share in zip(found["at"], found["what"], found["share"], strict=True):
            one = shares[at * signs // cells]
            one[what] = one.get(what, 0.0) + share
        text = Text(no_wrap=True, overflow="crop")
        for i, one in enumerate(shares):
            if i and i % width == 0:
                text.append("\n")
            sign, style = self._sign(one, 1000 * cells / signs)
            text.append(sign * wide, style)
        yield text
        yield self._legend()

    def _sign(self, one: dict[int, float], full: float) -> tuple[str, str]:
        if sum(one.values()) < full / 8:
            return "·", "bright_black"
        row = self.engine["map"]["legend"][max(one, key=lambda what: one[what])]
        return GLYPHS[row["state"]], self._colour(row)

    def _name(self, row: State) -> str:
        if self.mode == "state" or row["state"] == "unbacked":
            return str(row["state"])
        if self.mode == "tenant":
            return _tenant(self.engine, row["tenant"])
        return "unknown" if row["group"] is None else str(self.engine["groups"][row["group"]]["name"])

    def _colour(self, row: State) -> str:
        if self.mode == "state" or row["state"] == "unbacked":
            return STATES.get(row["state"], "white")
        if self.mode == "tenant":
            return "white" if row["tenant"] is None else TENANTS[row["tenant"] % len(TENANTS)]
        group = None if row["group"] is None else self.engine["groups"][row["group"]]
        return "white" if group is None else KINDS.get(group["kind"], "white")

    def _legend(self) -> Text:
        pool, sums = self.engine["pool"], dict[str, tuple[str, float]]()
        for row in self.engine["map"]["legend"]:
            per = 1 if row["group"] is None else self.engine["groups"][row["group"]]["pages_per_slab"]
            name = self._name(row)
            before = sums.get(name, ("", 0.0))[1]
            sums[name] = self._colour(row), before + row["pages"] / per / max(1, pool["slabs"])
        text = Text(no_wrap=True, overflow="ellipsis")
        for name, (style, share) in sorted(sums.items(), key=lambda one: -one[1][1]):
            text.append("■ ", style)
            text.append(f"{name} {share:.0%}  ")
        return text.append("█ in use ▒ cached · free", "bright_black")


def _pool(engine: State) -> str:
    pool = engine["pool"]
    occupied = pool["slabs"] - pool["free_slabs"]
    size = pool["slab_bytes"]
    return f"{format_bytes(occupied * size)} of {format_bytes(pool['slabs'] * size)} occupied, {pool['in_use_pages']:,} pages in use, {pool['cached_pages']:,} cached"


def _tiers(engine: State, totals: State) -> Group:
    lines: list[Any] = []
    for tier in engine["tiers"]:
        of = f" of {format_bytes(tier['capacity'])}" if tier["capacity"] else ""
        moved = f"↓ {format_bytes(tier['bytes_written'])} ↑ {format_bytes(tier['bytes_read'])}"
        wrong = [fault_text(tier["faults"])] if tier["faults"] else []
        wrong += [] if tier["breaker"] == "closed" else ["disabled after faults"]
        used = f"{format_bytes(tier['bytes'])}{of}  "
        lines.append(Text.assemble((f"{tier['name']} ", "bold"), used, (moved, "cyan")))
        if wrong:
            lines.append(Text(f"  {', '.join(wrong)}", style="red"))
    if not lines:
        lines.append(Text("no tiers", style="bright_black"))
    texts = _sources(totals), _ages(totals["ages"]), _policy(totals["policy"]), _drafts(totals["drafts"])
    lines += [
        Text(text, style="bright_black") for text in (*texts, *map(_setting, totals["settings"])) if text
    ]
    table = Table.grid(padding=(0, 1, 0, 0))
    reasons = engine["pool"]["miss_reasons"]
    most = max(reasons.values(), default=1)
    for why, count in sorted(reasons.items(), key=lambda one: -one[1]):
        table.add_row(why, Text("█" * max(1, round(12 * count / most)), style="blue"), f"{count:,}")
    tenants = Table.grid(padding=(0, 1, 0, 0))
    named = sorted(engine["tenants"], key=lambda one: -one["used"]) if len(engine["tenants"]) > 1 else []
    for tenant in [one for one in named if one["used"] or one["quota"]][:MAX_TENANTS]:
        tokens = totals["tenants"].get(tenant["name"])
        rate = tokens["cached_tokens"] / tokens["prompt_tokens"] if tokens else None
        tenants.add_row(
            tenant["name"] or "unnamed", format_bytes(tenant["used"]), f"hit rate {format_percent(rate)}"
        )
    return Group(*lines, Text(""), table, Text(""), tenants)


def _sources(totals: State) -> str:
    """Return a text with the percentages of prompt tokens that came from the pool, from each tier, and from
    computation."""
    whole = totals["prompt_tokens"]
    if not whole:
        return ""
    parts = [f"{tier_word(tier)} {tokens / whole:.0%}" for tier, tokens in totals["hit_tokens"].items()]
    return "tokens: " + ", ".join([*parts, f"computed {1 - totals['cached_tokens'] / whole:.0%}"])


def _drafts(drafts: State) -> str:
    """Return the number of drafts and the share of accepted draft tokens."""
    if not drafts["count"]:
        return ""
    accepted = sum(drafts["accepted"])
    return f"drafts: {drafts['count']:,}, {accepted / sum(drafts['proposed']):.0%} of their tokens accepted"


def _policy(policy: State) -> str:
    """Return a text that compares the hit rate of the adaptive eviction policy with that of LRU. The text is empty for
    other policies, and until the two policies have been compared."""
    if not policy or not policy["compared_tokens"]:
        return ""
    points = 100 * (policy["gained_tokens"] - policy["lost_tokens"]) / policy["compared_tokens"]
    off = ", off now: evicts like LRU" if policy["is_off"] else ""
    return f"adaptive eviction: {points:+.1f} points of hit rate against LRU{off}"


def _setting(setting: State) -> str:
    """Return the value of a setting that measurements change. `kvloom explain --settings` prints the reason."""
    value = setting["value"]
    text = format_bytes(value) if setting["unit"] == "bytes" else f"{value:,} {setting['unit']}"
    return f"{setting['name']}: {text}{', fixed' if setting['is_fixed'] else ''}"


def _ages(ages: State) -> str:
    """Return a text with two medians of the time since the last use of a cached entry: at its next hit, and at its
    eviction."""
    words = [("hit again", ages["reused_p50"]), ("evicted", ages["evicted_p50"])]
    known = [f"{word} after {format_seconds(age)}" for word, age in words if age is not None]
    return "p50: " + ", ".join(known) if known else ""


@dataclass(frozen=True, slots=True)
class _Tree:
    engine: State

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        branches = self.engine["tree"]["branches"]
        below: dict[str | None, list[State]] = {}
        for branch in branches:
            below.setdefault(branch["parent"], []).append(branch)
        table = Table.grid(padding=(0, 1, 0, 0), expand=True)
        table.add_column(no_wrap=True, ratio=1)
        for _ in range(3):
            table.add_column(justify="right", no_wrap=True)
        heads = ("branch", "tokens", "hits", "used")
        table.add_row(*(Text(word, style="bright_black") for word in heads))
        for depth, branch in list(_walk(below, None, 0))[: max(1, (options.height or 10) - 1)]:
            idle = branch["idle"]
            style = "red" if branch["users"] or idle < 3 else "yellow" if idle < 15 else "blue"
            bar = "━" * min(24, 1 + branch["hits"].bit_length() * 2)
            name = Text.assemble("  " * min(depth, 8), (f"{branch['id']} ", "bright_black"), (bar, style))
            if branch["parent"] is None and len(self.engine["tenants"]) > 1:
                name.append(f" {_tenant(self.engine, branch['tenant'])}", "bright_black")
            table.add_row(name, f"{branch['tokens']:,}", f"{branch['hits']:,}", format_ago(idle))
        yield table


def _walk(below: dict[str | None, list[State]], at: str | None, depth: int) -> Iterable[tuple[int, State]]:
    """Yield all branches below the branch `at`, as (depth for indentation, branch). A branch is followed by its own
    children. `below` maps a branch to its children. Siblings with the most hits come first. The children of an only
    child have the depth of their parent.
    """
    children = sorted(below.get(at, ()), key=lambda one: (-one["hits"], one["idle"]))
    for child in children:
        yield depth, child
        yield from _walk(below, child["id"], depth + (len(children) > 1))


@dataclass(frozen=True, slots=True)
class _Requests:
    records: list[State] | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.records is None:
            yield Text("request records are disabled", style="bright_black")
            return
        table = Table.grid(padding=(0, 1, 0, 0), expand=True)
        table.add_column(no_wrap=True)
        for _ in range(3):
            table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        heads = ("request", "prompt", "cached", "first", "lookup ended")
        table.add_row(*(Text(word, style="bright_black") for word in heads))
        for record in self.records[: max(1, (options.height or 10) - 1)]:
            prompt, cached = record["prompt_tokens"], record["cached_tokens"] or 0
            name = record["id"] if len(record["id"]) < 13 else f"…{record['id'][-8:]}"
            why = (record["stopped"] or {}).get("reason", "").replace("_", " ")
            style = "yellow" if record["state"] in ("running", "waiting") else ""
            share = format_percent(cached / prompt if prompt else None)
            table.add_row(
                Text(name, style=style), f"{prompt:,}", share, format_seconds(record["ttft_s"]), why
            )
        yield table


def _hit_rate(series: dict[str, Series], end: int) -> float | None:
    """Return the fraction of prompt tokens that were cached, over the five samples (ten seconds) up to index `end`.
    Return None if there were no prompt tokens.
    """
    at = range(max(0, end - 4), end + 1)
    asked = sum(series["prompt_rate"][i] or 0.0 for i in at)
    found = sum((series["prompt_rate"][i] or 0.0) * (series["hit_rate"][i] or 0.0) for i in at)
    return found / asked if asked else None


def _known(values: Series) -> list[float]:
    return [value for value in values if value is not None]


def _tenant(engine: State, place: int | None) -> str:
    if place is None:
        return "not seen yet"
    return (
        "other tenants" if place >= len(engine["tenants"]) else engine["tenants"][place]["name"] or "unnamed"
    )


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):,.0f}" if values else "-"
