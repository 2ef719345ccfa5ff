"""`kvloom calibrate`: runs prompts and writes a file of scales."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvloom.arguments import DEVICE, DTYPE, MODEL, device, dtype, number, progress_bar, size, token_ids, whole

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    prompts = "prompts to run: files (.jsonl: one prompt a line; others: one text) or texts"
    add("--prompts", nargs="+", default=[], metavar="FILE|TEXT", help=prompts)
    tokens = 'a prompt as token ids, "5 6 7"; repeatable'
    add("--tokens", action="append", default=[], metavar="IDS", help=tokens)
    add(
        "--kv-dtype",
        choices=["fp8", "int8"],
        default="fp8",
        help="data type of the scaled K and V (default: fp8)",
    )
    add("--out", required=True, metavar="FILE", help="output file of the scales (safetensors)")
    percentile = "cover this percentage of tokens and clamp the others (default: 100)"
    add("--percentile", type=number(0, 100, above=True), default=100.0, metavar="P", help=percentile)
    pieces = "split longer prompts into pieces of N tokens (default: 2048)"
    add("--context", type=whole(1), default=2048, metavar="N", help=pieces)
    add("--dtype", type=dtype, default="auto", metavar="D", help=DTYPE)
    add("--device", type=device, metavar="D", help=DEVICE)
    add("--pool", type=size, default="1GiB", metavar="SIZE", help="bytes of the page pool (default: 1GiB)")
    add("--json", action="store_true", help="print a summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command. Return the exit status."""
    from kvloom.models.specs import folder_of

    from .config import EngineConfig
    from .preflight import check_engine

    if not args.prompts and not args.tokens:
        raise ValueError("there are no prompts to calibrate on: give --prompts or --tokens")
    if not Path(args.out).absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: the folder does not exist: create it")
    if Path(args.out).is_dir():
        raise ValueError(f"--out {args.out} is a folder: give the name of a file in it")
    folder = folder_of(args.model)
    config = EngineConfig(kv_dtype=args.kv_dtype, pool_bytes=args.pool)
    check_engine(folder, config, dtype=args.dtype, device=args.device)
    ids_given = [token_ids(text) for text in args.tokens]
    from kvloom.models.loading import load

    from .calibration import calibrate, texts_of
    from .execution import use_threads

    given = [*texts_of(args.prompts), *ids_given]
    use_threads()
    terminal = sys.stderr.isatty()
    model, tokenizer = load(folder, args.dtype, args.device, progress=terminal)

    def ids(prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer: give prompts as --tokens, or ids in a .jsonl")
        return list(tokenizer(prompt)["input_ids"])

    with progress_bar("calibrating", terminal) as progress:
        found = calibrate(
            model,
            map(ids, given),
            args.kv_dtype,
            args.percentile,
            args.context,
            args.pool,
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
        f"{found.prompts:,} prompt{'s' * (found.prompts != 1)}; largest {tops}"
    )
    return 0
