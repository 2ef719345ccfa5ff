"""Writes a traffic recording: block hashes, lengths and times of requests, never text. `kvloom.replay` reads it.

A file is JSON lines, gzipped if its name ends in .gz:

    {"kvloom": "traffic", "version": 1, "block_tokens": 64, "model": "llama", "bytes_per_token": 131072}
    {"at": 0.25, "prompt": 1000, "output": 128, "names": "9f3c…", "tenant": "4be1", "session": "77a0", "ending": "stop"}

`names` are the hashes of the full blocks of prompt and answer, 8 bytes each, in one hexadecimal string. Block hashes,
tenants and sessions are hashed again with a random key before they are written. The key is never written, so a guessed
text cannot be confirmed. Equal values have equal hashes.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.core import (
    HASH_TOKENS,
    TOKEN_BYTES,
    hash_chain,
    private_mark,
    public_length,
    public_root_hash,
    root_hash,
    token_bytes,
)

__all__ = ["VERSION", "Recorder"]

VERSION = 1
_HASH_BYTES = 8
_ID_BYTES = 6


class Recorder:
    """Writes one line per finished request. Not thread-safe.

    For each request, its tokens are hashed once. Lines are in the file after `flush`. An existing file with content is
    refused, because the hashes of two recordings have different keys. If there were no requests, `close` deletes the
    file.
    """

    def __init__(self, path: str | Path, block_tokens: int = 64, model: str = "") -> None:
        if block_tokens <= 0 or block_tokens % HASH_TOKENS:
            raise ValueError(f"block_tokens {block_tokens} is not a positive multiple of {HASH_TOKENS}")
        self.block_tokens = block_tokens
        self.model = model
        self._key = secrets.token_bytes(32)
        path = Path(path)
        if path.is_file() and path.stat().st_size:
            raise ValueError(
                f"{path} exists, and a recording is never overwritten or extended: choose another name "
                "or remove the file"
            )
        self._unused: Path | None = path
        _make_private(path)
        raw = gzip.open(path, "wb") if path.name.endswith(".gz") else path.open("wb")  # noqa: SIM115
        self._file = io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
        self.bytes_per_token: int | None = None
        """Bytes per token of the pool's layout, so that `kvloom replay` can compute the size of a block. Set it
        before the first request.
        """

    def add(
        self,
        at: float,
        tokens: npt.ArrayLike,
        prompt: int,
        *,
        tenant: str = "",
        salt: str = "",
        adapter: str = "",
        session: str | None = None,
        ending: str | None = None,
        last_computed: bool = True,
        public_tokens: int = 0,
    ) -> None:
        """Write a request that arrived at second `at`. The value of `at` should not decrease from call to call.

        `tokens` are its prompt (the first `prompt` tokens) and its answer. `last_computed` is False if the engine
        sampled the last token but did not compute its KV. The block that ends with this token is then not recorded,
        because it was never cached. The first `public_tokens` tokens are a public prefix.
        """
        data = token_bytes(tokens)
        length = len(data) // TOKEN_BYTES
        if not 0 <= prompt <= length:
            raise ValueError(f"prompt is {prompt} tokens, but the request has {length}")
        cached = max(prompt, length - (not last_computed))
        every = self.block_tokens // HASH_TOKENS
        root = root_hash(self.model, tenant, adapter, salt)
        public = public_length(public_tokens, prompt, self.block_tokens)
        ids = np.frombuffer(data, "<i4").copy()
        resolve: Callable[[int], bytes] | None = None
        if public:  # the hashes depend on the tenant from the first private token on
            mark = private_mark(public, int(ids[public]), root)
            ids[public], resolve, root = -1, lambda _: mark.digest, public_root_hash(self.model, adapter)
        hashes = hash_chain(root, ids[:cached].tobytes(), resolve)[every - 1 :: every]
        line: dict[str, Any] = {"at": round(at, 6), "prompt": prompt, "output": length - prompt}
        line["names"] = "".join(self._hashed(block_hash, _HASH_BYTES) for block_hash in hashes)
        if tenant:
            line["tenant"] = self._hashed(tenant.encode(), _ID_BYTES)
        if session is not None:
            line["session"] = self._hashed(session.encode(), _ID_BYTES)
        if ending is not None:
            line["ending"] = ending
        if self._unused is not None:
            self._write_head()
        self._write(line)
        self._unused = None

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Finish the file and discard the key. A second call has no effect."""
        self._file.close()
        self._key = b""
        unused, self._unused = self._unused, None
        if unused is not None and unused.is_file():
            unused.unlink()  # so that the next start can use the same name

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_head(self) -> None:
        head = {
            "kvloom": "traffic",
            "version": VERSION,
            "block_tokens": self.block_tokens,
            "model": self.model,
        }
        self._write(
            head if self.bytes_per_token is None else {**head, "bytes_per_token": self.bytes_per_token}
        )

    def _hashed(self, word: bytes, size: int) -> str:
        return blake2b(word, digest_size=size, key=self._key).hexdigest()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _make_private(path: Path) -> None:
    """Create a file with mode 0600, or set that mode on an existing file."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if path.is_file():
            path.chmod(0o600)
