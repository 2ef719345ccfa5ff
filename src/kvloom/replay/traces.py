"""Reads recorded traffic in several public formats.

| format    | file                                          | blocks                                       |
|-----------|-----------------------------------------------|----------------------------------------------|
| Mooncake  | lines with `timestamp` (ms) and `hash_ids`    | 512 tokens, ids of whole prefixes            |
| agent     | one session: `requests` with `hash_ids`       | `block_size` tokens, ids local to a session  |
| Azure     | a table of time, context and generated tokens | lengths only: no block repeats               |
| Dynamo    | lines of request-end events                   | `trace_block_size`, hashes of whole prefixes |
| kvloom    | recordings of `kvloom serve --record`         | see `recording`                              |

Files may be gzipped. The format is detected from the first bytes, not from the name.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from .recording import is_recording, read_recording
from .traffic import Request, Traffic, number_blocks

__all__ = ["read_traces"]

AZURE_BLOCK = 512
MOONCAKE_BLOCK = 512
_SUFFIXES = (".json", ".jsonl", ".csv", ".json.gz", ".jsonl.gz", ".csv.gz")
Lines = list[dict[str, Any]]


def read_traces(paths: Iterable[str | Path], seed: int = 0, spread: float = 3600.0) -> Traffic:
    """Return the traffic of all files together. For a folder, all its files are read.

    Agent sessions have no common clock. Each starts at a random time in the first `spread` seconds, drawn with
    `seed`. In other formats, times are relative to the first request. Raises ValueError, with file and line,
    for a file that is not a valid trace."""
    if spread < 0:
        raise ValueError(f"spread {spread} is negative; it is the seconds over which sessions start")
    files = [file for path in paths for file in _files(Path(path))]
    draw = random.Random(seed)
    return Traffic.merged([_read(file, draw, spread) for file in files])


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.name.endswith(_SUFFIXES))
        if not found:
            raise ValueError(f"{path}: no trace in this folder (looked for {', '.join(_SUFFIXES)})")
        return found
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    return [path]


def _read(path: Path, draw: random.Random, spread: float) -> Traffic:
    text = _text(path)
    head = text.lstrip()[:1]
    if text[:200].lower().startswith("timestamp,contexttokens"):
        return _azure(text, path)
    if head != "{":
        raise ValueError(f"{path}: not a trace: it begins with {text[:30]!r}")
    first, end = _first_object(text, path)
    if "requests" in first and not text[end:].strip():
        return _agent(first, path, draw.uniform(0.0, spread))
    if is_recording(first):
        return read_recording(_lines(text, path), str(path))
    readers: tuple[tuple[bool, Callable[[Lines, Path], Traffic]], ...] = (
        ("hash_ids" in first, _mooncake),
        ("event" in first, _dynamo),
    )
    for fits, reader in readers:
        if fits:
            return reader(list(_lines(text, path)), path)
    raise ValueError(f"{path}: no known trace format; the first entry has {', '.join(sorted(first))}")


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _first_object(text: str, path: Path) -> tuple[dict[str, Any], int]:
    start = len(text) - len(text.lstrip())
    try:
        found, end = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: {error.msg}") from None
    return found, end


def _lines(text: str, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number}: {error.msg}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path}: line {number}: an object was expected, not {line[:30]!r}")
        yield found


def _traffic(
    path: Path, block: int, rows: Sequence[Sequence[int]], about: Sequence[dict[str, Any]]
) -> Traffic:
    """Return requests from block ids and other fields, ordered by time."""
    try:
        blocks, distinct = number_blocks(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    requests = [Request(blocks=b, asked=len(b), **known) for b, known in zip(blocks, about, strict=True)]
    requests.sort(key=lambda r: r.at)
    return Traffic(tuple(requests), block, distinct, str(path))


def _number(found: dict[str, Any], key: str, path: Path) -> float:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ValueError(f"{path}: {key} must be a number from 0 on, got {value!r}")
    return value


def _mooncake(lines: Lines, path: Path) -> Traffic:
    rows, about = [], []
    first = _number(lines[0], "timestamp", path)
    for line in lines:
        rows.append(line.get("hash_ids"))
        about.append(
            {
                "at": (_number(line, "timestamp", path) - first) / 1000,
                "prompt_tokens": int(_number(line, "input_length", path)),
                "output_tokens": int(_number(line, "output_length", path)),
            }
        )
    return _traffic(path, MOONCAKE_BLOCK, rows, about)  # type: ignore[arg-type]  # checked there


def _agent(session: dict[str, Any], path: Path, start: float) -> Traffic:
    """Return the requests of one agent session. The file nests the requests of a subagent in the request that started
    it. Here they become a separate session.
    """
    rows, about = [], []

    def walk(requests: list[dict[str, Any]], start: float, name: str) -> None:
        for request in requests:
            if "hash_ids" in request:
                rows.append(request["hash_ids"])
                about.append(
                    {
                        "at": start + _number(request, "t", path),
                        "prompt_tokens": int(_number(request, "in", path)),
                        "output_tokens": int(_number(request, "out", path)),
                        "session": name,
                        "ending": request.get("stop"),
                    }
                )
            if "requests" in request:
                within = f"{name}/{request.get('agent_id', len(rows))}"
                walk(request["requests"], start + _number(request, "t", path), within)

    walk(session["requests"], start, str(session.get("id", path.name)))
    return _traffic(path, int(_number(session, "block_size", path)), rows, about)


def _dynamo(lines: Lines, path: Path) -> Traffic:
    rows, about, sizes = [], [], set()
    ends = [line["event"] for line in lines if line.get("event", {}).get("event_type") == "request_end"]
    asked = [(event, event.get("request", {})) for event in ends]
    asked = [(event, request) for event, request in asked if "replay" in request]
    if not asked:
        raise ValueError(f"{path}: no request_end event with block hashes in it")
    start = min(_number(request, "request_received_ms", path) for _, request in asked)
    for event, request in asked:
        replay = request["replay"]
        sizes.add(int(_number(replay, "trace_block_size", path)))
        rows.append(replay.get("input_sequence_hashes"))
        about.append(
            {
                "at": (request["request_received_ms"] - start) / 1000,
                "prompt_tokens": int(_number(request, "input_tokens", path)),
                "output_tokens": int(_number(request, "output_tokens", path)),
                "session": event.get("agent_context", {}).get("session_id"),
            }
        )
    if len(sizes) > 1:
        raise ValueError(f"{path}: blocks of different sizes in one trace: {sorted(sizes)}")
    return _traffic(path, sizes.pop(), rows, about)


def _azure(text: str, path: Path) -> Traffic:
    """Return the requests of an Azure trace. The trace has only lengths, so no two requests share a block."""
    rows: list[list[int]] = []
    about: list[dict[str, Any]] = []
    start: datetime | None = None
    used = 0
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        start = start or when
        blocks = -(-prompt // AZURE_BLOCK)
        rows.append(list(range(used, used + blocks)))
        used += blocks
        at = max(0.0, (when - start).total_seconds())
        about.append({"at": at, "prompt_tokens": prompt, "output_tokens": output})
    return _traffic(path, AZURE_BLOCK, rows, about)
