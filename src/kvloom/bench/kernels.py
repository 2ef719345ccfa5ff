"""`kvloom bench kernels`: our kernels on this GPU, beside the floor that bytes and FLOPs set and beside each installed peer.

Every figure is a CUDA-graph replay of one layer's work on bf16 pages of 16 tokens in random order, 32 query heads over 8
KV heads of 128, unless the row says otherwise. Ours and the peers take turns, so that a slow moment hurts all alike.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
import torch

from kvloom.core import Span

from .gpu_peers import Call, decode_peers, prefill_peers, shared_peers, versions

__all__ = ["Row", "main", "timed"]

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
LAYERS = 4
"""A page holds more layers than the one that is read, as in a model: pages do not lie side by side in memory."""
READ_RATE = 4.55e12
COPY_RATE = 4.19e12
FLOP_RATE = 770e12
LINK_RATE = 55e9
"""What an H200 was measured to reach: reading memory, copying it, bf16 products, one way of the host's link."""

DECODE = ((1, 32768), (8, 8192), (64, 4096), (256, 1024), (128, 8192), (16, 131072))
SHARED = ((64, 8192, 256), (256, 4096, 128), (32, 32768, 512))
PREFILL = ((1, 8192, 0), (1, 16384, 0), (4, 2048, 6144), (16, 512, 4096))


@dataclass
class Row:
    """One line of the report: microseconds of ours and of each peer, and the least time the machine allows."""

    section: str
    work: str
    floor_us: float
    us: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def ours(self) -> float:
        return self.us["kvloom"]

    @property
    def best_peer(self) -> float | None:
        return min((us for name, us in self.us.items() if not name.startswith("kvloom")), default=None)


# -- timing -------------------------------------------------------------------------------------


def _captured(call: Call) -> Call:
    """The call as a graph, or as it is where it cannot be captured."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def _replay(call: Call, times: int) -> float:
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(found))


def timed(calls: dict[str, Call], rounds: int = 5, times: int = 7) -> dict[str, float]:
    """Microseconds of each call: the best of `rounds` medians, the calls taking turns."""
    graphs = {name: _captured(call) for name, call in calls.items()}
    best = dict.fromkeys(graphs, math.inf)
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            us = _replay(graph, times)
            if turn:  # the first turn warms up
                best[name] = min(best[name], us)
    return best


# -- what is measured -----------------------------------------------------------------------------


def _pool(pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer of random pages, as [pages, tokens, heads, dim] views."""
    pool = torch.empty((pages, LAYERS, 2, BLOCK, KV_HEADS, DIM), dtype=torch.bfloat16, device="cuda")
    for part in torch.split(pool, 4096):
        part.normal_()
    return pool[:, 0, 0], pool[:, 0, 1]


