"""The lines printed when a server is ready: address, pool layout, tiers, and an example request."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from kvloom.core import format_bytes

from .worker import Ready

__all__ = ["print_startup"]

MiB = 1 << 20


def print_startup(
    model: str, url: str, facts: Ready, pid: int, seconds: float, keys: bool, chat: bool
) -> None:
    """Print the start-up lines to stdout."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("group", "layers", "page", "pages/block", "pages/slab", "padding"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for row in facts.layout:
        table.add_row(
            str(row["group"]).rsplit(" #", 1)[0],
            str(row["layers"]),
            f"{row['page_bytes']:,} B",
            str(row["pages_per_block"]),
            str(row["pages_per_slab"]),
            f"{float(row['waste']):.1%}",
        )
    tokens = facts.pool_bytes // max(1, facts.bytes_per_token)
    console.print(
        f"\n{model} in {facts.dtype} on {facts.device} (process {pid}), ready after {seconds:.1f} s",
        style="bold",
    )
    console.print(
        f"page pool: {facts.pool_bytes / MiB:,.0f} MiB, about {tokens:,} tokens; at most {facts.max_tokens:,} tokens per request"
    )
    console.print(f"block: {facts.block_tokens} tokens, slab: {facts.slab_bytes:,} bytes")
    console.print(table)
    for name, capacity, pages in facts.tiers:
        stored = f", {pages:,} pages stored" if pages else ""
        console.print(f"tier {name}: {format_bytes(capacity)}{stored}", markup=False, soft_wrap=True)
    for name, why in facts.unavailable_tiers:
        console.print(f"unavailable tier {name}: {why}", style="bold", markup=False, soft_wrap=True)
    example = (
        '"messages": [{"role": "user", "content": "Hello"}]' if chat else '"prompt": "def fibonacci(n):"'
    )
    path = "/v1/chat/completions" if chat else "/v1/completions"
    print(f"\nkvloom serves {model} at {url}; to try it:")
    auth = ' -H "Authorization: Bearer $KEY"' if keys else ""
    print(
        f"""  curl {url}{path}{auth} -H "Content-Type: application/json" \\
    -d '{{"model": "{model}", {example}, "max_tokens": 64, "temperature": 0}}'
dashboard: {url}/dashboard or `kvloom top --url {url}`\n""",
        flush=True,
    )
