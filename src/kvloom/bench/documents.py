"""`kvloom bench documents`: the quality and speed of answers if the K and V of documents are reused.

A prompt has several documents and a question. The K and V of each document were computed without the text before the
document. A share of its tokens is computed again in the prompt. Quality is compared with a prompt whose tokens are all
computed:

| figure   | meaning                                                                                          |
|----------|--------------------------------------------------------------------------------------------------|
| nats     | loss per token of the text that follows one of the documents in its file                         |
| kl       | divergence from the distribution of the next token with all tokens computed, in nats             |
| same     | share of equal most likely tokens                                                                |
| answers  | share of right tokens if the model repeats a passage of one of four documents of 64 tokens        |
| seconds  | time to first token of the engine, with cached documents; on a CPU, the CPU time of the process  |

Three rules choose the tokens that are computed again: the first tokens of each document, evenly spread tokens, or the
tokens whose K in the second layer differs most. The engine uses the first rule. The other two rules are tried only with
Hugging Face's modeling code.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvloom
from kvloom.arguments import DEVICE, MODEL, THREADS, Parser, device, error_text, number, size, whole
from kvloom.core import CacheControl
from kvloom.engine import Engine, EngineConfig, SamplingParams, use_threads
from kvloom.models.paged import EmptyCache
from kvloom.models.specs import folder_of

__all__ = ["blended_logits", "main"]

REPETITION = 4, 64, 16, 16
"""Documents of a repetition, tokens of each, tokens of the repeated passage that are given, and tokens to find."""
RULES = ("first", "even", "different")
Spans = Sequence[tuple[int, int]]
Alone = tuple[int, int, "_Recorder"]
"""A document: its start and end in the prompt, and its K and V if it is computed alone."""


class _Recorder(EmptyCache):
    """Records K and V of all layers in one execution of a model."""

    def __init__(self) -> None:
        self.layers_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        self.layers_kv[layer] = k, v
        return k, v


class _Blend(EmptyCache):
    """Replaces the K and V of some tokens by the K and V of documents that were computed alone."""

    def __init__(self, parts: list[Alone], computed: torch.Tensor) -> None:
        self._parts, self._computed = parts, computed

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        k, v = k.clone(), v.clone()
        for start, end, alone in self._parts:
            reused = ~self._computed[start:end]
            for mine, theirs in zip((k, v), alone.layers_kv[layer], strict=True):
                mine[:, :, start:end][:, :, reused] = theirs[:, :, reused]
        return k, v


def documents_alone(model: Any, ids: torch.Tensor, spans: Spans) -> list[Alone]:
    """Compute each document alone, at the positions that it has in the prompt."""
    found = []
    for start, end in spans:
        recorder = _Recorder()
        places = torch.arange(start, end, device=ids.device)[None]
        model(ids[None, start:end], position_ids=places, past_key_values=recorder, use_cache=True)
        found.append((start, end, recorder))
    return found


@torch.inference_mode()
def blended_logits(
    model: Any, ids: torch.Tensor, spans: Spans, computed: torch.Tensor, alone: list[Alone] | None = None
) -> torch.Tensor:
    """Return the logits after every token of a prompt with reused documents, [tokens, vocabulary]. Uses only Hugging
    Face's modeling code. `spans` are the documents. Their tokens are reused where `computed` is False. The logits after
    reused tokens have no meaning. `alone` is the result of `documents_alone`, if it is known."""
    cache = _Blend(documents_alone(model, ids, spans) if alone is None else alone, computed)
    found: torch.Tensor = model(ids[None], past_key_values=cache, use_cache=True).logits[0]
    return found


def chosen(
    ids: torch.Tensor, alone: list[Alone], whole_prompt: _Recorder, share: float, rule: str
) -> torch.Tensor:
    """Return a mask of the tokens of a prompt that are computed. The other tokens are reused. `share` is the share of a
    document's tokens that is computed, and `rule` selects these tokens. `whole_prompt` has the K and V of the prompt
    without reuse.
    """
    computed = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for start, end, own in alone:
        count = math.ceil(share * (end - start))
        computed[start:end] = False
        if rule == "first":
            computed[start : start + count] = True
        elif rule == "even":
            computed[start + torch.arange(count, device=ids.device) * (end - start) // max(1, count)] = True
        else:
            layer = sorted(own.layers_kv)[1]
            moved = whole_prompt.layers_kv[layer][0][0, :, start:end] - own.layers_kv[layer][0][0]
            computed[start + moved.pow(2).sum((0, 2)).topk(count).indices] = True
    return computed


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt: its tokens, its documents, and the first token of the text whose loss is measured. `answer` has the
    tokens to find, or is empty."""

    ids: list[int]
    spans: list[tuple[int, int]]
    question: int
    answer: tuple[int, ...] = ()


