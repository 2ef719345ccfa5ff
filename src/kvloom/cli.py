"""The `kvloom` command. Each subcommand is one row of COMMANDS; what is heavy is imported when asked for."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["main"]

BAD_INPUT = 2
MOST = 10**12


@dataclass(frozen=True, slots=True)
class Command:
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 on input that makes no sense."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    args = _parser().parse_args(argv)
    try:
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left (`| head`): what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvloom", description="One KV-cache system for LLM inference.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.arguments(commands.add_parser(name, help=command.help, description=command.help))
    return parser


def _whole(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to MOST."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= MOST:
            raise argparse.ArgumentTypeError(f"{value} is out of range; it must be {least} to {MOST:,}")
        return value

    return parse


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a known name (see --list) or the path of a config.json")
    add("--list", action="store_true", help="list the known models and stop")
    add(
        "--context",
        type=_whole(1),
        metavar="N",
        help="text tokens of one request (default: 8192, or the limit)",
    )
    add(
        "--image-tokens",
        type=_whole(0),
        default=0,
        metavar="N",
        help="image tokens of one request (default: 0)",
    )
    add(
        "--max-context",
        type=_whole(1),
        metavar="N",
        help="size of contiguous buffers (default: the model's limit)",
    )
    add("--concurrency", type=_whole(1), default=1, metavar="N", help="requests at once (default: 1)")
    add("--kv-dtype", metavar="D", help="bf16, fp16, fp32, int8 or fp8 (default: the model's own)")
    add(
        "--gpu-memory",
        metavar="SIZE",
        help="memory given to the cache, like 40GiB: shows how many requests fit",
    )
    add("--block-tokens", type=_whole(1), default=16, metavar="N", help="tokens of a block (default: 16)")
    add("--draft", metavar="MODEL", help="a draft model beside it in the same pool")
    add("--json", action="store_true", help="print JSON instead of tables")


def _plan(args: argparse.Namespace) -> int:
    from kvloom.models.reading import ModelError
    from kvloom.plan import PlanError

    try:
        return _list_models(args.json) if args.list else _show_plan(args)
    except (ModelError, PlanError) as error:
        print(f"kvloom plan: {error}", file=sys.stderr)
        return BAD_INPUT


def _list_models(as_json: bool) -> int:
    from kvloom.models.catalog import known_models

    print(json.dumps(known_models()) if as_json else "\n".join(known_models()))
    return 0


def _show_plan(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kvloom.models.catalog import load_spec
    from kvloom.models.specs import with_draft
    from kvloom.plan import Load, PlanError, make_plan, parse_size, render

    if args.model is None:
        raise PlanError(
            "which model? Give a name (`kvloom plan --list` shows them) or the path of a config.json"
        )
    spec = load_spec(args.model, args.kv_dtype)
    if args.draft is not None:
        spec = with_draft(spec, load_spec(args.draft, args.kv_dtype))
    context = args.context or min(8192, args.max_context or spec.max_context or 8192)
    memory = None if args.gpu_memory is None else parse_size(args.gpu_memory)
    load = Load(context, args.image_tokens, args.concurrency, args.max_context)
    plan = make_plan(spec, load, args.block_tokens, memory)
    if args.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        terminal = sys.stdout.isatty()
        render(plan, Console(highlight=False, width=None if terminal else 110))
    return 0


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        choices=["index", "kernels"],
        help="index: names, match, allocate, publish, evict (CPU); kernels: attention, writes, copies (GPU)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the benchmark (try --help)")


def _bench(args: argparse.Namespace) -> int:
    from importlib import import_module

    return int(import_module(f"kvloom.bench.{args.benchmark}").main(args.arguments) or 0)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder with a Hugging Face model, or its hub id")
    add("prompts", nargs="*", metavar="PROMPT", help="texts to go on from")
    add(
        "--tokens",
        action="append",
        default=[],
        metavar="IDS",
        help='a prompt as token ids, "5 6 7"; repeatable',
    )
    add("--max-tokens", type=_whole(1), default=64, metavar="N", help="new tokens at most (default: 64)")
    add(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)"
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest share of P (default: 1)",
    )
    add("--seed", type=int, metavar="N", help="draw the same tokens again")
    add("--pool", default="1GiB", metavar="SIZE", help="memory for the cache (default: 1GiB)")
    add("--json", action="store_true", help="print results as JSON")


def _generate(args: argparse.Namespace) -> int:
    try:
        return _generated(args)
    except (OSError, ValueError) as error:
        print(f"kvloom generate: {error}", file=sys.stderr)
        return BAD_INPUT


def _generated(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from kvloom.engine.llm import LLM
    from kvloom.engine.request import SamplingParams
    from kvloom.plan import parse_size

    ids = [[int(token) for token in text.replace(",", " ").split()] for text in args.tokens]
    prompts = [*args.prompts, *ids]
    if not prompts:
        raise ValueError("nothing to go on from: give a PROMPT or --tokens")
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    llm = LLM(args.model, pool_bytes=parse_size(args.pool))
    results = llm.generate(prompts, params, progress=sys.stderr.isatty())
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return 0
    for result in results:
        done = result.outputs[0]
        print(done.text if llm.tokenizer is not None else " ".join(map(str, done.token_ids)))
    return 0


COMMANDS: dict[str, Command] = {
    "plan": Command("Memory of a model and a load under three schemes.", _plan_arguments, _plan),
    "generate": Command("Let a model go on from prompts, once.", _generate_arguments, _generate),
    "bench": Command("Measure kvloom beside its peers.", _bench_arguments, _bench),
}

if __name__ == "__main__":
    sys.exit(main())
