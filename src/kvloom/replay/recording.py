"""kvloom's own recorded traffic: names, lengths and times, never text.

A file is lines of JSON, gzipped if its name ends in .gz:

    {"kvloom": "traffic", "version": 1, "block_tokens": 64, "model": "llama"}
    {"at": 0.25, "prompt": 1000, "output": 128, "names": "9f3c…", "tenant": "4be1", "session": "77a0", "ending": "stop"}

`names` are the names of the whole blocks of prompt and answer, 8 bytes each in one hexadecimal run. Names,
tenants and sessions are hashed with a key that is drawn for the recording and never written: equal
ones can be seen to be equal, and nobody can test a guess of the text against them afterwards.
"""

from __future__ import annotations

import gzip
import io
import json
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.core.layout import GRAIN
from kvloom.core.names import chain, root_name, token_bytes

from .traffic import Request, Traffic, number_blocks

__all__ = ["Recorder", "is_recording", "read_recording"]

VERSION = 1
_NAME = 8
_WORD = 6


class Recorder:
    """Writes traffic as it is served. One line a request, when it is done; not thread-safe.

    Costs one hash of the request's tokens. A reader sees every line that `flush` has passed.
    """

    def __init__(self, path: str | Path, block_tokens: int = 64, model: str = "") -> None:
        if block_tokens <= 0 or block_tokens % GRAIN:
            raise ValueError(f"block_tokens {block_tokens} is not a positive multiple of {GRAIN}")
        self.block_tokens = block_tokens
        self.model = model
        self._key = secrets.token_bytes(32)
        path = Path(path)
        raw = gzip.open(path, "wb") if path.name.endswith(".gz") else path.open("wb")  # noqa: SIM115
        self._file = io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
        head = {"kvloom": "traffic", "version": VERSION, "block_tokens": block_tokens, "model": model}
        self._write(head)

    def add(
        self,
        at: float,
        tokens: npt.ArrayLike,
        prompt: int,
        *,
        tenant: str = "",
        adapter: str = "",
        session: str | None = None,
        ending: str | None = None,
    ) -> None:
        """A request that came at second `at`: the tokens of its prompt, the first `prompt` of them, and of
        its answer. Times are the caller's; they should not go back."""
        data = token_bytes(tokens)
        length = len(data) // 4
        if not 0 <= prompt <= length:
            raise ValueError(f"a prompt of {prompt} tokens in a request of {length}")
        every = self.block_tokens // GRAIN
        names = chain(root_name(self.model, tenant, adapter), data)[every - 1 :: every]
        line: dict[str, Any] = {"at": round(at, 6), "prompt": prompt, "output": length - prompt}
        line["names"] = "".join(self._hashed(name, _NAME) for name in names)
        if tenant:
            line["tenant"] = self._hashed(tenant.encode(), _WORD)
        if session is not None:
            line["session"] = self._hashed(session.encode(), _WORD)
        if ending is not None:
            line["ending"] = ending
        self._write(line)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Finish the file; the key is gone. Closing twice is harmless."""
        self._file.close()
        self._key = b""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hashed(self, word: bytes, size: int) -> str:
        return blake2b(word, digest_size=size, key=self._key).hexdigest()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def is_recording(head: dict[str, Any]) -> bool:
    return head.get("kvloom") == "traffic"


def read_recording(lines: Iterator[dict[str, Any]], origin: str) -> Traffic:
    """What a Recorder wrote. A prompt's last, partial block has no name and is not looked up."""
    head = next(lines)
    if head.get("version") != VERSION:
        raise ValueError(f"{origin}: version {head.get('version')!r} of recorded traffic; this is {VERSION}")
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
        if not 0 <= prompt or not 0 <= output or len(run) != (prompt + output) // block:
            raise ValueError(
                f"{origin}: line {number}: {len(run)} names for {prompt} + {output} tokens in blocks of {block}"
            )
        names.append(run)
        about.append((*known, line.get("ending")))
    blocks, distinct = number_blocks(names)
    requests = [
        Request(at, row, prompt // block, prompt, output, tenant, session, ending)
        for row, (at, prompt, output, tenant, session, ending) in zip(blocks, about, strict=True)
    ]
    requests.sort(key=lambda r: r.at)
    return Traffic(tuple(requests), block, distinct, origin)
