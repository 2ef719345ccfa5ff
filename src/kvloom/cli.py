"""The `kvloom` command. Each subcommand is one row of COMMANDS; what is heavy is imported when asked for."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["main"]

BAD_INPUT = 2
KV_DTYPE = "bf16, fp16, fp32, int8 or fp8 (default: the model's own); by kind of layers: fp8,sliding=bf16"
KV_SCALES = "scales of int8 and fp8: dynamic (default), checkpoint, or a file of `kvloom calibrate`"
MOST = 10**12
MODEL = "a folder with a Hugging Face model, its hub id, or one that comes along: kvloom-llama, kvloom-hybrid"


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


def _device(text: str) -> str:
    """An argparse type: where a model runs."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; give cpu, cuda or cuda:N")
    return text


def _ids(text: str) -> list[int]:
    """Token ids as they are written on a command line."""
    try:
        return [int(token) for token in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f'--tokens {text!r} must be whole numbers, like "5 6 7"') from None


def _told(command: str, error: Exception) -> int:
    """Say what was wrong with the input, and the exit code for it."""
    said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
    print(f"kvloom {command}: {said}", file=sys.stderr)
    return BAD_INPUT


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
    add("--kv-dtype", metavar="D", help=KV_DTYPE)
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
        choices=["index", "kernels", "engine", "serve", "metrics", "quality"],
        help="index: names, match, allocate, publish, evict (CPU); kernels: attention, writes, copies (GPU); "
        "engine: whole workloads, beside Hugging Face and vLLM (both); serve: many streams on a server (both); metrics: what counting costs there (both); quality: perplexity under quantised KV (both)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the benchmark (try --help)")


def _bench(args: argparse.Namespace) -> int:
    from importlib import import_module

    return int(import_module(f"kvloom.bench.{args.benchmark}").main(args.arguments) or 0)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
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
    add("--n", type=_whole(1), default=1, metavar="N", help="answers to each prompt (default: 1)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end where this text comes; repeatable",
    )
    add(
        "--logprobs",
        type=_whole(0),
        metavar="N",
        help="tell log-probabilities, of N more tokens each; implies --json",
    )
    add(
        "--json-schema",
        metavar="SCHEMA",
        help="the answer is JSON of this form: a schema, or the name of a file that has one",
    )
    add("--stream", action="store_true", help="print text as it comes (one prompt, one answer)")
    add("--kv-dtype", metavar="D", help=KV_DTYPE)
    add("--kv-scales", default="dynamic", metavar="S", help=KV_SCALES)
    add("--pool", metavar="SIZE", help="memory for the cache (default: what a GPU has left; CPU 1GiB)")
    add(
        "--load-format",
        choices=["auto", "random"],
        default="auto",
        help="random: MODEL may be a config or a name of `kvloom plan --list`; weights are made up (default: auto)",
    )
    add("--json", action="store_true", help="print results as JSON")


def _generate(args: argparse.Namespace) -> int:
    try:
        return _generated(args)
    except (OSError, ValueError) as error:
        return _told("generate", error)


def _generated(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from kvloom.engine.llm import LLM
    from kvloom.engine.request import SamplingParams
    from kvloom.plan import parse_size
    from kvloom.serve.embedded import folder_of

    prompts = [*args.prompts, *map(_ids, args.tokens)]
    if not prompts:
        raise ValueError("nothing to go on from: give a PROMPT or --tokens")
    if args.stream and (len(prompts) > 1 or args.n > 1 or args.json or args.logprobs is not None):
        raise ValueError("--stream prints the text of one answer to one prompt, without --json or --logprobs")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        n=args.n,
        stop=args.stop,
        logprobs=args.logprobs,
        json_schema=_schema(args.json_schema),
    )
    llm = LLM(
        folder_of(args.model),
        pool_bytes=None if args.pool is None else parse_size(args.pool),
        kv_dtype=args.kv_dtype,
        kv_scales=args.kv_scales,
        load_format=args.load_format,
        progress=sys.stderr.isatty(),
    )

    def shown(text: str, token_ids: list[int]) -> str:
        return text if llm.tokenizer is not None else " ".join(map(str, token_ids))

    if args.stream:
        for delta in llm.stream(prompts, params):
            print(
                shown(delta.text, delta.token_ids), end="" if llm.tokenizer is not None else " ", flush=True
            )
        print()
        return 0
    results = llm.generate(prompts, params, progress=sys.stderr.isatty())
    if args.json or args.logprobs is not None:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return 0
    for result in results:
        for done in result.outputs:
            print(shown(done.text, done.token_ids))
    return 0