def texts_of(tokenizer: Any, tokens: int) -> list[list[int]]:
    """Return the source files of kvloom as tokens, in order of their paths. Files with fewer tokens are left out."""
    found = []
    for path in sorted(Path(kvloom.__file__).parent.rglob("*.py")):
        ids = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        if len(ids) >= tokens:
            found.append(list(ids))
    return found


def continuation_cases(
    tokenizer: Any, cases: int, documents: int, tokens: int, question: int, draw: random.Random
) -> list[Case]:
    """Return prompts whose question is the text that follows one of the documents in its file."""
    texts = texts_of(tokenizer, tokens + question)
    found = []
    for _ in range(cases):
        files = draw.sample(texts, documents)
        starts = [draw.randrange(len(ids) - tokens - question + 1) for ids in files]
        pieces = [ids[at : at + tokens] for ids, at in zip(files, starts, strict=True)]
        asked = draw.randrange(documents)
        rest = files[asked][starts[asked] + tokens :][:question]
        found.append(_case(tokenizer, pieces, rest, ()))
    return found


def repetition_cases(
    tokenizer: Any, cases: int, documents: int, tokens: int, given: int, asked: int, draw: random.Random
) -> list[Case]:
    """Return prompts that end with a passage of one of their documents. The model sees the first `given` tokens of the
    passage, and must find each of the `asked` tokens after them."""
    texts = texts_of(tokenizer, tokens)
    found = []
    for _ in range(cases):
        starts = [(ids, draw.randrange(len(ids) - tokens + 1)) for ids in draw.sample(texts, documents)]
        pieces = [ids[at : at + tokens] for ids, at in starts]
        first = draw.randrange(tokens - given - asked + 1)
        passage = pieces[draw.randrange(documents)][first : first + given + asked]
        found.append(_case(tokenizer, pieces, passage, tuple(passage[given:])))
    return found


def _case(tokenizer: Any, pieces: list[list[int]], question: list[int], answer: tuple[int, ...]) -> Case:
    header = tokenizer("# Some files:\n", add_special_tokens=True)["input_ids"]
    ids, spans = list(header), []
    for piece in pieces:
        ids += tokenizer("\n\n# A file\n", add_special_tokens=False)["input_ids"]
        spans.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return Case(ids + question, spans, len(ids), answer)


@torch.inference_mode()
def quality(model: Any, case: Case, ways: Sequence[tuple[float, str]]) -> list[dict[str, float]]:
    """Return the figures of a case for each share and rule: answers of a repetition, else nats, kl and same."""
    ids = torch.tensor(case.ids, device=model.device)
    whole_prompt = _Recorder()
    exact = model(ids[None], past_key_values=whole_prompt, use_cache=True).logits[0].float()
    alone = documents_alone(model, ids, case.spans)
    found = []
    for share, rule in ways:
        computed = chosen(ids, alone, whole_prompt, share, rule)
        logits = blended_logits(model, ids, case.spans, computed, alone).float()
        if case.answer:
            found.append({"answers": _right_tokens(logits, case)})
            continue
        part = slice(case.question, len(case.ids) - 1)
        mine, own = logits[part].log_softmax(-1), exact[part].log_softmax(-1)
        found.append(
            {
                "nats": float(-mine.gather(1, ids[case.question + 1 :, None]).mean()),
                "kl": float((own.exp() * (own - mine)).sum(-1).mean()),
                "same": float((mine.argmax(-1) == own.argmax(-1)).float().mean()),
            }
        )
    return found


def _right_tokens(logits: torch.Tensor, case: Case) -> float:
    """Return the share of the answer's tokens that the model predicts as the most likely tokens."""
    picked = logits[-len(case.answer) - 1 : -1].argmax(-1).tolist()
    return statistics.fmean(a == b for a, b in zip(picked, case.answer, strict=True))


@torch.inference_mode()
def answers_without_documents(model: Any, cases: Sequence[Case]) -> float:
    """Return the share of right tokens if the prompts contain no documents, so that the model can only guess."""
    found = []
    for case in cases:
        first, last = case.spans[0][0], case.spans[-1][1]
        ids = torch.tensor(case.ids[:first] + case.ids[last:], device=model.device)
        found.append(_right_tokens(model(ids[None]).logits[0], case))
    return statistics.fmean(found)


