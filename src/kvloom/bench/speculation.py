"""`kvloom bench speculation` measures tokens per second with and without drafts in one run, and their ratio.

Engines with and without speculation alternate, so that a disturbance of the machine affects both. Outputs are compared,
because greedy tokens must be the same. The prompts are made from Python's standard library:

| case      | prompt                                                        | output                         |
|-----------|---------------------------------------------------------------|--------------------------------|
| continue  | the beginning of a module                                     | what the model writes          |
| edit      | a part of a module                                            | this part with renamed names   |

The embedded models are too small to edit a text. In the case "edit", the tokens of the edited text therefore replace
the tokens that the sampler chooses. The model and the drafts do the same work as if the model had edited the text.

With `--shape`, a large model with random weights generates fixed random tokens. Drafts have `--draft-tokens` tokens.
Each draft token is correct with the probability `--acceptance`, and takes no time to propose. The result is the cost of
verification alone, with drafts in every step ("always"), and with the controller, which decides when to draft.
"""

from __future__ import annotations

import inspect
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from kvloom.arguments import Parser, parse_size, whole

__all__ = ["main"]

MODULES = [
    "heapq",
    "bisect",
    "shlex",
    "string",
    "textwrap",
    "difflib",
    "calendar",
    "fnmatch",
    "glob",
    "queue",
    "sched",
    "copy",
    "pprint",
    "stat",
    "csv",
    "shutil",
]


@dataclass(frozen=True, slots=True)
class Row:
    """One case: tokens per second without drafts (`plain`) and with drafts (`drafted`), their ratio, and the share of
    accepted draft tokens. `tokens_per_row` is the mean number of tokens that a sequence gains in a step that verifies
    its draft. `decision` states why the controller drafts or does not draft.
    """

    case: str
    streams: int
    speculate: str
    plain: float
    drafted: float
    ratio: float
    acceptance: float
    tokens_per_row: float
    decision: str


