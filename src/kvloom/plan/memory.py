"""Memory that requests need under three allocation schemes: the arithmetic and its tables.

| scheme     | memory of one request                                                                  |
|------------|----------------------------------------------------------------------------------------|
| contiguous | `max_context` tokens in every text layer, its image tokens in cross layers, its states |
| uniform    | every text and image token in every layer, in whole blocks, and its states             |
| kvloom     | the pages that its last query can read, group by group, and its states                 |

Waste is allocated memory that no layer can read at the last query. The planner uses no device, and does not count
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvloom.core import HASH_TOKENS, PageGroup, PoolLayout, format_bytes
from kvloom.models.specs import ModelSpec

__all__ = ["Load", "Plan", "PlanError", "Scheme", "format_bytes", "make_plan", "render"]

_BAR = 30
_WIDE = 100


class PlanError(ValueError):
    """Raised for a load that cannot be planned, for example image tokens for a model without images. The message states
    the value and the remedy."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load for which memory is planned: `concurrency` requests, each of `context` text tokens and `image_tokens`
    tokens of images."""

    context: int
    image_tokens: int = 0
    concurrency: int = 1
    max_context: int | None = None
    """In the scheme "contiguous": number of tokens for which each request gets memory. None means the model's limit."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The memory that one allocation scheme needs. `bytes` is the memory of all requests together, and `waste` is the
    wasted share of these bytes. `max_requests` is the number of requests that fit into the GPU's memory, or None if the
    size of this memory is not given."""

    bytes: int
    waste: float
    max_requests: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of `kvloom plan`: the pool layout of a model, and the memory that a load needs under each allocation
    scheme. `needed_bytes` is the memory that the last queries of all requests can read. `max_context` is the number of
    tokens of a contiguous buffer."""

    spec: ModelSpec
    layout: PoolLayout
    load: Load
    max_context: int
    gpu_memory: int | None
    needed_bytes: int
    schemes: dict[str, Scheme]
    notes: tuple[str, ...]

    @property
    def kv_dtype(self) -> str | None:
        """The dtype of K and V. If layer groups have different dtypes, the text lists all of them, separated by commas.
        None for a model that has only states."""
        kept = (g.spec.fields[0].dtype for g in self.layout.groups if g.spec.unit == "token")
        return ", ".join(dict.fromkeys(kept)) or None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rows = zip(self.layout.groups, self.layout.table(), strict=True)
        return {
            "model": self.spec.name,
            "kv_dtype": self.kv_dtype,
            "context": self.load.context,
            "image_tokens": self.load.image_tokens,
            "max_context": self.max_context,
            "concurrency": self.load.concurrency,
            "block_tokens": self.layout.block_tokens,
            "gpu_memory": self.gpu_memory,
            "bytes_per_token": self.layout.bytes_per_token(),
            "needed_bytes": self.needed_bytes,
            "groups": [row | {"needed_bytes": _needed(group, self.spec, self.load)} for group, row in rows],
            "slab_bytes": self.layout.slab_bytes,
            "schemes": {
                name: {"bytes": s.bytes, "waste": s.waste, "max_requests": s.max_requests}
                for name, s in self.schemes.items()
            },
            "notes": list(self.notes),
        }


def make_plan(
    spec: ModelSpec, load: Load, block_tokens: int = HASH_TOKENS, gpu_memory: int | None = None
) -> Plan:
    """Compute the memory that `load` needs under the three schemes. Raises PlanError for a load that it cannot plan."""
    _check(spec, load)
    if block_tokens <= 0 or block_tokens % HASH_TOKENS:
        raise PlanError(f"block_tokens {block_tokens} must be a positive multiple of {HASH_TOKENS}")
    length = _stream_length(spec, load)
    limit = load.max_context or max(spec.max_context or 0, length)
    layout = PoolLayout.build(spec.layers, block_tokens)
    needed = sum(_needed(group, spec, load) for group in layout.groups)
    media = (load.image_tokens,) if load.image_tokens else ()
    kvloom = layout.slab_bytes_for(length, media=media)
    schemes = {
        "contiguous": _scheme(_contiguous(layout, spec, load, limit), needed, load, gpu_memory),
        "uniform": _scheme(_uniform(layout, load), needed, load, gpu_memory),
        "kvloom": _scheme(
            kvloom, needed, load, None if gpu_memory is None else _whole_slabs(layout, gpu_memory)
        ),
    }
    return Plan(
        spec, layout, load, limit, gpu_memory, needed * load.concurrency, schemes, _notes(spec, load, length)
    )


def _check(spec: ModelSpec, load: Load) -> None:
    for name, value, least in (
        ("context", load.context, 1),
        ("image tokens", load.image_tokens, 0),
        ("concurrency", load.concurrency, 1),
    ):
        if value < least:
            raise PlanError(f"{name} is {value}; it must be at least {least}")
    if load.image_tokens and spec.media is None:
        raise PlanError(
            f"{spec.name} takes no images, but {load.image_tokens:,} image tokens were given: omit --image-tokens"
        )
    length = _stream_length(spec, load)
    if load.max_context is not None and load.max_context < length:
        raise PlanError(
            f"max context {load.max_context:,} is shorter than the request's {length:,} tokens; "
            f"raise --max-context or lower --context"
        )


