"""Writing traffic as it is served: names, lengths and times, never text. Reading it is `kvloom.replay`'s.

A file is lines of JSON, gzipped if its name ends in .gz:

    {"kvloom": "traffic", "version": 1, "block_tokens": 64, "model": "llama"}
    {"at": 0.25, "prompt": 1000, "output": 128, "names": "9f3c…", "tenant": "4be1", "session": "77a0", "ending": "stop"}

`names` are the names of the whole blocks of prompt and answer that the cache was left with, 8 bytes each in one hexadecimal
run. Names, tenants and sessions are hashed with a key that is drawn for the recording and never written: equal ones can be
seen to be equal, and nobody can test a guess of the text against them afterwards.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from kvloom.core.layout import GRAIN
from kvloom.core.names import TOKEN_BYTES, chain, root_name, token_bytes

__all__ = ["VERSION", "Recorder"]

VERSION = 1
_NAME = 8
_WORD = 6


class Recorder:
    """Writes traffic as it is served. One line a request, when it is done; not thread-safe.

    Costs one hash of the request's tokens. A reader sees every line that `flush` has passed. A file that has something in it is
    refused: names of two recordings cannot be compared, so that one cannot go on with another. Where no request came, none
    is left behind.
    """

    def __init__(self, path: str | Path, block_tokens: int = 64, model: str = "") -> None:
        if block_tokens <= 0 or block_tokens % GRAIN:
            raise ValueError(f"block_tokens {block_tokens} is not a positive multiple of {GRAIN}")
        self.block_tokens = block_tokens
        self.model = model
        self._key = secrets.token_bytes(32)
        path = Path(path)
        if path.is_file() and path.stat().st_size:
            raise ValueError(
                f"{path} is there already, and a recording is neither overwritten nor added to: give another name, "
                "or remove the file"
            )
        self._unused: Path | None = path
        _make_private(path)
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
        last_computed: bool = True,
    ) -> None:
        """A request that came at second `at`: the tokens of its prompt, the first `prompt` of them, and of
        its answer. An engine that ends with a token does not compute it, so that its block never is in the cache: then
        `last_computed` is False. Times are the caller's; they should not go back."""
        data = token_bytes(tokens)
        length = len(data) // TOKEN_BYTES
        if not 0 <= prompt <= length:
            raise ValueError(f"a prompt of {prompt} tokens in a request of {length}")
        kept = max(prompt, length - (not last_computed))
        every = self.block_tokens // GRAIN
        names = chain(root_name(self.model, tenant, adapter), data[: kept * TOKEN_BYTES])[every - 1 :: every]
        line: dict[str, Any] = {"at": round(at, 6), "prompt": prompt, "output": length - prompt}
        line["names"] = "".join(self._hashed(name, _NAME) for name in names)
        if tenant:
            line["tenant"] = self._hashed(tenant.encode(), _WORD)
        if session is not None:
            line["session"] = self._hashed(session.encode(), _WORD)
        if ending is not None:
            line["ending"] = ending
        self._write(line)
        self._unused = None

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Finish the file; the key is gone. Closing twice is harmless."""
        self._file.close()
        self._key = b""
        unused, self._unused = self._unused, None
        if unused is not None and unused.is_file():
            unused.unlink()  # a server that could not be loaded is started again with the same name

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


def _make_private(path: Path) -> None:
    """Create a file that its owner alone can read and write; an empty one that exists becomes so. Others stay as they are."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if path.is_file():
            path.chmod(0o600)
