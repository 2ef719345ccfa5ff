"""`kvloom serve`: from what was asked on the command line to a server's options. Decides nothing else."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvloom.arguments import (
    BATCH_INVARIANT,
    DEVICE,
    DTYPE,
    GRAMMAR_MEMORY,
    GRAMMAR_SECONDS,
    KV_DTYPE,
    KV_SCALES,
    LOAD_FORMAT,
    LOAD_FORMATS,
    MODEL,
    MOST,
    POOL,
    THREADS,
    TIER,
    device,
    dtype,
    number,
    size,
    whole,
)

if TYPE_CHECKING:
    from kvloom.serve.auth.limits import Caps

__all__ = ["arguments", "run"]

LONGEST_TTL = 86400.0
"""Seconds that a request may have its pages stay, where keys are used and nothing else was said."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="kvloom-llama", metavar="MODEL", help=f"{MODEL} (default: kvloom-llama)")
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    add(
        "--port",
        type=whole(0, 65535),
        default=8000,
        metavar="N",
        help="port (default: 8000; 0: any free one)",
    )
    add("--name", metavar="NAME", help="what requests call the model (default: its folder's name)")
    keys = "API keys and their tenants: JSON, or lines of `KEY tenant [quota [weight]] [max_…=N]`"
    add("--api-keys", metavar="FILE", help=keys)
    add("--no-auth", action="store_true", help="ask for no key: the default, on loopback alone")
    add("--dtype", type=dtype, default="auto", metavar="D", help=DTYPE)
    add("--kv-dtype", metavar="D", help=KV_DTYPE)
    add("--kv-scales", default="dynamic", metavar="S", help=KV_SCALES)
    add("--batch-invariant", action="store_true", help=BATCH_INVARIANT)
    add("--device", type=device, metavar="D", help=DEVICE)
    add("--load-format", choices=LOAD_FORMATS, default="auto", help=LOAD_FORMAT)
    add("--pool", type=size, metavar="SIZE", help=POOL)
    add("--tier", action="append", default=[], metavar="TIER", help=TIER)
    fraction = "share of a GPU's memory that may be used, without --pool (default: 0.9)"
    add("--memory-fraction", type=number(0, 1, above=True), default=0.9, metavar="F", help=fraction)
    add("--max-running", type=whole(1), default=256, metavar="N", help="answers made at once (default: 256)")
    add("--max-queue", type=whole(0), default=1024, metavar="N", help="answers that may wait (default: 1024)")
    answers = (
        "answers that one request may ask for: n or best_of, times prompts (default with keys: --max-running)"
    )
    add("--max-answers", type=whole(1), metavar="N", help=answers)
    open_ = "answers of one tenant that may run or wait (default: while there is place for other tenants)"
    add("--max-open", type=whole(1), metavar="N", help=open_)
    ttl = "longest ttl that a request may give (default with keys: 86400)"
    add("--max-ttl", type=number(0, above=True), metavar="S", help=ttl)
    add("--max-priority", type=whole(-MOST), metavar="N", help="highest priority that a request may give")
    budget = "tokens of prompts computed in one step (default: what suits the device)"
    add("--token-budget", type=whole(1), metavar="N", help=budget)
    add("--threads", type=whole(1), metavar="N", help=THREADS)
    add("--grammar-seconds", type=number(0.01), default=2.0, metavar="S", help=GRAMMAR_SECONDS)
    add("--grammar-memory", type=size, default="256MiB", metavar="SIZE", help=GRAMMAR_MEMORY)
    connections = "connections that may be open at once (default: 4096)"
    add("--max-connections", type=whole(1), default=4096, metavar="N", help=connections)
    add("--max-body", type=size, default="8MiB", metavar="SIZE", help="largest request body (default: 8MiB)")
    prompt = "longest prompt (default: what the model and the pool can hold)"
    add("--max-prompt-tokens", type=whole(1), metavar="N", help=prompt)
    request = "how long a client may take to send a request's head, and its body (default: 30)"
    add("--request-seconds", type=number(0, above=True), default=30.0, metavar="S", help=request)
    slow = "how long a client may not read its stream (default: 60)"
    add("--read-seconds", type=number(0, above=True), default=60.0, metavar="S", help=slow)
    drain = "how long running requests may take after SIGTERM (default: 30)"
    add("--drain-seconds", type=number(0), default=30.0, metavar="S", help=drain)
    silent = "an engine that says nothing for so long is ended and started again (default: 30; 0: never)"
    add("--silent-seconds", type=number(0), default=30.0, metavar="S", help=silent)
    step = "so is one that stays so long in one step, or says nothing for so long while it loads (default: 600; 0: never)"
    add("--step-seconds", type=number(0), default=600.0, metavar="S", help=step)
    template = "CPU seconds that the chat template may use for one request (default: 2)"
    add("--template-seconds", type=number(0, above=True), default=2.0, metavar="S", help=template)
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    record = "write names, lengths and times of requests (never text) to this new file, for `kvloom replay`"
    add("--record", metavar="FILE", help=record)
    add("--otlp", metavar="URL", help="send traces to this OTLP/HTTP receiver, like http://127.0.0.1:4318")
    metrics = "whether /metrics needs an API key (default: auto: where other machines can reach it)"
    add("--metrics-auth", choices=("auto", "key", "open"), default="auto", help=metrics)
    add("--no-metrics", action="store_true", help="count nothing, remember no requests (for measuring)")
    parser.epilog = (
        "Metrics are at /metrics; the package has a Grafana dashboard for them, kvloom/serve/grafana.json "
        "(docs/observability.md)."
    )


