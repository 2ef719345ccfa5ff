"""The lines printed when a server is ready: address, pool layout, tiers, and an example request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvloom.core import format_bytes

from .worker import Ready

__all__ = ["ReadyModel", "print_startup"]

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that is ready.

    - `facts` is the Ready message of its engine, and `pid` the engine's process id.
    - `has_chat` states whether the model supports chats.
    - `role` is the role of the worker.
    """

    name: str
    facts: Ready
    pid: int
    has_chat: bool
    role: str = "both"


def print_startup(
    models: Sequence[ReadyModel], url: str, seconds: float, keys: bool, memory: int | None
) -> None:
    """Print the start-up lines to stdout. `memory` is the number of bytes that the pools share."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    for model in models:
        _print_model(console, model, seconds)
    if memory is not None:
        console.print(f"the pools of all models share {format_bytes(memory)}")
    first, names = models[0], " ".join(model.name for model in models)
    if first.role == "encode":
        print(f"\nkvloom serves images of {names} at {url}; metrics: {url}/metrics\n", flush=True)
        return
    example = (
        '"messages": [{"role": "user", "content": "Hello"}]'
        if first.has_chat
        else '"prompt": "def fibonacci(n):"'
    )
    path = "/v1/chat/completions" if first.has_chat else "/v1/completions"
    print(f"\nkvloom serves {names} at {url}; to try it:")
    auth = ' -H "Authorization: Bearer $KEY"' if keys else ""
    print(
        f"""  curl {url}{path}{auth} -H "Content-Type: application/json" \\
    -d '{{"model": "{first.name}", {example}, "max_tokens": 64, "temperature": 0}}'
dashboard: {url}/dashboard or `kvloom top --url {url}`\n""",
        flush=True,
    )


def _print_encode_worker(console: Console, model: ReadyModel, seconds: float) -> None:
    facts = model.facts
    console.print(
        f"\nimages of {model.name} in {facts.dtype} on {facts.device} (process {model.pid}), ready after {seconds:.1f} s",
        style="bold",
    )
    console.print(f"role: encode; {format_bytes(facts.tiers[0][1])} for images and embeddings")
    assert facts.peer_address is not None
    console.print("other workers use it with --encoder peer://{}:{}".format(*facts.peer_address))


def _print_model(console: Console, model: ReadyModel, seconds: float) -> None:
    facts, role = model.facts, model.role
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
    if role == "encode":
        _print_encode_worker(console, model, seconds)
        return
    tokens = facts.pool_bytes // max(1, facts.bytes_per_token)
    console.print(
        f"\n{model.name} in {facts.dtype} on {facts.device} (process {model.pid}), ready after {seconds:.1f} s",
        style="bold",
    )
    console.print(
        f"page pool: {facts.pool_bytes / MiB:,.0f} MiB, about {tokens:,} tokens; at most {facts.max_tokens:,} tokens per request"
    )
    if facts.max_tokens < facts.max_context:
        console.print(
            f"requests of up to {facts.max_context:,} tokens, the model's limit, need a larger --pool or --tier host:SIZE"
        )
    if role != "both":
        console.print(f"role: {role}")
    if facts.peer_address is not None:
        console.print("decode workers read its pages with --tier peer://{}:{}".format(*facts.peer_address))
    console.print(f"block: {facts.block_tokens} tokens, slab: {facts.slab_bytes:,} bytes")
    console.print(table)
    for name, capacity, pages in facts.tiers:
        stored = f", {pages:,} pages stored" if pages else ""
        console.print(f"tier {name}: {format_bytes(capacity)}{stored}", markup=False, soft_wrap=True)
    for name, why in facts.unavailable_tiers:
        console.print(f"unavailable tier {name}: {why}", style="bold", markup=False, soft_wrap=True)
