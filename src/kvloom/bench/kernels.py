"""`kvloom bench kernels` compares kvloom's kernels on this GPU with the roofline of bytes and FLOPs, and with each
installed peer.

The calls are in `attention_work`, `state_work` and `expert_work`. Writes and copies are in this module. Calls of kvloom
and of the peers alternate, so that a disturbance of the machine affects both.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from kvloom.arguments import Parser, whole

from . import attention_work as attention
from .gpu_peers import Call, versions
from .gpu_timing import COPY_RATE, FLOP_RATE, LINK_RATE, READ_RATE, Row, agreement, timed
from .state_work import state_rows

__all__ = ["main"]


def write_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.write import write

    for tokens in (8192, 256):
        k, v = attention.layer_pool(tokens // attention.BLOCK + 1)
        new_k, new_v = torch.randn(
            2, tokens, attention.KV_HEADS, attention.DIM, dtype=torch.bfloat16, device="cuda"
        ).unbind()
        slots = (torch.randperm(tokens) + attention.BLOCK).cuda()
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
        yield Row("experts", work.what, floor, us, "; ".join((*rates, agreement(work.calls))))


def _wall(call: Call) -> float:
    """Return the wall-clock microseconds from the start of a call until the copies that it started are done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call().synchronize()
    return (time.perf_counter() - begin) * 1e6


SECTIONS: dict[str, Callable[[int], Iterator[Row]]] = {
    "decode": attention.decode_rows,
    "quantised": attention.quantised_rows,
    "shared": attention.shared_rows,
    "prefill": attention.prefill_rows,
    "latents": attention.latent_rows,
    "states": state_rows,
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


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench kernels",
        description="Time the GPU kernels beside the floor and the installed attention libraries.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        metavar="SECTION",
        help=f"sections to run: {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--rounds",
        type=whole(1, 50),
        default=5,
        metavar="N",
        help="rounds of each call (default: 5)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
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