def _schema(given: str | None) -> str | None:
    """A JSON schema, or that of a file."""
    if given is None or given.lstrip().startswith(("{", "true", "false")):
        return given
    return Path(given).read_text(encoding="utf-8")


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    prompts = "files (.jsonl: a prompt each line, others: one text) or texts, on which the model is run"
    add("--prompts", nargs="+", default=[], metavar="FILE|TEXT", help=prompts)
    tokens = 'a prompt as token ids, "5 6 7"; repeatable'
    add("--tokens", action="append", default=[], metavar="IDS", help=tokens)
    add("--kv-dtype", choices=["fp8", "int8"], default="fp8", help="what the scales are for (default: fp8)")
    add("--out", required=True, metavar="FILE", help="where the scales go, as safetensors")
    percentile = "leave room for so many per cent of tokens, and clamp the others (default: 100)"
    add("--percentile", type=float, default=100.0, metavar="P", help=percentile)
    pieces = "longer prompts run in pieces of N tokens (default: 2048)"
    add("--context", type=_whole(1), default=2048, metavar="N", help=pieces)
    add("--dtype", default="auto", metavar="D", help="of the weights (default: their own)")
    add("--device", type=_device, metavar="D", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--pool", default="1GiB", metavar="SIZE", help="memory for the cache (default: 1GiB)")
    add("--json", action="store_true", help="print a summary as JSON")


def _calibrate(args: argparse.Namespace) -> int:
    try:
        return _calibrated(args)
    except (OSError, ValueError) as error:
        return _told("calibrate", error)


def _calibrated(args: argparse.Namespace) -> int:
    from kvloom.engine.calibrate import calibrate, texts_of
    from kvloom.models.load import load
    from kvloom.plan import parse_size
    from kvloom.serve.embedded import folder_of

    given = [
        *texts_of(args.prompts),
        *map(_ids, args.tokens),
    ]
    if not given:
        raise ValueError("nothing to calibrate on: give --prompts or --tokens")
    if not Path(args.out).absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no such folder")
    if Path(args.out).is_dir():
        raise ValueError(f"--out {args.out} is a folder: name a file in it")
    terminal = sys.stderr.isatty()
    model, tokenizer = load(folder_of(args.model), args.dtype, args.device, progress=terminal)

    def ids(prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer: give prompts as --tokens, or ids in a .jsonl")
        return list(tokenizer(prompt)["input_ids"])

    with _bar("calibrating", terminal) as progress:
        found = calibrate(
            model,
            map(ids, given),
            args.kv_dtype,
            args.percentile,
            args.context,
            parse_size(args.pool),
            progress,
        )
    found.save(args.out)
    largest = {
        layer: {name.removesuffix("_scale"): float(x.max()) for name, x in fields.items()}
        for layer, fields in found.sizes.items()
    }
    about = {"model": args.model, "out": args.out, "dtype": found.dtype, "percentile": found.percentile}
    if args.json:
        print(
            json.dumps(
                about | {"prompts": found.prompts, "tokens": found.tokens, "largest": largest}, indent=2
            )
        )
        return 0
    tops = ", ".join(
        f"|{part}| {max(one[part] for one in largest.values() if part in one):.4g}"
        for part in dict.fromkeys(part for one in largest.values() for part in one)
    )
    print(
        f"{args.out}: scales for {found.dtype} of {len(largest)} layers, from {found.tokens:,} tokens of "
        f"{found.prompts:,} prompts; largest {tops}"
    )
    return 0


@contextmanager
def _bar(words: str, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr; what is given takes how much of how much is done."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(words, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="kvloom-llama", metavar="MODEL", help=f"{MODEL} (default: kvloom-llama)")
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    add("--port", type=_whole(0), default=8000, metavar="N", help="port (default: 8000; 0: any free one)")
    add("--name", metavar="NAME", help="what requests call the model (default: its folder's name)")
    keys = "API keys and their tenants: JSON, or lines of `KEY tenant [quota]`"
    add("--api-keys", metavar="FILE", help=keys)
    add("--no-auth", action="store_true", help="ask for no key: the default, on loopback alone")
    add("--dtype", default="auto", metavar="D", help="of the weights (default: their own)")
    add("--kv-dtype", metavar="D", help=KV_DTYPE)
    add("--kv-scales", default="dynamic", metavar="S", help=KV_SCALES)
    add("--device", type=_device, metavar="D", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--random-weights", action="store_true", help="no checkpoint: MODEL is a config or a known name")
    add("--pool", metavar="SIZE", help="memory for the cache (default: 1GiB, on a GPU what is left)")
    fraction = "share of a GPU's memory that may be used, without --pool (default: 0.9)"
    add("--memory-fraction", type=float, default=0.9, metavar="F", help=fraction)
    add("--max-running", type=_whole(1), default=256, metavar="N", help="answers made at once (default: 256)")
    add(
        "--max-queue", type=_whole(0), default=1024, metavar="N", help="answers that may wait (default: 1024)"
    )
    budget = "tokens of prompts computed in one step (default: what suits the device)"
    add("--token-budget", type=_whole(1), metavar="N", help=budget)
    add(
        "--threads",
        type=_whole(1),
        metavar="N",
        help="CPU threads of the engine (default: all cores but one)",
    )
    add("--max-body", default="8MiB", metavar="SIZE", help="largest request body (default: 8MiB)")
    prompt = "longest prompt (default: what the model and the pool can hold)"
    add("--max-prompt-tokens", type=_whole(1), metavar="N", help=prompt)
    request = "how long a client may take to send a request's head, and its body (default: 30)"
    add("--request-seconds", type=float, default=30.0, metavar="S", help=request)
    slow = "how long a client may not read its stream (default: 60)"
    add("--read-seconds", type=float, default=60.0, metavar="S", help=slow)
    drain = "how long running requests may take after SIGTERM (default: 30)"
    add("--drain-seconds", type=float, default=30.0, metavar="S", help=drain)
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    record = "write names, lengths and times of requests (never text) to this file, for `kvloom replay`"
    add("--record", metavar="FILE", help=record)
    add("--otlp", metavar="URL", help="send traces to this OTLP/HTTP receiver, like http://127.0.0.1:4318")
    add("--no-metrics", action="store_true", help="count nothing, remember no requests (for measuring)")
    parser.epilog = "Metrics are at /metrics; a Grafana dashboard for them is kvloom/serve/grafana.json in the package, and docs/observability.md explains both."


def _serve(args: argparse.Namespace) -> int:
    try:
        return _served(args)
    except (OSError, ValueError, ImportError) as error:
        return _told("serve", error)


def _served(args: argparse.Namespace) -> int:
    from kvloom.plan import parse_size
    from kvloom.serve.embedded import folder_of
    from kvloom.serve.keys import Keys, read_keys
    from kvloom.serve.limits import Limits
    from kvloom.serve.messages import Start
    from kvloom.serve.recorder import Recorder
    from kvloom.serve.server import Options, serve

    if args.no_auth and args.api_keys is not None:
        raise ValueError("--no-auth asks for no key and --api-keys for one: give one of them")
    keys = Keys({}) if args.api_keys is None else read_keys(args.api_keys, parse_size)
    model = folder_of(args.model)
    start = Start(
        model=model,
        dtype=args.dtype,
        cpu_dtype="auto" if model == args.model else "float32",
        kv_dtype=args.kv_dtype,
        kv_scales=args.kv_scales,
        device=args.device,
        random_weights=args.random_weights,
        pool_bytes=None if args.pool is None else parse_size(args.pool),
        memory_fraction=args.memory_fraction,
        token_budget=args.token_budget,
        max_running=args.max_running,
        threads=args.threads,
        tenants=keys.tenants,
        progress=sys.stderr.isatty(),
        observe=not args.no_metrics,
    )
    limits = Limits(
        body_bytes=parse_size(args.max_body),
        prompt_tokens=args.max_prompt_tokens,
        answers=args.max_running + args.max_queue,
        request_seconds=args.request_seconds,
        read_seconds=args.read_seconds,
    )
    template = args.chat_template
    name = args.name or (None if model == args.model else args.model)
    if args.record is not None and args.no_metrics:
        raise ValueError("--record writes down what --no-metrics does not look at: give one of them")
    recorder = (
        None
        if args.record is None
        else Recorder(args.record, block_tokens=16, model=name or Path(model).name)
    )
    return serve(
        Options(
            start,
            host=args.host,
            port=args.port,
            name=name,
            keys=keys,
            limits=limits,
            drain_seconds=args.drain_seconds,
            chat_template=None if template is None else Path(template).read_text(encoding="utf-8"),
            recorder=recorder,
            otlp=args.otlp,
        )
    )


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="files (gzipped or not) or folders of recorded traffic")
    add(
        "--capacity",
        action="append",
        default=[],
        metavar="C",
        help="blocks (10000), a share of all distinct blocks (10%%) or bytes (80GiB); repeatable (default: 10%%)",
    )
    add(
        "--policy",
        action="append",
        default=[],
        metavar="P",
        help="ideal, min or an eviction policy; repeatable (default: ideal, min, lru, adaptive)",
    )
    add("--tier", action="append", default=[], metavar="NAME=C", help="a lower tier and its size; repeatable")
    add("--model", metavar="MODEL", help="whose bytes a token has (default: an 8B Llama 3, 128 KiB a token)")
    add("--kv-dtype", metavar="D", help="bf16, fp16, fp32, int8 or fp8 (default: the model's own)")
    add(
        "--size",
        action="store_true",
        help="how much of each tier a hit rate needs, and what the next GB buys",
    )
    add("--target", type=float, metavar="R", help="with --size: the hit rate (default: 0.9 of the ideal)")
    add("--cost", action="store_true", help="estimate TTFT and throughput too")
    add(
        "--parameters",
        type=float,
        default=8.0,
        metavar="N",
        help="billions of weights a token uses (default: 8)",
    )
    add("--tflops", type=float, default=450.0, metavar="N", help="of one device, as reached (default: 450)")
    add("--devices", type=_whole(1), default=1, metavar="N", help="devices that share the work (default: 1)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="draws the start times of agent sessions (default: 0)",
    )
    add(
        "--spread",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds in which they start (default: 3600)",
    )
    add("--plot", metavar="FILE", help="write hit-rate curves to this picture (needs kvloom[plot])")
    add("--json", action="store_true", help="print JSON instead of tables")


def _replay(args: argparse.Namespace) -> int:
    from kvloom.core import PoolLayout
    from kvloom.models.catalog import load_spec
    from kvloom.plan import parse_size
    from kvloom.replay.command import run

    try:
        per_token = None
        if args.model is not None:
            per_token = PoolLayout.build(load_spec(args.model, args.kv_dtype).layers).bytes_per_token()
        return run(args, per_token, parse_size)
    except (OSError, ValueError) as error:
        print(f"kvloom replay: {error}", file=sys.stderr)
        return BAD_INPUT


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    from kvloom.serve.explain_command import arguments

    arguments(parser)


def _explain(args: argparse.Namespace) -> int:
    from kvloom.serve.explain_command import run

    try:
        return run(args)
    except (OSError, ValueError) as error:
        return _told("explain", error)


COMMANDS: dict[str, Command] = {
    "plan": Command("Memory of a model and a load under three schemes.", _plan_arguments, _plan),
    "generate": Command("Let a model go on from prompts, once.", _generate_arguments, _generate),
    "calibrate": Command("Make static scales for a quantised KV cache.", _calibrate_arguments, _calibrate),
    "serve": Command("An OpenAI-compatible server.", _serve_arguments, _serve),
    "explain": Command("Why a request hit the cache or missed it.", _explain_arguments, _explain),
    "replay": Command("Recorded traffic through the cache: hit rates, sizes.", _replay_arguments, _replay),
    "bench": Command("Measure kvloom beside its peers.", _bench_arguments, _bench),
}

if __name__ == "__main__":
    sys.exit(main())
