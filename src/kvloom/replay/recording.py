"""Reads recordings of `kvloom serve --record` (written by kvloom.serve.metrics.Recorder)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvloom.serve.metrics import VERSION, Recorder

from .traffic import Request, Traffic, number_blocks

__all__ = ["Recorder", "is_recording", "read_recording"]


def is_recording(head: dict[str, Any]) -> bool:
    return head.get("kvloom") == "traffic"


def read_recording(lines: Iterator[dict[str, Any]], origin: str) -> Traffic:
    """Return the traffic of a recording. The partial last block of a prompt has no hash in the recording, so the replay
    does not look it up."""
    head = next(lines)
    if head.get("version") != VERSION:
        raise ValueError(
            f"{origin}: recording version {head.get('version')!r} is not supported; expected {VERSION}"
        )
    block = head.get("block_tokens")
    if type(block) is not int or block <= 0:
        raise ValueError(f"{origin}: block_tokens {block!r} is not a positive number")
    names, about = [], []
    for number, line in enumerate(lines, 2):
        try:
            run = np.frombuffer(bytes.fromhex(line["names"]), ">u8")
            prompt, output = int(line["prompt"]), int(line["output"])
            known = (float(line["at"]), prompt, output, line.get("tenant", ""), line.get("session"))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{origin}: line {number}: not a recorded request ({error})") from None
        most = (prompt + output) // block
        if not 0 <= prompt or not 0 <= output or not max(prompt // block, most - 1) <= len(run) <= most:
            raise ValueError(
                f"{origin}: line {number}: {len(run)} block hashes for {prompt} + {output} tokens in blocks of {block}"
            )
        names.append(run)
        about.append((*known, line.get("ending")))
    blocks, distinct = number_blocks(names)
    requests = [
        Request(at, row, prompt // block, prompt, output, tenant, session, ending)
        for row, (at, prompt, output, tenant, session, ending) in zip(blocks, about, strict=True)
    ]
    requests.sort(key=lambda r: r.at)
    model, per_token = head.get("model"), head.get("bytes_per_token")
    return Traffic(
        tuple(requests),
        block,
        distinct,
        origin,
        model if isinstance(model, str) else "",
        per_token if type(per_token) is int and per_token > 0 else None,
    )