def prompts(case: str, count: int, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Return `count` pairs of a prompt and an output, as token ids. Each prompt is from a different Python
    module. An output that is not empty replaces the model's own tokens.
    """
    found = []
    for name in MODULES[:count]:
        text = inspect.getsource(import_module(name))
        if case == "edit":
            part = text[2000:4400]
            edited = (
                part.replace("self", "this").replace("item", "entry").replace("    return ", "    result = ")
            )
            found.append(
                (tokenizer(part)["input_ids"], tokenizer(edited, add_special_tokens=False)["input_ids"])
            )
        else:
            found.append((tokenizer(text[:1200])["input_ids"], []))
    return found


def force(engine: Any, outputs: dict[tuple[int, ...], list[int]]) -> None:
    """Make an engine generate given outputs: `outputs` maps a prompt to the tokens that replace the sampler's
    choices."""
    import numpy as np
    import torch

    from kvloom.engine.sampling import to_device

    choose = engine.sampler.choose

    @torch.inference_mode()
    def forced(logits: Any, requests: Sequence[Any], counts: Sequence[int]) -> Any:
        found = choose(logits, requests, counts)
        tokens = []
        for request, count in zip(requests, counts, strict=True):
            output = outputs.get(request.prompt, [])
            tokens.append(output[count] if count < len(output) else -1)
        given = to_device(np.array(tokens), found.tokens.device)
        found.tokens.copy_(torch.where(given < 0, found.tokens, given))
        return found

    engine.sampler.choose = forced


def generate(
    engine: Any, asked: Sequence[Sequence[int]], tokens: int, together: bool
) -> tuple[float, list[Any]]:
    """Run prompts one after the other or, if `together`, at the same time. Return the decoded tokens per second and the
    requests.

    The time of prompts does not count. Requests that run at the same time are measured until the first of them
    finishes, so that all requests take part in every measured step."""
    from kvloom.core import CacheControl
    from kvloom.engine import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    requests: list[Any] = []
    seconds, decoded = 0.0, 0
    for batch in [list(asked)] if together else [[ids] for ids in asked]:
        running = [engine.add(ids, params, CacheControl(store=False, read=False)) for ids in batch]
        while not all(one.output_count for one in running):
            engine.step()
        decoded -= sum(one.output_count for one in running)
        started = time.perf_counter()
        while not any(one.finish_reason for one in running):
            engine.step()
        seconds += time.perf_counter() - started
        decoded += sum(one.output_count for one in running)
        engine.run()
        requests += running
    return decoded / seconds, requests


def measure(args: Any, case: str, streams: int, speculate: str) -> Row:
    """Compare engines with and without drafts on one case, alternating."""
    from kvloom.engine import LLM

    settings: dict[str, Any] = {"pool_bytes": 1 << 28, "threads": args.threads, "device": args.device}
    llms = [LLM(args.model, speculate=how, **settings) for how in ("off", speculate)]
    asked = prompts(case, streams if streams > 1 else args.prompts, llms[0].tokenizer)
    if case == "edit":
        for llm in llms:
            force(llm.engine, {tuple(ids): output for ids, output in asked})
    rates: list[list[float]] = [[], []]
    requests: list[list[Any]] = [[], []]
    for turn in range(args.rounds + 1):
        for i in (0, 1) if turn % 2 else (1, 0):
            rate, requests[i] = generate(llms[i].engine, [ids for ids, _ in asked], args.tokens, streams > 1)
            if turn:  # the first round warms up
                rates[i].append(rate)
        if [one.tokens for one in requests[0]] != [one.tokens for one in requests[1]]:
            raise RuntimeError(f"{case}: tokens with speculation {speculate} differ from those without")
    speculation = llms[1].engine.speculation
    assert speculation is not None
    drafted = sum(one.draft_tokens for one in requests[1])
    accepted = sum(one.accepted_tokens for one in requests[1])
    plain, fast = (statistics.median(rate) for rate in rates)
    ratios = [fast / slow for slow, fast in zip(*rates, strict=True)]
    stats, controller = speculation.stats, speculation.controller
    return Row(
        case,
        streams,
        speculate,
        round(plain, 1),
        round(fast, 1),
        round(statistics.median(ratios), 2),
        round(accepted / max(1, drafted), 2),
        round(stats.tokens / max(1, stats.rows), 2),
        "; ".join(f"{name} {why}" for name, why in controller.reasons.items()) if controller else "",
    )


class Oracle:
    """Proposes drafts from known outputs. Each draft token is correct with the probability `chance`."""

    name = "oracle"
    is_lookup = False

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], chance: float) -> None:
        self._outputs, self._chance, self._rng = outputs, chance, random.Random(1)

    def propose(self, requests: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            right = self._outputs[request.prompt][request.output_count :][:count]
            drafts.append([token ^ (self._rng.random() >= self._chance) for token in right])
        return drafts

    def request_finished(self, request: Any) -> None:
        pass

    def step_computed(self, work: Any, own: Any) -> None:
        pass

    def draft_verified(self, request: Any, drafted: int, accepted: int, own: bool) -> None:
        pass


def measure_shape(args: Any) -> list[Row]:
    """Compare three engines with a large model: without drafts, with drafts in every step, and with the controller."""
    import torch

    from kvloom.bench.shapes import SHAPES, build, hf_config
    from kvloom.engine import Engine, EngineConfig

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = hf_config(args.shape)
    model = build(config, SHAPES[args.shape].dtype, device)
    rng, most = random.Random(0), max(args.batches)
    outputs = {
        tuple(rng.randrange(1000, config.vocab_size) for _ in range(128)): [
            rng.randrange(1000, config.vocab_size) for _ in range(args.tokens + 1)
        ]
        for _ in range(most)
    }
    engines = {}
    for how in ("plain", "always", "controller"):
        settings = EngineConfig(
            pool_bytes=args.pool,
            max_running=most,
            speculate="off" if how == "plain" else "ngram",
            draft_tokens=None if how == "plain" else args.draft_tokens,
        )
        engine = engines[how] = Engine(model, settings)
        force(engine, outputs)
        if engine.speculation is not None:
            engine.speculation.proposers = [Oracle(outputs, args.acceptance)]
            if how == "always":
                engine.speculation.controller = None
        engine.prepare()
        print(f"prepared: {how}", file=sys.stderr, flush=True)
    rows = []
    for streams in args.batches:
        asked = list(outputs)[:streams]
        rates: dict[str, list[float]] = {how: [] for how in engines}
        found: dict[str, list[Any]] = {}
        for turn in range(args.rounds + 1):
            for how, engine in engines.items():
                rate, found[how] = generate(engine, asked, args.tokens, together=True)
                if any(one.output != outputs[one.prompt][: args.tokens] for one in found[how]):
                    raise RuntimeError(f"{args.shape}: {how} gave other tokens than the given ones")
                if turn:
                    rates[how].append(rate)
        for how in ("always", "controller"):
            speculation = engines[how].speculation
            assert speculation is not None
            drafted = sum(one.draft_tokens for one in found[how])
            accepted = sum(one.accepted_tokens for one in found[how])
            steps = statistics.mean(
                one.output_count / max(1, one.output_count - one.accepted_tokens) for one in found[how]
            )
            ratios = [fast / slow for slow, fast in zip(rates["plain"], rates[how], strict=True)]
            controller = speculation.controller
            rows.append(
                Row(
                    args.shape, streams, how, round(statistics.median(rates["plain"]), 1),
                    round(statistics.median(rates[how]), 1), round(statistics.median(ratios), 2),
                    round(accepted / max(1, drafted), 2), round(steps, 2),
                    "" if controller is None else "; ".join(controller.reasons.values()),
                )
            )  # fmt: skip
            show(rows[-1], args.json)
    return rows


def show(row: Row, as_json: bool) -> None:
    """Print one line of the report."""
    if as_json:
        print(json.dumps(asdict(row)), flush=True)
        return
    print(
        f"{row.case:9} {row.streams:3} streams  {row.speculate:28} {row.plain:8.1f} → {row.drafted:8.1f} tokens/s  "
        f"{row.ratio:5.2f}x  acceptance {row.acceptance:.2f}  {row.tokens_per_row:.2f} tokens a row  {row.decision}",
        flush=True,
    )


def _parser() -> Parser:
    parser = Parser("kvloom bench speculation", description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--model", default="kvloom-llama", metavar="MODEL", help="the target (default: kvloom-llama)")
    add("--draft", default="kvloom-draft", metavar="MODEL", help="its draft model (default: kvloom-draft)")
    add("--tokens", type=whole(1), default=200, metavar="N", help="output tokens of a request (default: 200)")
    add("--prompts", type=whole(1, 16), default=4, metavar="N", help="prompts of one stream (default: 4)")
    add("--rounds", type=whole(1), default=3, metavar="N", help="measured rounds (default: 3)")
    add(
        "--streams",
        type=whole(2, 16),
        default=16,
        metavar="N",
        help="requests of the parallel cases (default: 16)",
    )
    add("--threads", type=whole(1), metavar="N", help="CPU threads")
    add(
        "--cpu-time",
        action="store_true",
        help="measure the CPU time of the process instead of the elapsed time, also in the controller; "
        "for a busy machine and `--device cpu --threads 1`",
    )
    add("--device", metavar="D", help="cpu, cuda or cuda:N")
    add(
        "--shape",
        metavar="SHAPE",
        help="a large model of `kvloom bench engine`, with drafts of a known acceptance",
    )
    add(
        "--acceptance",
        type=float,
        default=0.8,
        metavar="A",
        help="with --shape: chance that a draft token is correct (default: 0.8)",
    )
    add(
        "--draft-tokens",
        type=whole(1),
        default=4,
        metavar="N",
        help="with --shape: tokens in a draft (default: 4)",
    )
    add(
        "--batches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 32, 256],
        metavar="N,…",
        help="with --shape: numbers of streams (default: 1,8,32,256)",
    )
    add(
        "--pool",
        type=parse_size,
        default="4GiB",
        metavar="SIZE",
        help="with --shape: memory of each engine's pool (default: 4GiB)",
    )
    add("--json", action="store_true", help="print JSON lines")
    return parser


def main(argv: list[str]) -> int:
    """Print one line per case, or JSON lines."""
    args = _parser().parse_args(argv)
    if args.cpu_time:
        time.perf_counter = time.process_time
    if args.shape:
        measure_shape(args)
        return 0
    draft = f"draft={args.draft}"
    cases = [
        ("continue", 1, draft),
        ("continue", 1, f"suffix,{draft}"),
        ("edit", 1, "suffix"),
        ("continue", args.streams, draft),
        ("continue", args.streams, "suffix"),
    ]
    for case, streams, how in cases:
        show(measure(args, case, streams, how), args.json)
    sys.stdout.flush()
    return 0
