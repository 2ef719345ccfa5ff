"""`kvloom bench engine` times whole workloads on kvloom's engine, on Hugging Face's generate() and on vLLM, and
compares the times with the roofline.

Models have random weights, tokens are random ids from a seed, and answers are greedy and of fixed length. A runner is
one of the compared systems. On a CPU the runners alternate after each workload. On a GPU they run one after the other,
because each takes all of the device's memory. If `--pool` limits the memory, runners of kvloom alternate on a GPU too.
Other modules define the workloads (`workloads`), models (`shapes`), lower bounds (`roofline`), runners
(`engine_runners`, `engine_peers`) and tables (`engine_report`).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch

from kvloom.arguments import DEVICE, THREADS, Parser, device, interpreter, number, size, whole
from kvloom.engine import use_threads
from kvloom.models.loading import choose_device
from kvloom.models.specs import kv_dtypes
from kvloom.tiers import check_tiers

from .engine_peers import HuggingFace, NotInstalledError, UnbatchedHuggingFace, Vllm
from .engine_report import QUOTED, RunnerResult, WorkloadResult, render, rows_of
from .engine_runners import BatchInvariant, Kvloom, Measurement, Options, Runner, Speculating
from .roofline import Roofline
from .shapes import SHAPES, hf_config
from .workloads import WORKLOADS, Workload, select_workloads

__all__ = ["main", "measure"]

RUNNERS: dict[str, Callable[[str, Options], Runner]] = {
    "kvloom": Kvloom,
    "hf": HuggingFace,
    "hf-alone": UnbatchedHuggingFace,
    "vllm": Vllm,
    "invariant": BatchInvariant,
    "drafts": Speculating,
}
NAMES = {
    "kvloom": "kvloom",
    "hf": "Hugging Face",
    "hf-alone": "Hugging Face, one by one",
    "vllm": "vLLM",
    "invariant": "batch-invariant",
    "drafts": "kvloom with drafts",
}
OURS = {"kvloom", "invariant", "drafts"}


# -- measuring --------------------------------------------------------------------------------------


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(
    runner: Runner,
    works: Sequence[Workload],
    vocabulary: int,
    rounds: int,
    seed: int,
    results: dict[str, WorkloadResult],
) -> Iterator[None]:
    """Warm up every workload, then run each workload `rounds` times and add the measurements to `results`.

    Yields after each warm-up and after each workload of a round, so that several engines can alternate. Rounds share no
    tokens, so no round hits pages of an earlier round.
    """
    for work in works:
        short = work.short()
        runner.run(short.draw(vocabulary, seed), short.output)
        log(f"{runner.name}: {work.name} warmed up")
        yield
    for turn in range(1, rounds + 1):
        for work in works:
            gc.collect()
            found = runner.run(work.draw(vocabulary, seed, turn), work.output)
            _check(work, found)
            before = results.get(work.name)
            if before is None:
                before = results[work.name] = WorkloadResult(work, found, [], found.answers)
            before.rounds.append(found.seconds)
            if found.processor is not None:
                before.processor = min(found.processor, before.processor or found.processor)
            if found.seconds < before.seconds:
                before.best = found
            if work.separable:
                alone = work.prompts_alone()
                took = runner.run(alone.draw(vocabulary, seed, turn), alone.output).seconds
                before.prompts = took if before.prompts is None else min(before.prompts, took)
            rate = work.output_tokens / found.seconds
            log(
                f"{runner.name}: {work.name} round {turn}: {found.seconds:.3f} s, {rate:,.0f} output tokens/s"
            )
            yield


def _check(work: Workload, found: Measurement) -> None:
    lengths = {len(answer) for turns in found.answers for answer in turns}
    turns = {len(turns) for turns in found.answers}
    if lengths != {work.output} or turns != {work.turns}:
        raise RuntimeError(
            f"{work.name}: answers of {lengths} tokens in {turns} turns, not {work.output} in {work.turns}"
        )


def run_one(
    ran: RunnerResult, kind: str, shape: str, works: Sequence[Workload], rounds: int, options: Options
) -> Iterator[None]:
    """Run all workloads on one runner and add the results to `ran`. `kind` is the runner, a key of RUNNERS. `shape` is
    the model. Yields after the start of the runner and after each workload, so that runners can alternate.

    If the runner fails, `ran` contains the results so far and the error."""
    name = NAMES[kind]
    try:
        log(f"{name}: starting on {shape}")
        runner = RUNNERS[kind](shape, options)
        ran.version, ran.start_s, ran.notes = runner.version, runner.start_s, runner.notes
        log(f"{name}: ready after {runner.start_s:.1f} s")
        yield
        try:
            yield from measure(runner, works, hf_config(shape).vocab_size, rounds, options.seed, ran.results)
        finally:
            runner.close()
    except NotInstalledError as error:
        ran.error = str(error)
        log(f"{name}: {ran.error}")
    except Exception as error:  # noqa: BLE001 - one engine's failure must not lose the others' figures
        ran.error = f"{type(error).__name__}: {error}"
        log(f"{name}: {ran.error}")
        if kind != "vllm":
            traceback.print_exc()


def take_turns(runs: Sequence[Iterator[None]]) -> None:
    """Run all iterators to their ends. In each round, every iterator advances by one item."""
    left = list(runs)
    while left:
        left = [run for run in left if next(run, END) is not END]


END = object()


# -- the command ------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench engine",
        description="Run whole workloads (greedy, random weights, token ids) on kvloom, Hugging Face generate() and vLLM.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="workloads:\n"
        + "\n".join(f"  {work.name:8} {work.what}: {work.size}" for work in WORKLOADS)
        + "\n\nshapes:\n"
        + "\n".join(f"  {name:14} {shape.what}" for name, shape in SHAPES.items())
        + "\n\nexamples:\n"
        "  kvloom bench engine                                    all workloads on the tiny Llama\n"
        "  kvloom bench engine --shape kvloom-llama --scale 1 --only W1 W5 --requests 16 --rounds 3\n"
        "  kvloom bench engine --shape llama-3.1-8b --only W1 W5 --peers vllm --rounds 2\n"
        "  kvloom bench engine --shape llama-3.1-8b --only W7 --peers\n"
        "  kvloom bench engine --shape gemma-3-12b --capacity 16384 --pool 100GiB",
    )
    _add_workload_arguments(parser)
    _add_engine_arguments(parser)
    return parser


def _add_workload_arguments(parser: Parser) -> None:
    """Add the options of the model, of the workloads and of the peers."""
    known = list(dict.fromkeys(work.name.split()[0] for work in WORKLOADS))
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
        choices=known,
        metavar="W",
        help=f"workloads to run: {', '.join(known)} (default: all but W7)",
    )
    add("--peers", nargs="*", choices=["hf", "hf-alone", "vllm", "invariant"], default=["hf", "vllm"], metavar="PEER",
        help="hf and vllm (default: both); hf-alone: generate() without batching; invariant: kvloom's batch-invariant mode; no value: kvloom only")  # fmt: skip
    add(
        "--rounds",
        type=whole(1, 50),
        default=1,
        metavar="N",
        help="best of N rounds (default: 1)",
    )
    add("--scale", type=number(0, 1, above=True), metavar="S",
        help="scale of requests and lengths, at most 1 (default: 1, tiny shapes 0.0625)")  # fmt: skip
    add(
        "--requests",
        type=whole(1),
        metavar="N",
        help="limit of requests per workload (default: all)",
    )
    add(
        "--vllm-python",
        type=interpreter,
        default=sys.executable,
        metavar="PATH",
        help="interpreter with vLLM (default: this one)",
    )
    add(
        "--compile",
        action="store_true",
        help="compile Hugging Face's decode step (use two rounds or more)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of weights and tokens (default: 0)")
    add("--capacity", type=whole(1), metavar="TOKENS",
        help="run no workload: report how many requests of so many tokens fit the pool, and the result of `kvloom plan`")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of tables")


def _add_engine_arguments(parser: Parser) -> None:
    """Add the options of kvloom's engine."""
    add = parser.add_argument
    add("--device", type=device, metavar="D", help=DEVICE)
    add("--threads", type=whole(1), metavar="N", help=THREADS)
    add(
        "--kv-dtype",
        metavar="D",
        help="dtype of the KV cache: bf16, fp16, fp32, int8, fp8 (default: the model's)",
    )
    add(
        "--pool",
        type=size,
        metavar="SIZE",
        help="size of kvloom's page pool, such as 40GiB (default: 0.9 of GPU memory less weights; CPU 512MiB)",
    )
    add("--speculate", default="off", metavar="HOW",
        help="also run kvloom with drafts, such as suffix (see `kvloom serve --help`)")  # fmt: skip
    add("--tier", action="append", default=[], metavar="TIER",
        help="tier of kvloom, such as host:64GiB; repeatable")  # fmt: skip
    add(
        "--token-budget",
        type=whole(1),
        metavar="N",
        help="prompt tokens per step (default: that of offline use)",
    )
    add(
        "--max-running",
        type=whole(1),
        metavar="N",
        help="limit of running requests (default: the engine's)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return _capacity(args) if args.capacity is not None else _bench(args)
    except ValueError as error:
        print(f"kvloom bench engine: {error}", file=sys.stderr)
        return 2


def _bench(args: argparse.Namespace) -> int:
    kv_dtypes(args.kv_dtype)
    check_tiers(args.tier)
    shape = SHAPES[args.shape]
    scale = shape.scale if args.scale is None else args.scale
    works = [work.fewer(args.requests) for work in select_workloads(args.only, scale)]
    config = hf_config(args.shape)
    for work in works:
        if work.longest > config.max_position_embeddings:
            raise ValueError(
                f"{work.name} needs {work.longest:,} tokens, but the limit of {args.shape} is {config.max_position_embeddings:,}: "
                "use a smaller --scale, or exclude it with --only"
            )
    device = str(choose_device(args.device))
    use_threads(args.threads)
    options = Options(
        device=device, seed=args.seed, kv_dtype=args.kv_dtype, pool=args.pool, token_budget=args.token_budget,
        max_running=args.max_running, tiers=tuple(args.tier), compile=args.compile, vllm_python=args.vllm_python,
        max_length=max(20480, *(work.longest for work in works)), speculate=args.speculate,
    )  # fmt: skip
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU"
    on_h200 = "H200" in name
    least = Roofline(config, shape.dtype, args.kv_dtype) if on_h200 else None
    floors = {} if least is None else {work.name: least.of(work) for work in works}
    quoted = QUOTED.get(args.shape, {}) if on_h200 and scale == 1 else {}
    kinds = ["kvloom", *(["drafts"] if args.speculate != "off" else []), *dict.fromkeys(args.peers)]
    ran = [RunnerResult(NAMES[kind]) for kind in kinds]
    runs = [
        run_one(each, kind, args.shape, works, args.rounds, options)
        for each, kind in zip(ran, kinds, strict=True)
    ]
    fits = device == "cpu" or (args.pool is not None and OURS.issuperset(kinds))
    for together in [runs] if fits else [[run] for run in runs]:
        take_turns(together)
    exact = shape.dtype == torch.float32 and args.kv_dtype in (None, "fp32")
    report = {
        "shape": args.shape, "scale": scale, "device": name, "dtype": str(shape.dtype).removeprefix("torch."),
        "kv_dtype": args.kv_dtype, "torch": torch.__version__, "threads": torch.get_num_threads(), "seed": args.seed,
        "method": f"Best of {args.rounds}; before, every workload ran once with 8 tokens of output at most, not counted. "
        "Prefill is the prompts alone, with one token each, where none is cached. Waste is at the peak. "
        f"The engines {'took turns' if fits else 'ran one after the other'}; processor seconds are of all threads and processes of an engine, in the round that took the fewest.",
        "quoted_start_s": quoted.get("start"),
        "quoted_note": "measured earlier on an H200, not in this run" if quoted else None,
        "runners": {
            each.name: {"version": each.version, "start_s": each.start_s, "notes": each.notes, "error": each.error}
            for each in ran
        },
        "rows": rows_of(works, ran, floors, quoted, exact),
    }  # fmt: skip
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        render(report)
    return 1 if ran[0].error else 0


def _capacity(args: argparse.Namespace) -> int:
    """Report the measured and the planned capacity. Return exit code 1 if they differ, else 0."""
    from kvloom.models.specs import known_models, load_spec, model_spec

    from .pool_usage import capacity

    if args.shape in known_models():
        spec = load_spec(args.shape, args.kv_dtype)
    else:
        dtype = str(SHAPES[args.shape].dtype).removeprefix("torch.")
        spec = model_spec({**hf_config(args.shape).to_dict(), "dtype": dtype}, args.shape, args.kv_dtype)
    found = capacity(spec, args.capacity, args.pool or 100 << 30)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        print(
            f"{found.model}: requests of {found.tokens:,} tokens at once in {found.pool_bytes / 2**30:.4g} GiB\n"
            f"  kvloom   {found.kvloom:6,}   kvloom plan: {found.planned:,}\n"
            f"  uniform  {found.uniform:6,}   kvloom plan: {found.planned_uniform:,}\n"
            f"  {found.ratio:.2f} times as many; the plan and the cache {'agree' if found.agrees else 'DO NOT AGREE'}"
        )
    return 0 if found.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