def _tables(lengths: Sequence[int], block: int = BLOCK) -> tuple[torch.Tensor, int]:
    blocks = [-(-length // block) for length in lengths]
    ids = torch.split((torch.randperm(sum(blocks)) + 1).int(), blocks)
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, mine in enumerate(ids):
        tables[row, : len(mine)] = mine
    return tables.cuda(), sum(blocks) + 1


def _queries(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")


def _ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def _mixed_lengths() -> list[int]:
    spread = np.random.default_rng(0).uniform(math.log(128), math.log(32768), 64)
    return [int(length) for length in np.exp(spread)]


def decode_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.decode import DecodePlan
    from kvloom.kernels.shapes import Shape

    shape = Shape(HEADS, KV_HEADS, DIM, DIM, BLOCK)
    works: list[tuple[str, list[int], int | None]] = [
        (f"{batch} x {length}", [length] * batch, None) for batch, length in DECODE
    ]
    works.append(("64, lengths log-uniform 128 to 32768", _mixed_lengths(), None))
    works.append(("64 x 16384, window 1024", [16384] * 64, 1024))
    for work, lengths, window in works:
        tables, pages = _tables(lengths)
        k, v = _pool(pages)
        q, starts = _queries(len(lengths)), _ints(range(len(lengths) + 1))
        span = Span("full") if window is None else Span("sliding", window)
        plan = DecodePlan(shape, len(lengths), span=span)
        plan.make(starts, _ints(lengths))
        calls: dict[str, Call] = {"kvloom": partial(plan.attend, q, k, v, tables)}
        calls |= decode_peers(q, k, v, tables, starts, lengths, window)
        read = sum(min(length, window or length) for length in lengths) * KV_HEADS * DIM * 4
        yield Row("decode", work, read / READ_RATE * 1e6, timed(calls, rounds), _agreement(calls))
        del k, v, calls


def _agreement(calls: dict[str, Call]) -> str:
    """How far our result lies from the first peer's, as a check that both did the same work."""
    results = []
    for call in list(calls.values())[:2]:
        out = call()
        results.append((out[0] if isinstance(out, tuple) else out).float().reshape(-1))
    if len(results) < 2:
        return ""
    return f"differ by {float((results[0] - results[1]).norm() / results[1].norm()):.1e}"


def quantised_rows(rounds: int, batch: int = 128, length: int = 8192) -> Iterator[Row]:
    from kvloom.kernels.decode import DecodePlan
    from kvloom.kernels.shapes import Shape

    lengths = [length] * batch
    tables, pages = _tables(lengths)
    q, starts = _queries(batch), _ints(range(batch + 1))
    k, v = _pool(pages)
    plain = DecodePlan(Shape(HEADS, KV_HEADS, DIM, DIM, BLOCK), batch)
    plain.make(starts, _ints(lengths))
    exact = plain.attend(q, k, v, tables)[0].float()
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        for block in (16, 64):
            ids, keys, values, sizes = _quantised(k, v, tables, block, dtype)
            plan = DecodePlan(Shape(HEADS, KV_HEADS, DIM, DIM, block, dtype), batch)
            plan.make(starts, _ints(lengths))
            attend = partial(plan.attend, q, keys, values, ids, k_scale=sizes[:, 0], v_scale=sizes[:, 1])
            us = timed({"kvloom": attend, "kvloom, bf16": partial(plain.attend, q, k, v, tables)}, rounds)
            found = attend()[0].float()
            row = ids[0].long()
            same = _dense(
                q[:1].double(),
                *(
                    (x[row].double() * sizes[row, i][..., None]).reshape(-1, KV_HEADS, DIM)
                    for i, x in enumerate((keys, values))
                ),
            )
            note = (
                f"{us['kvloom, bf16'] / us['kvloom']:.2f} times as fast as bf16; error "
                f"{float((found[0] - same).norm() / same.norm()):.2%} of what the pages say, "
                f"{float((found - exact).norm() / exact.norm()):.2%} of exact"
            )
            read = batch * length * KV_HEADS * (2 * DIM + 8)
            work = f"{name}, pages of {block}, {batch} x {length}"
            yield Row("quantised", work, read / READ_RATE * 1e6, us, note)
            del keys, values, sizes, attend


def _quantised(
    k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same tokens in pages of 8 bits: tables, keys, values, and their sizes."""
    from kvloom.kernels.write import write

    rows, length = tables.shape[0], tables.shape[1] * BLOCK
    ids, pages = _tables([length] * rows, block)
    store = torch.empty((pages, LAYERS, 2, KV_HEADS, block, DIM), dtype=dtype, device="cuda")
    sizes = torch.empty((pages, LAYERS, 2, KV_HEADS, block), device="cuda")[:, 0].transpose(-1, -2)
    keys = store[:, 0, 0].transpose(1, 2)
    shape, strides = (pages, block, KV_HEADS, DIM), (store.stride(0), 1, block * DIM, block)
    values = store[:, 0, 1].as_strided(shape, strides)
    place = torch.arange(block, device="cuda")
    for row in range(rows):
        slots = (ids[row].long()[:, None] * block + place).reshape(-1)
        new = (x[tables[row].long()].reshape(-1, KV_HEADS, DIM) for x in (k, v))
        write(keys, values, slots, *new, k_scale=sizes[:, 0], v_scale=sizes[:, 1])
    return ids, keys, values, sizes


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one query over all keys, [heads, dim]."""
    grouped = q.view(KV_HEADS, HEADS // KV_HEADS, DIM)
    scores = torch.einsum("hgd,nhd->hgn", grouped, k) / math.sqrt(DIM)
    return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).reshape(HEADS, DIM)


def shared_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.decode import DecodePlan
    from kvloom.kernels.shapes import Shape
    from kvloom.kernels.sharing import Sharing, find_shared

    shape = Shape(HEADS, KV_HEADS, DIM, DIM, BLOCK)
    for batch, prefix, own in SHARED:
        ids = (torch.randperm((prefix + batch * own) // BLOCK) + 1).int().cuda()
        shared, rest = ids[: prefix // BLOCK], ids[prefix // BLOCK :].view(batch, -1)
        tables = torch.cat([shared[None].expand(batch, -1), rest], 1).contiguous()
        k, v = _pool(len(ids) + 1)
        q, starts, lengths = _queries(batch), _ints(range(batch + 1)), _ints([prefix + own] * batch)
        sharing = Sharing(batch)
        settled = np.full(batch, prefix + own - 1)
        sharing.set(find_shared(tables.cpu().numpy(), settled, BLOCK), np.arange(batch + 1))
        plan, plain = DecodePlan(shape, batch, sharing=sharing), DecodePlan(shape, batch)
        plan.make(starts, lengths)
        plain.make(starts, lengths)
        calls: dict[str, Call] = {"kvloom": partial(plan.attend, q, k, v, tables)}
        calls |= shared_peers(q, k, v, shared, rest)
        calls["kvloom, plain"] = partial(plain.attend, q, k, v, tables)
        note = _agreement({"kvloom": calls["kvloom"], "plain": calls["kvloom, plain"]})
        work = f"{batch} rows, {prefix} shared, {own} own"
        yield Row("shared prefix", work, _shared_floor(batch, prefix, own), timed(calls, rounds), note)
        del k, v, calls


def _shared_floor(batch: int, prefix: int, own: int) -> float:
    """The larger of bytes and FLOPs of each part, one after the other."""

    def part(tokens_read: int, pairs: int) -> float:
        return max(tokens_read * KV_HEADS * DIM * 4 / READ_RATE, pairs * HEADS * DIM * 4 / FLOP_RATE) * 1e6

    return part(prefix, batch * prefix) + part(batch * own, batch * own)


def prefill_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.prefill import PrefillPlan
    from kvloom.kernels.shapes import Shape

    shape = Shape(HEADS, KV_HEADS, DIM, DIM, BLOCK)
    for batch, new, cached in PREFILL:
        lengths, starts = [new + cached] * batch, [row * new for row in range(batch + 1)]
        tables, pages = _tables(lengths)
        k, v = _pool(pages)
        q = _queries(batch * new)
        calls: dict[str, Call] = {}
        for label, backend in (
            ("kvloom", None),
            ("kvloom, pages", "pages"),
            ("kvloom, descriptors", "descriptors"),
        ):
            plan = PrefillPlan(shape, backend=backend)  # type: ignore[arg-type]
            plan.make(starts, lengths)
            calls[label] = partial(plan.attend, q, k, v, tables)
        peers = prefill_peers(q, k, v, tables, starts, lengths)
        flops = 4 * HEADS * DIM * batch * (new * cached + new * new / 2)
        us = timed(calls | peers, rounds, 3)
        note = ", ".join(f"{name} {flops / took / 1e6:.0f} TFLOP/s" for name, took in us.items())
        if peers:
            note += "; " + _agreement({"kvloom": calls["kvloom"], **peers})
        yield Row("prefill", f"{batch} x {new} after {cached}", flops / FLOP_RATE * 1e6, us, note)
        del k, v, calls, peers


def write_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.write import write

    for tokens in (8192, 256):
        k, v = _pool(tokens // BLOCK + 1)
        new_k, new_v = torch.randn(2, tokens, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda").unbind()
        slots = (torch.randperm(tokens) + BLOCK).cuda()
        calls: dict[str, Call] = {"kvloom": partial(write, k, v, slots, new_k, new_v)}
        moved = 2 * 2 * new_k.numel() * 2
        yield Row("write", f"{tokens} tokens", moved / COPY_RATE * 1e6, timed(calls, rounds))


def copy_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.copy import Copier

    total = 1 << 30
    pool = torch.randint(0, 255, (2 * total,), dtype=torch.uint8, device="cuda")
    for size in (2 << 20, 64 << 10):
        pages = np.random.default_rng(1).permutation(2 * total // size)[: total // size]
        host = torch.empty((len(pages), size), dtype=torch.uint8, pin_memory=True)
        copier = Copier(pool, size)
        for way, call in (
            ("to the host", partial(copier.gather, pages, host)),
            ("from the host", partial(copier.scatter, host, pages)),
        ):
            us = min(_wall(call) for _ in range(rounds + 1))
            name = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
            note = f"{total / us / 1e3:.1f} GB/s"
            yield Row(
                "copies", f"1 GiB in {name} pages, {way}", total / LINK_RATE * 1e6, {"kvloom": us}, note
            )


def expert_rows(rounds: int) -> Iterator[Row]:
    from .expert_work import expert_work

    for work in expert_work():
        us = timed(work.calls, rounds)
        floor = max(work.moved / READ_RATE, work.flops / FLOP_RATE) * 1e6
        rates = (
            f"{name} {work.moved / took / 1e6:.2f} TB/s, {work.flops / took / 1e6:.0f} TFLOP/s"
            for name, took in us.items()
        )
        yield Row("experts", work.what, floor, us, "; ".join((*rates, _agreement(work.calls))))


def _wall(call: Call) -> float:
    """Microseconds from the call to the end of its copies."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call().synchronize()
    return (time.perf_counter() - begin) * 1e6


SECTIONS: dict[str, Callable[[int], Iterator[Row]]] = {
    "decode": decode_rows,
    "quantised": quantised_rows,
    "shared": shared_rows,
    "prefill": prefill_rows,
    "write": write_rows,
    "copies": copy_rows,
    "experts": expert_rows,
}


# -- report ---------------------------------------------------------------------------------------


def render(rows: Sequence[Row], device: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    for section in dict.fromkeys(row.section for row in rows):
        mine = [row for row in rows if row.section == section]
        names = list(dict.fromkeys(name for row in mine for name in row.us))
        table = Table(title=f"{section}, microseconds on {device}", title_justify="left")
        for column in ("work", "floor", *names, "best peer / kvloom", ""):
            table.add_column(column, justify="left" if column in ("work", "") else "right")
        for row in mine:
            best = row.best_peer
            ratio = "" if best is None else f"{best / row.ours:.2f}"
            times = [f"{row.us[name]:,.1f}" if name in row.us else "" for name in names]
            table.add_row(row.work, f"{row.floor_us:,.1f}", *times, ratio, row.note)
        console.print(table)
    for name, version in versions().items():
        console.print(f"{name}: {version}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvloom bench kernels",
        description="Time the GPU kernels beside the floor and the installed attention libraries.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        choices=range(1, 51),
        metavar="N",
        help="turns of each call (default: 5)",
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "kvloom bench kernels: there is no CUDA GPU here; it measures nothing on a CPU", file=sys.stderr
        )
        return 2
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    rows: list[Row] = []
    for name in args.only or SECTIONS:
        for row in SECTIONS[name](args.rounds):
            print(f"{row.section}: {row.work} {row.ours:,.1f} us {row.note}", file=sys.stderr, flush=True)
            rows.append(row)
    if args.json:
        report = {
            "device": device,
            "torch": torch.__version__,
            "peers": versions(),
            "rows": [asdict(r) for r in rows],
        }
        print(json.dumps(report, indent=2))
    else:
        render(rows, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
