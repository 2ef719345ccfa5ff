"""Shows the state of a router's fleet in a terminal, as rich renderables. This module is independent of HTTP."""

from __future__ import annotations

from typing import Any

from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .text_formats import format_count, format_percent, format_seconds

__all__ = ["fleet_screen"]

State = dict[str, Any]


def fleet_screen(state: State, note: str = "") -> Layout:
    """Return the whole screen. `note` is added to the end of the last line."""
    whole = Layout()
    whole.split_column(
        Layout(_head(state), size=4),
        Layout(Panel(_workers(state["workers"]), title="[b]workers[/b]", title_align="left", border_style="bright_black")),
        Layout(Text.assemble((" q quit   ", "bright_black"), (note, "yellow")), size=1),
    )  # fmt: skip
    return whole


def _head(state: State) -> Table:
    router, totals, workers = state["router"], state["totals"], state["workers"]
    alive = sum(worker["alive"] for worker in workers)
    table = Table.grid(expand=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    title = Text.assemble(
        ("kvloom", "bold"), (" / ", "bright_black"), ("fleet", "bold"), f"  {', '.join(router['models'])}"
    )
    table.add_row(
        title, Text(f"● {alive} of {len(workers)} workers alive", style="green" if alive else "yellow")
    )
    rate = totals["cached_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else None
    ttft, overhead = totals["latency"]["ttft"], totals["latency"]["overhead"]
    table.add_row(
        f"hit rate {format_percent(rate)}  TTFT p50 {format_seconds(ttft['p50'])} p95 {format_seconds(ttft['p95'])}  "
        f"in the router p50 {format_seconds(overhead['p50'])} p99 {format_seconds(overhead['p99'])}",
        f"up {format_seconds(state['now'] - router['since'])}",
    )
    table.add_row(
        Text(
            f"{format_count(totals['requests'])} requests  {router['running']:,} running  {router['waiting']:,} waiting  "
            f"{format_count(totals['hand_overs'])} handed over  {format_count(totals['failovers'])} failovers  "
            f"{format_count(totals['continued_streams'])} continued streams",
            style="bright_black",
        ),
        "",
    )
    return table


def _workers(workers: list[State]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    columns = (
        "worker",
        "role",
        "running",
        "waiting",
        "requests",
        "hit rate",
        "TTFT p50",
        "blocks",
        "tiers",
        "hand-overs",
    )
    for at, name in enumerate(columns):  # the tiers may take several lines
        table.add_column(justify="left" if at < 2 else "right", no_wrap=name != "tiers")
    table.add_row(*(Text(name, style="bright_black") for name in columns))
    for worker in workers:
        asked = worker["prompt_tokens"]
        media = [
            f"{medium} {format_count(n)}" for medium, n in worker["blocks"].items() if n and medium != "GPU"
        ]
        tiers = [f"{tier['name']} {format_count(tier['pages'])}" for tier in worker["tiers"]]
        name = str(worker["name"]).removeprefix("http://")
        table.add_row(
            Text.assemble(("● ", "green" if worker["alive"] else "red"), name),
            worker["role"] if worker["alive"] else "dead",
            f"{worker['running']:,}",
            f"{worker['waiting']:,}",
            format_count(worker["requests"]),
            format_percent(worker["cached_tokens"] / asked if asked else None),
            format_seconds(worker["ttft"]["p50"]),
            format_count(worker["blocks"].get("GPU", 0)),
            ", ".join(media + tiers) or "-",
            format_count(sum(worker["hand_overs"].values())),
        )
    return table
