"""`kvloom bench quality` measures the perplexity of texts with quantised K and V.

The text is split into windows. Each window is a separate sequence, computed in chunks, so that queries read K and V
from pages. No window hits the cache. The same tokens are computed with every KV dtype, and each result is compared with
the result of the first dtype.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvloom.arguments import DEVICE, MODEL, THREADS, Parser, device, dtype, error_text, size, whole
from kvloom.core import CacheControl
from kvloom.engine import Engine, EngineConfig, calibrate, check_engine, use_threads
from kvloom.models.paged import Work
from kvloom.models.specs import folder_of

__all__ = ["Quality", "main", "measure"]

DEFAULT = ("fp32", "bf16", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a model predicts a text with one KV dtype. `nats` has the loss of each token, and `choices` has the most
    likely token at each position. `bytes_per_token` is the size of K and V.
    """

    nats: torch.Tensor
    choices: torch.Tensor
    bytes_per_token: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.nats.double().mean()))

    def against(self, other: Quality) -> dict[str, float]:
        """Compare this result with `other`, a result on the same tokens. Return `more_nats`, the mean loss of this
        result minus the mean loss of `other`, in nats per token. Also returns `same_choice`, the share of equal
        choices."""
        more = float((self.nats.double() - other.nats.double()).mean())
        return {"more_nats": more, "same_choice": float((self.choices == other.choices).double().mean())}


def measure(engine: Engine, windows: Sequence[Sequence[int]], chunk: int = 256) -> Quality:
    """Compute every window in chunks, without cache hits. Each input token comes from the text, even if the model
    predicted another token (teacher forcing). Return the loss and the most likely token at each position, except
    for the first token of each window."""
    began = time.monotonic()
    nats, choices = [], []
    for window in windows:
        ids = torch.tensor(window, dtype=torch.int64, device=engine.device)
        logits = torch.cat([part.float() for part in _read(engine, np.array(window), chunk)])[:-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        nats.append(-logprobs.cpu())
        choices.append(logits.argmax(-1).cpu())
    kept = engine.layout.bytes_per_token()
    return Quality(torch.cat(nats), torch.cat(choices), kept, time.monotonic() - began)


def _read(engine: Engine, window: Any, chunk: int) -> Iterator[torch.Tensor]:
    """Yield the logits of one sequence, chunk by chunk."""
    cache = engine.cache
    sequence = cache.open(cache.match(window.astype(np.int32), CacheControl(store=False, read=False)))
    try:
        while sequence.length < len(window):
            at = sequence.length
            until = min(at + chunk, len(window), sequence.next_checkpoint or len(window))
            if sequence.extend(until - at):
                raise ValueError(f"a window of {len(window)} tokens does not fit the pool: enlarge --pool")
            part = window[at:until]
            yield engine.runner.score([Work(sequence, part)])
            sequence.commit(part.astype(np.int32))
    finally:
        sequence.close()


def _parser() -> Parser:
    parser = Parser(
        prog="kvloom bench quality",
        description="Measure the perplexity of texts with several KV dtypes, computed through kvloom's pages.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"{MODEL}; with its tokenizer")
    add(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts to read, preferably not from the training data",
    )
    ways = f"KV dtypes; the first is the reference (default: {' '.join(DEFAULT)})"
    add("--kv-dtype", nargs="+", default=list(DEFAULT), metavar="D", help=ways)
    static = "texts to calibrate static scales with; int8 and fp8 are measured with these, too"
    add("--calibrate", nargs="+", default=[], metavar="FILE", help=static)
    add("--context", type=whole(2), default=2048, metavar="N", help="tokens per window (default: 2048)")
    add("--chunk", type=whole(1), default=256, metavar="N", help="tokens computed per step (default: 256)")
    add("--tokens", type=whole(2), metavar="N", help="limit of tokens to read (default: all)")
    add(
        "--dtype",
        type=dtype,
        default="float32",
        metavar="D",
        help="dtype of weights and computation (default: float32)",
    )
    add("--device", type=device, metavar="D", help=DEVICE)
    add("--threads", type=whole(1), metavar="N", help=THREADS)
    add("--pool", type=size, default="1GiB", metavar="SIZE", help="size of the page pool (default: 1GiB)")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return _bench(args)
    except (OSError, ValueError) as error:
        print(f"kvloom bench quality: {error_text(error)}", file=sys.stderr)
        return 2


def _bench(args: argparse.Namespace) -> int:
    from kvloom.models.loading import load

    folder = folder_of(args.model)
    for way in args.kv_dtype:
        check_engine(
            folder, EngineConfig(kv_dtype=way, pool_bytes=args.pool), dtype=args.dtype, device=args.device
        )
    texts = {file: Path(file).read_text(encoding="utf-8") for file in (*args.text, *args.calibrate)}
    use_threads(args.threads)
    model, tokenizer = load(folder, args.dtype, args.device)
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer: give --model a folder that has one")
    pool = args.pool

    def ids(files: Sequence[str]) -> list[int]:
        return [token for file in files for token in tokenizer(texts[file], verbose=False)["input_ids"]]

    tokens = ids(args.text)[: args.tokens]
    windows = [tokens[at : at + args.context] for at in range(0, len(tokens), args.context)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ValueError("the texts are empty")
    found: dict[str, Quality] = {}
    with tempfile.TemporaryDirectory() as folder:
        scales = Path(folder) / "scales.safetensors"
        if args.calibrate:
            calibrate(model, [ids(args.calibrate)], context=args.context, pool_bytes=pool).save(scales)
        ways = [(way, "dynamic") for way in args.kv_dtype]
        if args.calibrate:
            ways += [(way, str(scales)) for way in args.kv_dtype if "int8" in way or "fp8" in way]
        for way, kept in ways:
            name = way if kept == "dynamic" else f"{way}, static scales"
            engine = Engine(
                model,
                EngineConfig(
                    pool_bytes=pool,
                    kv_dtype=way,
                    kv_scales=kept,
                    token_budget=args.chunk,
                    cuda_graphs=False,
                ),
            )
            found[name] = measure(engine, windows, args.chunk)
            print(f"{name}: {found[name].seconds:.1f} s", file=sys.stderr, flush=True)
    first = next(iter(found.values()))
    rows = [
        {
            "kv_dtype": name,
            "perplexity": one.perplexity,
            **one.against(first),
            "bytes_per_token": one.bytes_per_token,
        }
        for name, one in found.items()
    ]
    report = {"model": args.model, "tokens": len(first.nats), "context": args.context, "chunk": args.chunk}
    print(json.dumps(report | {"rows": rows}, indent=2) if args.json else _table(report, rows))
    return 0


def _table(report: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{report['model']}: {report['tokens']:,} tokens in windows of {report['context']:,}, chunks of {report['chunk']:,}",
        "| K and V in | perplexity | more nats a token | same first choice | bytes a token |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['kv_dtype']} | {row['perplexity']:.4f} | {row['more_nats']:+.5f} | {row['same_choice']:.2%} "
        f"| {row['bytes_per_token']:,} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
