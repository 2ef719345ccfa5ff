"""`kvloom bench speculation`: tokens per second with and without drafts, as ratios of one run.

Engines with and without speculation take turns, so that a disturbance affects both. Outputs are compared: greedy tokens
must be the same. The prompts are made from Python's standard library:

| case      | prompt                                                        | output                         |
|-----------|---------------------------------------------------------------|--------------------------------|
| continue  | the beginning of a module                                     | what the model writes          |
| edit      | a part of a module                                            | the same with renamed names    |

The embedded models are too small to edit a text. In the case "edit", the sampler's choice is replaced by the edited
text; model and drafts do the same work as for a model that edits.
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from kvloom.arguments import Parser, whole

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
    """One case: tokens per second without and with drafts, their ratio, and the acceptance of the drafts."""

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
    """Return prompts and forced outputs as token ids, each from another module. An empty output is not forced."""
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
    """Replace the tokens that an engine's sampler chooses by the given output of each prompt."""
    import torch

    choose = engine.sampler.choose

    @torch.inference_mode()
    def forced(logits: Any, requests: Sequence[Any], counts: Sequence[int]) -> Any:
        found = choose(logits, requests, counts)
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            output = outputs.get(tuple(request.prompt), [])
            if count < len(output):
                found.tokens[row] = output[count]
        return found

    engine.sampler.choose = forced


def generate(
    engine: Any, asked: Sequence[Sequence[int]], tokens: int, together: bool
) -> tuple[float, list[Any]]:
    """Run prompts one after the other, or together. Return the decoded tokens per second, without the time of
    prompts, and the requests."""
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
        engine.run()
        seconds += time.perf_counter() - started
        decoded += sum(one.output_count for one in running)
        requests += running
    return decoded / seconds, requests


def measure(args: Any, case: str, streams: int, speculate: str) -> Row:
    """Compare engines with and without drafts on one case, in turns."""
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


def main(argv: list[str]) -> int:
    """Print one row per case, or JSON lines."""
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
    add("--device", metavar="D", help="cpu, cuda or cuda:N")
    add("--json", action="store_true", help="print JSON lines")
    args = parser.parse_args(argv)
    draft = f"draft={args.draft}"
    cases = [
        ("continue", 1, draft),
        ("continue", 1, f"suffix,{draft}"),
        ("edit", 1, "suffix"),
        ("continue", args.streams, draft),
        ("continue", args.streams, "suffix"),
    ]
    for case, streams, how in cases:
        row = measure(args, case, streams, how)
        if args.json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            print(
                f"{row.case:9} {row.streams:3} streams  {row.speculate:28} {row.plain:8.1f} → {row.drafted:8.1f} tokens/s  "
                f"{row.ratio:5.2f}x  acceptance {row.acceptance:.2f}  {row.tokens_per_row:.2f} tokens a row  {row.decision}",
                flush=True,
            )
    sys.stdout.flush()
    return 0