def first_token_seconds(engine: Engine, case: Case) -> float:
    """Return the time to first token of a case, in seconds. If the engine reuses documents, the documents are cached
    before the measurement. On a CPU, return the CPU time of the process, so that other processes do not change it."""
    clock = time.perf_counter if engine.device.type == "cuda" else time.process_time
    params = SamplingParams(max_tokens=1, temperature=0)
    documents = tuple(case.spans) if engine.config.reuse_documents is not None else ()
    for start, end in documents:
        engine.add(case.ids[start:end], params)
    engine.run()
    began = clock()
    engine.add(case.ids, params, CacheControl(documents=documents))
    engine.run()
    return clock() - began


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench documents",
        description="Measure quality and time to first token if the K and V of documents are reused.",
    )
    add = parser.add_argument
    add("model", nargs="?", default="kvloom-llama", metavar="MODEL", help=f"{MODEL} (default: kvloom-llama)")
    add("--cases", type=whole(1), default=24, metavar="N", help="prompts of each kind (default: 24)")
    add("--documents", type=whole(2, 26), default=4, metavar="N", help="documents of a prompt (default: 4)")
    add("--tokens", type=whole(64), default=256, metavar="N", help="tokens of a document (default: 256)")
    add(
        "--question",
        type=whole(2),
        default=64,
        metavar="N",
        help="tokens whose loss is measured (default: 64)",
    )
    add("--shares", nargs="+", type=number(0, 1), default=[0.0, 0.05, 0.15, 0.3, 1.0], metavar="S",
        help="shares of a document's tokens that are computed (default: 0 0.05 0.15 0.3 1)")  # fmt: skip
    add("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="R",
        help=f"rules that choose these tokens (default: {' '.join(RULES)})")  # fmt: skip
    add("--pool", type=size, default="256MiB", metavar="SIZE", help="size of the page pool (default: 256MiB)")
    add("--seed", type=whole(0), default=1, metavar="N", help="seed of the prompts (default: 1)")
    add("--device", type=device, metavar="D", help=DEVICE)
    add("--threads", type=whole(1), metavar="N", help=THREADS)
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return _bench(args)
    except (OSError, ValueError) as error:
        print(f"kvloom bench documents: {error_text(error)}", file=sys.stderr)
        return 2


def _bench(args: argparse.Namespace) -> int:
    from kvloom.models.loading import load

    use_threads(args.threads)
    folder = folder_of(args.model)
    model, tokenizer = load(folder, "float32", args.device)
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer: give --model a folder that has one")
    draw = random.Random(args.seed)
    cases = continuation_cases(tokenizer, args.cases, args.documents, args.tokens, args.question, draw)
    found = repetition_cases(tokenizer, 4 * args.cases, *REPETITION, draw)
    # All rules choose the same tokens if none or all are computed.
    ways = [(s, rule) for s in args.shares for rule in (args.rules if 0 < s < 1 else args.rules[:1])]
    figures: list[dict[str, list[float]]] = [{} for _ in ways]
    for case in cases + found:
        for sums, measured in zip(figures, quality(model, case, ways), strict=True):
            for name, value in measured.items():
                sums.setdefault(name, []).append(value)
    rows: list[dict[str, Any]] = [
        {"share": share, "rule": rule, **{name: statistics.fmean(values) for name, values in sums.items()}}
        for (share, rule), sums in zip(ways, figures, strict=True)
    ]
    guessed = answers_without_documents(model, found)
    model, _ = load(folder, "float32", args.device)  # engines change the attention of their model
    engines = {
        share: Engine(model, EngineConfig(pool_bytes=args.pool, reuse_documents=share))
        for share in (None, *args.shares)
    }
    seconds: dict[float | None, list[float]] = {share: [] for share in engines}
    for engine in engines.values():
        engine.prepare()
    for case in cases:  # engines alternate, so that a disturbance of the machine affects all of them
        for share, engine in engines.items():
            seconds[share].append(first_token_seconds(engine, case))
    for engine in engines.values():
        engine.close()
    base = statistics.median(seconds.pop(None))
    for row in rows:
        if row["rule"] == "first":
            row["seconds"] = statistics.median(seconds[row["share"]])
            row["speedup"] = base / row["seconds"]
    report = {
        "model": args.model, "cases": args.cases, "documents": args.documents, "tokens": args.tokens,
        "seconds_without_reuse": base, "answers_without_documents": guessed,
    }  # fmt: skip
    print(json.dumps(report | {"rows": rows}, indent=2) if args.json else _table(report, rows))
    return 0


def _table(report: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{report['model']}: {report['cases']} prompts with {report['documents']} documents of {report['tokens']} tokens",
        f"time to first token without reuse: {1e3 * report['seconds_without_reuse']:.0f} ms",
        f"repeated tokens found without documents: {report['answers_without_documents']:.0%}",
        "| computed | rule | nats | KL | same token | repeated tokens found | time to first token | speed-up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        timed = f"{1e3 * row['seconds']:.0f} ms | {row['speedup']:.2f}" if "seconds" in row else " | "
        lines.append(
            f"| {row['share']:.0%} | {row['rule']} | {row['nats']:.3f} | {row['kl']:.4f} | {row['same']:.1%} | "
            f"{row['answers']:.0%} | {timed} |"
        )
    return "\n".join(lines)
