"""`kvloom plan`: command-line arguments of the memory planner."""

from __future__ import annotations

import argparse
import json
import sys

from kvloom.arguments import KV_DTYPE, memory, whole

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="name of a known model (see --list) or path of a config.json",
    )
    add("--list", action="store_true", help="list the known models and exit")
    add(
        "--context",
        type=whole(1),
        metavar="N",
        help="text tokens per request (default: 8192, or the model's limit)",
    )
    add(
        "--image-tokens",
        type=whole(0),
        default=0,
        metavar="N",
        help="image tokens per request (default: 0)",
    )
    add(
        "--max-context",
        type=whole(1),
        metavar="N",
        help="tokens per contiguous buffer (default: the model's limit)",
    )
    add("--concurrency", type=whole(1), default=1, metavar="N", help="concurrent requests (default: 1)")
    add("--kv-dtype", metavar="D", help=KV_DTYPE)
    add(
        "--gpu-memory",
        type=memory,
        metavar="SIZE",
        help="memory for the cache, such as 40GiB: shows how many requests fit",
    )
    add("--block-tokens", type=whole(1), default=16, metavar="N", help="tokens per block (default: 16)")
    add("--draft", metavar="MODEL", help="draft model that shares the pool")
    add(
        "--head",
        metavar="HEAD",
        help="draft head that shares the pool: mtp, or eagle=FOLDER (or its config.json)",
    )
    add("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list_models(args.json)
    from rich.console import Console

    from kvloom.models.specs import load_config, load_spec, with_draft, with_head
    from kvloom.plan import Load, PlanError, make_plan, render

    if args.model is None:
        raise PlanError("no model given: use a name of `kvloom plan --list` or the path of a config.json")
    spec = load_spec(args.model, args.kv_dtype)
    if args.draft is not None:
        spec = with_draft(spec, load_spec(args.draft, args.kv_dtype))
    if args.head is not None:
        if args.draft is not None:
            raise PlanError("--draft and --head are given: use one of them")
        spec = with_head(spec, load_config(args.model), args.head, args.kv_dtype)
    context = args.context or min(8192, args.max_context or spec.max_context or 8192)
    load = Load(context, args.image_tokens, args.concurrency, args.max_context)
    plan = make_plan(spec, load, args.block_tokens, args.gpu_memory)
    if args.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        terminal = sys.stdout.isatty()
        render(plan, Console(highlight=False, width=None if terminal else 110))
    return 0


def _list_models(as_json: bool) -> int:
    from kvloom.models.specs import known_models

    print(json.dumps(known_models()) if as_json else "\n".join(known_models()))
    return 0