def run(args: argparse.Namespace) -> int:
    from kvloom.engine import GrammarLimits
    from kvloom.models.catalog import folder_of
    from kvloom.serve.auth.keys import Keys, exposed, read_keys
    from kvloom.serve.auth.limits import Limits
    from kvloom.serve.server import Options, serve
    from kvloom.serve.worker.messages import Start
    from kvloom.serve.worker.watchdog import Patience

    if args.no_auth and args.api_keys is not None:
        raise ValueError("--no-auth asks for no key and --api-keys for one: give one of them")
    GrammarLimits(args.grammar_seconds, args.grammar_memory)
    caps = _caps(args)
    keys = Keys({}, default=caps) if args.api_keys is None else read_keys(args.api_keys, caps)
    if args.api_keys is not None and (said := exposed(args.api_keys)) is not None:
        print(f"kvloom serve: warning: {said}", file=sys.stderr)
    model = folder_of(args.model)
    start = Start(
        model=model,
        dtype=args.dtype,
        cpu_dtype="auto" if model == args.model else "float32",
        kv_dtype=args.kv_dtype,
        kv_scales=args.kv_scales,
        batch_invariant=args.batch_invariant,
        device=args.device,
        load_format=args.load_format,
        pool_bytes=args.pool,
        memory_fraction=args.memory_fraction,
        token_budget=args.token_budget,
        max_running=args.max_running,
        threads=args.threads,
        tenants=keys.tenants,
        tiers=tuple(args.tier),
        progress=sys.stderr.isatty(),
        observe=not args.no_metrics,
        grammar_seconds=args.grammar_seconds,
        grammar_memory=args.grammar_memory,
    )
    limits = Limits(
        body_bytes=args.max_body,
        connections=args.max_connections,
        prompt_tokens=args.max_prompt_tokens,
        answers=args.max_running + args.max_queue,
        request_seconds=args.request_seconds,
        read_seconds=args.read_seconds,
        template_seconds=args.template_seconds,
    )
    template = args.chat_template
    name = args.name or (None if model == args.model else args.model)
    if args.record is not None and args.no_metrics:
        raise ValueError("--record writes down what --no-metrics does not look at: give one of them")
    return serve(
        Options(
            start,
            host=args.host,
            port=args.port,
            name=name,
            keys=keys,
            limits=limits,
            drain_seconds=args.drain_seconds,
            patience=Patience(args.silent_seconds, args.step_seconds),
            chat_template=None if template is None else Path(template).read_text(encoding="utf-8"),
            writes_code=model != args.model,
            record=args.record,
            otlp=args.otlp,
            metrics_auth=args.metrics_auth,
        )
    )


def _caps(args: argparse.Namespace) -> Caps:
    """What one tenant's requests may ask for. Without keys all requests are one user's, and only what was said holds."""
    from kvloom.serve.auth.limits import PRESSURE, Caps

    answers, ttl = args.max_answers, args.max_ttl
    if args.api_keys is not None:
        gate = args.max_running + args.max_queue
        answers = answers or max(1, min(args.max_running, gate * PRESSURE // (PRESSURE + 1)))
        ttl = ttl or LONGEST_TTL
    return Caps(answers, args.max_open, ttl, args.max_priority)