def _notes(spec: ModelSpec, load: Load, length: int) -> tuple[str, ...]:
    if load.max_context is None and spec.max_context is not None and length > spec.max_context:
        over = f"{length:,} tokens are more than the model's limit of {spec.max_context:,}"
        return (f"{over}; contiguous buffers are sized by the request",)
    return ()


def _stream_length(spec: ModelSpec, load: Load) -> int:
    """Return the number of tokens of one request in text layers. It includes image tokens if the model places them
    between the text tokens."""
    in_stream = spec.media is not None and spec.media.place == "stream"
    return load.context + (load.image_tokens if in_stream else 0)


def _needed(group: PageGroup, spec: ModelSpec, load: Load) -> int:
    """Return how many bytes of one request its last query can read, in the layers of a group."""
    if group.spec.unit == "state":
        return group.unit_bytes
    if group.spec.axis == "media":
        return group.unit_bytes * load.image_tokens
    return group.unit_bytes * group.spec.visibility.visible_tokens(_stream_length(spec, load))


def _contiguous(layout: PoolLayout, spec: ModelSpec, load: Load, limit: int) -> int:
    text = layout.bytes_per_token() * limit
    return text + sum(_needed(g, spec, load) for g in (*layout.of("media"), *layout.of("state")))


def _uniform(layout: PoolLayout, load: Load) -> int:
    blocks = -(-(load.context + load.image_tokens) // layout.block_tokens)
    per_token = sum(g.unit_bytes for g in (*layout.of("token"), *layout.of("media")))
    return blocks * layout.block_tokens * per_token + sum(g.unit_bytes for g in layout.of("state"))


def _whole_slabs(layout: PoolLayout, memory: int) -> int:
    """Return the part of a pool of `memory` bytes that requests can always use, in bytes.

    These are the bytes of all whole slabs, minus one slab for each group that has several pages per slab. The last slab
    of such a group may be partly empty.
    """
    partial = sum(group.pages_per_slab > 1 for group in layout.groups)
    return max(0, layout.slabs_in(memory) - partial) * layout.slab_bytes


def _scheme(each: int, needed: int, load: Load, memory: int | None) -> Scheme:
    fits = None if memory is None else memory // each
    return Scheme(each * load.concurrency, 1 - needed / each, fits)


def render(plan: Plan, console: Console) -> None:
    """Print the plan as tables. On a terminal with fewer than 100 columns, some table columns are left out."""
    load = plan.load
    images = f" and {load.image_tokens:,} image" if load.image_tokens else ""
    requests = "request" if load.concurrency == 1 else "requests"
    console.print(
        f"[bold]{escape(plan.spec.name)}[/]: {load.concurrency:,} {requests} of {load.context:,} text{images} tokens"
        + (f", KV in {plan.kv_dtype}" if plan.kv_dtype else "")
    )
    wide = console.width >= _WIDE
    console.print(_group_table(plan, wide))
    console.print(_scheme_table(plan, wide, ascii_only=console.options.ascii_only))
    console.print(_summary(plan))
    for note in plan.notes:
        console.print(f"[yellow]note:[/] {note}")


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, style="cyan", no_wrap=True)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _group_table(plan: Plan, wide: bool) -> Table:
    headers = [
        "layers",
        "a token\nor state",
        "one\nrequest",
        "page",
        "pages\na block",
        "pages\na slab",
        "padding",
    ]
    table = _table("What its layers keep", "group", *headers[: None if wide else -1])
    for group in plan.layout.groups:
        row = (
            group.name.rsplit(" #", 1)[0],
            str(len(group.layers)),
            format_bytes(group.unit_bytes),
            format_bytes(_needed(group, plan.spec, plan.load)),
            format_bytes(group.page_bytes),
            str(group.runs),
            str(group.pages_per_slab),
            f"{plan.layout.waste(group):.1%}",
        )
        table.add_row(*row[: None if wide else -1])
    return table


def _scheme_table(plan: Plan, wide: bool, ascii_only: bool) -> Table:
    fits = [] if plan.gpu_memory is None else [f"fit in\n{format_bytes(plan.gpu_memory)}"]
    table = _table("Memory for this load", "scheme", *(["bytes"] if wide else []), "", "waste", *fits)
    table.add_column("needed and wasted", no_wrap=True)
    longest = max(scheme.bytes for scheme in plan.schemes.values())
    for name, scheme in plan.schemes.items():
        row = [name, f"{scheme.bytes:,}", format_bytes(scheme.bytes), f"{scheme.waste:.2%}"]
        if scheme.max_requests is not None:
            row.append(f"{scheme.max_requests:,}")
        if not wide:
            del row[1]
        table.add_row(*row, _bar(scheme, longest, ascii_only))
    return table


def _bar(scheme: Scheme, longest: int, ascii_only: bool) -> str:
    solid, hollow = ("#", ".") if ascii_only else ("█", "░")
    length = max(1, round(_BAR * scheme.bytes / longest))
    needed = max(1, round(length * (1 - scheme.waste)))
    return f"[green]{solid * needed}[/][red]{hollow * (length - needed)}[/]"


def _summary(plan: Plan) -> str:
    layout = plan.layout
    return (
        f"One text token takes [bold]{layout.bytes_per_token():,}[/] bytes in all layers that keep it.\n"
        f"Blocks of {layout.block_tokens} tokens, slabs of {layout.slab_bytes:,} bytes, "
        f"contiguous buffers of {plan.max_context:,} tokens."
    )
