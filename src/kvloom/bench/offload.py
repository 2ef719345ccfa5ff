"""`kvloom bench offload` measures the benefit and the cost of tiers in an engine.

| part              | measures                                                                                       |
|-------------------|------------------------------------------------------------------------------------------------|
| ttft              | time to first token of a long prompt if the prompt is computed, loaded from host memory, or    |
|                   | loaded from disk; throughput of the loads                                                      |
| workloads         | time and hit rate of the workloads W1 to W6 with and without a host tier, in pools of the same |
|                   | size                                                                                           |
| hits              | hit rate of W6 in a pool that is large enough for all pages, in a tenth of that pool, and in a |
|                   | tenth of that pool with a host tier                                                            |
| layers            | time to copy and to read pages, whole or layer by layer                                        |
| long              | time of one request in a pool that is large enough for it, and in a quarter of that pool with  |
|                   | cold pages in host memory                                                                      |
| offload-cost      | CPU time of the engine thread to offload the pages of many finished sequences                  |
| load-or-recompute | time to first token if the engine chooses which part of a prompt to load from disk and which   |
|                   | to compute, for several disk speeds on a simulated device                                      |

To evict all cached pages, the benchmark removes the pool's slabs and adds them again.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from kvloom.arguments import DEVICE, Parser, device, number, size, whole
from kvloom.core import CacheControl, format_bytes
from kvloom.engine import Engine, EngineConfig, OffloadConfig, OffloadManager, SamplingParams
from kvloom.models.loading import choose_device
from kvloom.tiers import check_tiers

from .engine import log
from .engine_runners import Kvloom, Options
from .layerwise_copy import measure_layerwise_copy
from .load_or_recompute import measure_load_or_recompute
from .long_requests import SHARE, measure_long_request
from .offload_cost import measure_offload_cost
from .page_placement import evict_host, evict_pool, wait_until_stored
from .shapes import SHAPES, build, hf_config
from .workloads import Workload, select_workloads

__all__ = ["main"]

PARTS = ("ttft", "workloads", "hits", "layers", "long", "offload-cost", "load-or-recompute")
RENAMED = {"keep": "offload-cost", "race": "load-or-recompute"}
"""Former names of parts, accepted for one version."""
MIN_CONVERSATIONS = 32
"""Smallest number of conversations in the part "hits". With this number, a tenth of the large pool has pages for more
than two conversations.
"""


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench offload",
        description="Measure an engine with tiers: time to first token from host memory and disk, workloads with and without the "
        "host tier, hits in a small pool.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  kvloom bench offload                                     all parts on the tiny Llama\n"
        "  kvloom bench offload --shape llama-3.1-8b --only ttft --prompt 16384 --host 32GiB --disk /nvme/kv:64GiB\n"
        "  kvloom bench offload --shape llama-3.1-8b --only workloads --pool 24GiB --host 64GiB --rounds 2",
    )
    add = parser.add_argument
    add(
        "--shape",
        choices=list(SHAPES),
        default="tiny",
        metavar="NAME",
        help="model shape (default: tiny)",
    )
    add(
        "--only",
        nargs="+",
        type=lambda text: RENAMED.get(text, text),
        choices=PARTS,
        default=PARTS[:-1],
        metavar="PART",
        help=f"parts to run: {', '.join(PARTS)} (default: all but the last, which takes minutes)",
    )
    add(
        "--prompt",
        type=whole(64),
        default=2048,
        metavar="N",
        help="tokens of the long prompt (default: 2048)",
    )
    add("--pool", type=size, default="256MiB", metavar="SIZE", help="size of the page pool (default: 256MiB)")
    add("--host", type=size, default="1GiB", metavar="SIZE", help="size of the host tier (default: 1GiB)")
    add("--disk", metavar="PATH:SIZE", help="disk tier (default: 4GiB in a temporary folder)")
    add("--works", nargs="+", metavar="W", help="workloads to run, W1 to W6 (default: all)")
    add(
        "--scale",
        type=number(0, 1, above=True),
        metavar="S",
        help="scale of the workloads (default: 1, tiny shapes 0.0625)",
    )
    add(
        "--rounds",
        type=whole(1, 50),
        default=3,
        metavar="N",
        help="rounds; medians are reported, for workloads the median of ratios (default: 3)",
    )
    add("--device", type=device, metavar="D", help=DEVICE)
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        report = _measure(args)
    except ValueError as error:
        print(f"kvloom bench offload: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    device = str(choose_device(args.device))
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU"
    report: dict[str, Any] = {
        "shape": args.shape, "device": name, "torch": torch.__version__, "threads": torch.get_num_threads(),
        "pool": args.pool, "host": args.host, "rounds": args.rounds,
    }  # fmt: skip
    pool, host = args.pool, f"host:{args.host}"
    scale = SHAPES[args.shape].scale if args.scale is None else args.scale
    works = select_workloads(args.works, scale)
    with tempfile.TemporaryDirectory() as folder:
        disk = f"disk:{args.disk or folder + ':4GiB'}"
        check_tiers([host, disk])
        if "ttft" in args.only:
            report["ttft"] = ttft(args.shape, device, pool, host, disk, args.prompt, args.rounds)
        if "workloads" in args.only:
            report["workloads"] = workloads(args.shape, device, pool, host, works, args.rounds)
        if "hits" in args.only:
            report["hits"] = hits(args.shape, device, args.host, select_workloads(["W6"], scale)[0])
        if "layers" in args.only:
            with tempfile.TemporaryDirectory() as pages:
                report["layers"] = measure_layerwise_copy(pages, rounds=args.rounds)
        if "long" in args.only:
            report["long"] = measure_long_request(args.shape, device, args.host, args.prompt, args.rounds)
        if "offload-cost" in args.only:
            report["offload_cost"] = measure_offload_cost(
                args.shape, device, scale, args.rounds, pool, args.host
            )
        if "load-or-recompute" in args.only:
            report["load_or_recompute"] = measure_load_or_recompute(rounds=args.rounds)
    return report


# -- first tokens -----------------------------------------------------------------------------------


def ttft(
    shape: str, device: str, pool: int, host: str, disk: str, prompt: int, rounds: int
) -> dict[str, Any]:
    """Measure the time to first token of a prompt in three ways: computed, loaded from host memory, and loaded from
    disk. Each round uses a new prompt for all three. Return the medians over `rounds` rounds, with load throughput and
    speedups."""
    model = build(hf_config(shape), SHAPES[shape].dtype, device)
    vocabulary = hf_config(shape).vocab_size
    engine = Engine(
        model, EngineConfig(pool_bytes=pool, tiers=[host, disk], offload=OffloadConfig(load="always"))
    )
    engine.prepare()
    offload = engine.offload
    assert offload is not None
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
    loads: dict[str, list[float]] = {"host": [], "disk": []}
    cached = {"host": 0, "disk": 0}
    size = 0
    for round_ in range(-1, rounds):  # the first warms up
        tokens = rng.integers(3, vocabulary, prompt).tolist()
        found = {"computed": first_token(engine, tokens, CacheControl(store=True))}
        wait_until_stored(offload)
        for place in ("host", "disk"):
            evict_pool(engine)
            if place == "disk":
                evict_host(engine, offload, tokens)
            before = offload.stats.loaded_bytes
            began = time.perf_counter()
            found[place] = first_token(engine, tokens, CacheControl())
            size = offload.stats.loaded_bytes - before
            cached[place] = found[place][1]
            if round_ >= 0 and size:
                took = offload.last_load_seconds if place == "host" else time.perf_counter() - began
                loads[place].append(size / took)
        if round_ >= 0:
            for place, (took, _) in found.items():
                seconds[place].append(took)
        log(
            f"round {round_ + 1}: "
            + ", ".join(f"{p} {t * 1e3:.1f} ms ({c} cached)" for p, (t, c) in found.items())
        )
    auto = _auto(engine, offload, rng, vocabulary, prompt, rounds)
    engine.close()
    middle = {place: statistics.median(times) for place, times in seconds.items()}
    return {
        "prompt": prompt, "bytes": size, "seconds": middle, "cached_tokens": cached, "auto": auto,
        "speedup": {place: middle["computed"] / middle[place] for place in ("host", "disk")},
        "gb_per_s": {place: statistics.median(rates) / 1e9 for place, rates in loads.items() if rates},
    }  # fmt: skip


def _auto(
    engine: Engine,
    offload: OffloadManager,
    rng: np.random.Generator,
    vocabulary: int,
    prompt: int,
    rounds: int,
) -> dict[str, Any]:
    """Run a new prompt twice in each round: first without cached pages, then with its pages only on disk. In the second
    run, the engine decides whether to load or to recompute them. Return the median times to first token of both runs,
    and their ratio."""
    offload.config = OffloadConfig()
    times: dict[str, list[float]] = {"computed": [], "auto": []}
    cached = []
    # The first round corrects the disk throughput measured while everything was loaded.
    for round_ in range(-1, rounds):
        tokens = rng.integers(3, vocabulary, prompt).tolist()
        computed = first_token(engine, tokens, CacheControl())[0]
        wait_until_stored(offload)
        evict_pool(engine)
        evict_host(engine, offload, tokens)
        auto, found = first_token(engine, tokens, CacheControl())
        log(
            f"round {round_ + 1}, load or recompute: computed {computed * 1e3:.1f} ms, auto {auto * 1e3:.1f} ms ({found} cached)"
        )
        if round_ >= 0:
            times["computed"].append(computed)
            times["auto"].append(auto)
            cached.append(found)
    middle = {which: statistics.median(found) for which, found in times.items()}
    return {**middle, "relative": middle["auto"] / middle["computed"], "cached_tokens": cached}


def first_token(engine: Engine, tokens: list[int], control: CacheControl) -> tuple[float, int]:
    """Return the seconds until a prompt's first token, and the number of the prompt's cached tokens."""
    began = time.perf_counter()
    request = engine.add(tokens, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), control)
    while request.finish_reason is None:
        engine.step()
    took = time.perf_counter() - began
    engine.run()
    return took, request.cached_tokens or 0


# -- workloads --------------------------------------------------------------------------------------


def workloads(
    shape: str, device: str, pool: int, host: str, works: Sequence[Workload], rounds: int
) -> list[dict[str, Any]]:
    """Run each workload with and without the host tier, alternating. In the result, the ratio of the two times is the
    median over the rounds.

    The measured seconds end with the last token. The time of later copies to host memory is reported separately, as
    `drained_s`."""
    vocabulary = hf_config(shape).vocab_size
    options = Options(device=device, pool=pool)
    runners = {
        "off": Kvloom(shape, options),
        "on": Kvloom(shape, Options(device=device, pool=pool, tiers=(host,))),
    }
    rows = []
    for work in works:
        times: dict[str, list[float]] = {"off": [], "on": []}
        drained: list[float] = []
        results: dict[str, Any] = {}
        for round_ in range(rounds + 1):  # the first warms up
            for which, runner in runners.items() if round_ % 2 else reversed(runners.items()):
                found = runner.run(work.draw(vocabulary, 0, round_), work.output)
                results[which] = found
                if round_:
                    times[which].append(found.seconds)
                    drained += [found.figures["drained_s"]] if which == "on" else []
        off, on = statistics.median(times["off"]), statistics.median(times["on"])
        ratio = statistics.median(b / a for a, b in zip(times["off"], times["on"], strict=True))
        offload = runners["on"].engine.offload
        assert offload is not None
        rows.append(
            {
                "workload": work.name,
                "off_s": off,
                "on_s": on,
                "ratio": ratio,
                "drained_s": statistics.median(drained),
                "rounds": times,
                "same_tokens": results["off"].answers == results["on"].answers,
                "hit_rate_off": results["off"].figures["hit_rate"],
                "hit_rate_on": results["on"].figures["hit_rate"],
                "counts": asdict(offload.stats),
            }
        )
        log(f"{work.name}: off {off:.3f} s, on {on:.3f} s, ratio {ratio:.3f}")
    for runner in runners.values():
        runner.close()
    return rows


def hits(shape: str, device: str, host: int, work: Workload) -> dict[str, Any]:
    """Return the hit rates of conversations in three cases: a pool that is large enough for all pages, a tenth of
    this pool, and a tenth of this pool with the host tier. Conversations alternate, so the small pool evicts the
    pages of each conversation before its next turn."""
    vocabulary = hf_config(shape).vocab_size
    model = build(hf_config(shape), SHAPES[shape].dtype, device)
    layout = Engine(model, EngineConfig(pool_bytes=64 << 20)).layout
    work = replace(work, requests=max(work.requests, MIN_CONVERSATIONS))
    whole = work.requests * layout.slab_bytes_for(work.longest) + 8 * layout.slab_bytes
    has_extra_pages = layout.of("state") or any(
        group.spec.visibility.windowed for group in layout.of("token")
    )
    large = whole * (4 if has_extra_pages else 1)  # snapshots and pages outside of windows are cached, too
    small = max(whole // 10, 2 * layout.slab_bytes_for(work.longest) + 4 * layout.slab_bytes)
    found: dict[str, Any] = {"workload": work.name, "pool": whole, "small_pool": small}
    found["capacity_share"] = min(1.0, (small + host) / whole)
    for which, pool, tiers in (
        ("large", large, ()),
        ("small", small, ()),
        ("small + host", small, (f"host:{host}",)),
    ):
        runner = Kvloom(shape, Options(device=device, pool=pool, tiers=tiers))
        figures = runner.run(work.draw(vocabulary, 0, 1), work.output).figures
        found[which] = figures["hit_rate"]
        runner.close()
        log(f"{work.name}, {which}: {figures['hit_rate']:.1%} hit rate")
    found["hit_share"] = found["small + host"] / found["large"] if found["large"] else 0.0
    return found


def _show(report: dict[str, Any]) -> None:
    print(
        f"{report['shape']} on {report['device']}, pool {format_bytes(report['pool'])}, host tier {format_bytes(report['host'])}"
    )
    if "ttft" in report:
        part = report["ttft"]
        print(f"first token of {part['prompt']:,} tokens ({part['bytes'] / 2**20:,.0f} MiB of pages)")
        for place, took in part["seconds"].items():
            speedup = f"   {part['speedup'][place]:.2f} times faster" if place in part["speedup"] else ""
            rate = f"   {part['gb_per_s'][place]:.2f} GB/s" if place in part["gb_per_s"] else ""
            print(f"  {place:10} {took * 1e3:10.1f} ms{speedup}{rate}")
        auto = part["auto"]
        print(
            f"  from disk, load or recompute {auto['auto'] * 1e3:.1f} ms, computed in the same rounds {auto['computed'] * 1e3:.1f} ms: "
            f"{auto['relative']:.2f} of it"
        )
    for row in report.get("load_or_recompute", ()):
        print(
            f"disk {row['ratio']:5g} times as fast as computing, {row['known']:8} computed {row['computed_s'] * 1e3:7.1f} ms   "
            f"load or recompute {row['auto_s'] * 1e3:7.1f} ms   {row['relative']:.2f} of it, ideal {row['ideal']:.2f}"
        )
    for row in report.get("workloads", ()):
        print(
            f"{row['workload']:8} off {row['off_s']:8.3f} s   on {row['on_s']:8.3f} s   ratio {row['ratio']:.3f}   "
            f"copies end {row['drained_s'] * 1e3:.1f} ms later   hit rate {row['hit_rate_off']:.1%} / {row['hit_rate_on']:.1%}   tokens {'equal' if row['same_tokens'] else 'DIFFER'}"
        )
    if "hits" in report:
        part = report["hits"]
        print(
            f"{part['workload']} hit rate: {part['large']:.1%} in a pool for all pages, {part['small']:.1%} in "
            f"{part['small_pool'] / part['pool']:.0%} of it, {part['small + host']:.1%} there with the host tier: "
            f"{part['hit_share']:.1%} of the large pool's hits"
            + (
                f" (pool and tier hold {part['capacity_share']:.0%} of all pages)"
                if part["capacity_share"] < 1
                else ""
            )
        )
    if "long" in report:
        part = report["long"]
        small, large, ratio = part["quarter"], part["whole"], part["ratio"]
        print(
            f"{part['prompt']:,} tokens in 1/{SHARE} of the pool that they need: first token {small['first_s'] * 1e3:.1f} ms, "
            f"{ratio['first_s']:.2f} times {large['first_s'] * 1e3:.1f} ms; further tokens {small['token_s'] * 1e3:.2f} ms each, "
            f"{ratio['token_s']:.2f} times {large['token_s'] * 1e3:.2f} ms; tokens {'equal' if part['same_tokens'] else 'DIFFER'}"
        )
    for row in report.get("offload_cost", ()):
        each = row["us_per_page"]
        print(
            f"{row['pages']:,} pages of {format_bytes(row['page'])} offloaded at once, tier {row['tier']:9}: close {each['close']:.2f} µs/page, "
            f"offload {each['offload']:.2f} µs, copy {each['copy']:.2f} µs"
        )
    for place in ("host", "disk") if "layers" in report else ():
        part = report["layers"][place]
        print(
            f"{report['layers']['pages']} pages of {report['layers']['page'] / 2**20:.0f} MiB, {place}: whole {part['whole'] * 1e3:.1f} ms, "
            f"layer by layer {part['layers'] * 1e3:.1f} ms ({part['layers'] / part['whole']:.2f} times), the first {part['first'] * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    sys.exit(main())
