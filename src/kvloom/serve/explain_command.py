"""`kvloom explain`: prints why a request hit or missed the cache, or why measured settings have their values. The server
keeps a record of each request."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from kvloom.arguments import SERVER, server

from .http_client import KEY, fetch
from .words import POOL

__all__ = ["arguments", "describe", "describe_setting", "run"]

BAR = 40
"""Width of the time axis of a waterfall, in characters."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "request",
        nargs="?",
        metavar="REQUEST_ID",
        help="id of a response (cmpl-…, chatcmpl-…); default: list the latest requests",
    )
    add("--url", type=server, default="http://127.0.0.1:8000", help=SERVER)
    add("--api-key", metavar="KEY", help=f"API key (default: ${KEY})")
    add("--settings", action="store_true",
        help="explain the settings that measurements change, instead of a request: their present values, and why")  # fmt: skip
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the record of a request or, without a request id, a list of the latest requests. Raises ValueError for an
    unknown request, and OSError if no server answers.
    """
    key = args.api_key or os.environ.get(KEY)
    if args.settings:
        if args.request is not None:
            raise ValueError(f"--settings explains no request: leave out {args.request!r}, or --settings")
        settings = fetch(args.url, "/kvloom/state", key)["totals"]["settings"]
        print(json.dumps(settings, indent=2) if args.json else "\n".join(map(describe_setting, settings)))
        return 0
    if args.request is None:
        found = fetch(args.url, "/kvloom/requests?limit=20", key)
        print(json.dumps(found, indent=2) if args.json else _format_list(found["requests"]))
        return 0
    record = fetch(args.url, f"/kvloom/requests/{quote(args.request, safe='')}", key)
    print(json.dumps(record, indent=2) if args.json else "\n".join(describe(record)))
    return 0


def describe(record: Mapping[str, Any]) -> list[str]:
    """Return a request's record as sentences."""
    tenant = f" of tenant {record['tenant']}" if record["tenant"] else ""
    several = f" in {record['prompts']} prompts" if record["prompts"] > 1 else ""
    lines = [f"{record['id']}{tenant}: {_state(record)}."]
    prompt, cached = record["prompt_tokens"], record["cached_tokens"]
    stopped = record["stopped"]
    if stopped is None:
        lines.append(f"It has {prompt:,} prompt tokens{several}, which have not been looked up yet.")
    else:
        share = f" ({cached / prompt:.0%} cached)" if cached else ""
        lines.append(f"Of its {prompt:,} prompt tokens{several}, {_account(record)}{share}.")
        largest = "Of the prompt with most tokens to compute: " if several else ""
        lines.append(largest + stopped["text"])
    times = [
        f"{word} {_seconds(record[key])}"
        for word, key in (("waited", "queue_s"), ("had its first token after", "ttft_s"))
        if record[key] is not None
    ]
    if times:
        lines.append(f"It {' and '.join(times)}; in all it {_took(record)} {_seconds(record['total_s'])}.")
    if record["preemptions"]:
        times_ = "once" if record["preemptions"] == 1 else f"{record['preemptions']} times"
        lines.append(f"It was preempted {times_}.")
    if drafted := record["draft_tokens"]:
        accepted = record["accepted_tokens"]
        lines.append(
            f"Of its {drafted:,} draft tokens, {accepted:,} were accepted ({accepted / drafted:.0%})."
        )
    if record.get("slo") is not None:
        lines += _objective(record["slo"])
    return lines + _waterfall(record.get("waterfall", []), record["prompts"] > 1)


def describe_setting(setting: Mapping[str, Any]) -> str:
    """Return a line with the value of a measured setting, and the reason for this value."""
    fixed = " (fixed)" if setting["is_fixed"] and setting["reason"] != "fixed" else ""
    return f"{setting['name']}: {setting['value']:,} {setting['unit']}{fixed}: {setting['reason']}"


def _waterfall(phases: list[Mapping[str, Any]], several: bool) -> list[str]:
    """Return one line for each phase of a request: name, start, duration, tokens, and a bar. The bars of all lines have
    the same time axis. With `several`, the request has several prompts, and each line names its prompt."""
    if not phases:
        return []
    scale = BAR / max(1e-9, *(phase["end_s"] for phase in phases))
    rows = []
    for phase in phases:
        name = f"{phase['phase']} {phase['tier']}".strip()
        duration = phase["end_s"] - phase["start_s"]
        first = min(BAR - 1, int(phase["start_s"] * scale))
        tokens = "" if phase["tokens"] is None else f"{phase['tokens']:,} tokens"
        rows.append((
            f"prompt {phase['prompt'] + 1}: {name}" if several else name,
            f"at {_seconds(phase['start_s'])}", _seconds(duration), tokens,
            " " * first + "█" * max(1, min(BAR - first, round(duration * scale))),
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "",
        *(
            f"  {name:<{widths[0]}}  {start:>{widths[1]}}  {took:>{widths[2]}}  {tokens:>{widths[3]}}  {bar}"
            for name, start, took, tokens, bar in rows
        ),
    ]


def _objective(slo: Mapping[str, Any]) -> list[str]:
    """Return sentences about the objective of a request: predicted and actual times."""
    lines = []
    for word, key in (("first token", "ttft_ms"), ("time between tokens", "tbt_ms")):
        wanted, predicted, actual = slo[key], slo[f"predicted_{key}"], slo.get(f"actual_{key}")
        if wanted is not None or predicted is not None:
            parts = [
                f"{verb} {value:,.1f} ms"
                for verb, value in (("objective", wanted), ("predicted", predicted), ("actual", actual))
                if value is not None
            ]
            lines.append(f"Its {word}: {', '.join(parts)}.")
    if slo.get("deferred"):
        lines.append("It was deferred until its objective could be met, or its deadline was near.")
    return lines


def _account(record: Mapping[str, Any]) -> str:
    """Return a clause that states how many prompt tokens came from the pool and from each tier, and how many were
    computed. The numbers add up to the number of prompt tokens.
    """
    found = [
        f"{hit['tokens']:,} were in the pool"
        if hit["tier"] == POOL
        else f"{hit['tokens']:,} were loaded from {hit['tier']}"
        for hit in record["hits"]
    ]
    if record.get("reused_tokens"):
        found.append(f"{record['reused_tokens']:,} were copied from documents (the answer is approximate)")
    parts = [*found, f"{record['computed_tokens']:,} were computed"]
    return ", ".join(parts[:-1]) + (" and " if found else "") + parts[-1]


def _state(record: Mapping[str, Any]) -> str:
    made = f"{record['output_tokens']:,} output tokens"
    if record["state"] == "finished":
        return f"finished ({record['finish_reason']}), {made}"
    if record["state"] == "failed":
        return f"failed ({record['finish_reason']}), {made}"
    return str(record["state"])


def _took(record: Mapping[str, Any]) -> str:
    return "took" if record["state"] in ("finished", "failed") else "has taken"


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _format_list(records: list[Mapping[str, Any]]) -> str:
    if not records:
        return "no requests yet"
    rows = [("request", "state", "prompt", "cached", "output", "miss")]
    for r in records:
        reason = (
            ""
            if r["stopped"] is None
            else f"at {r['stopped']['at_token']:,}: {r['stopped']['reason'].replace('_', ' ')}"
        )
        rows.append(
            (
                r["id"],
                r["state"],
                f"{r['prompt_tokens']:,}",
                f"{r['cached_tokens']:,}",
                f"{r['output_tokens']:,}",
                reason,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
