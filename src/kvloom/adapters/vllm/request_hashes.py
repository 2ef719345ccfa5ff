"""Block hashes of a vLLM request. The root (the hash before the first block) depends on the model, the LoRA adapter and
the cache salt."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from kvloom.core import HASH_TOKENS, hash_chain, root_hash, token_bytes

from .identity import adapter_identity

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["RequestHashes", "Roots"]


class Roots:
    """Computes the root hashes of requests for one model. The identity of each adapter is read once."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._adapters: dict[tuple[str, int, str], str] = {}

    def of(self, request: Request) -> bytes:
        """Return the root hash of a request. Raises ValueError if its adapter cannot be identified."""
        lora, adapter = request.lora_request, ""
        if lora is not None:
            key = (lora.lora_name, lora.lora_int_id, lora.lora_path)
            if key not in self._adapters or lora.load_inplace:  # vLLM reads the files at the same times
                self._adapters[key] = adapter_identity(lora.lora_name, lora.lora_path)
            adapter = self._adapters[key]
        return root_hash(self._model, adapter=adapter, salt=request.cache_salt or "")


class RequestHashes:
    """The block hashes of one request's tokens, computed as the tokens become known. Images are hashed by their
    content.
    """

    def __init__(self, root: bytes, request: Request) -> None:
        self._root, self._request = root, request
        self._hashes: list[bytes] = []  # one for every HASH_TOKENS tokens

    def of_blocks(self, first: int, stop: int, block_tokens: int) -> list[bytes]:
        """Return the hashes of blocks [first, stop) with `block_tokens` tokens each. All their tokens must be
        known."""
        units = block_tokens // HASH_TOKENS
        self._extend(stop * units)
        return self._hashes[(first + 1) * units - 1 : stop * units : units]

    def _extend(self, count: int) -> None:
        have = len(self._hashes)
        if count <= have:
            return
        start, stop = have * HASH_TOKENS, count * HASH_TOKENS
        tokens = self._request.all_token_ids[start:stop]
        if len(tokens) < stop - start:
            raise ValueError(f"{stop} tokens are hashed, and only {start + len(tokens)} are known")
        parent = self._hashes[-1] if have else self._root
        media = [
            (
                number,
                max(feature.mm_position.offset, start),
                feature.mm_position.offset + feature.mm_position.length,
            )
            for number, feature in enumerate(self._request.mm_features)
        ]
        if not any(first < stop and last > start for _, first, last in media):
            self._hashes += hash_chain(parent, token_bytes(tokens))
            return
        ids = np.asarray(tokens, "<i4")
        for number, first, last in media:
            if first < stop and last > start:
                ids[first - start : last - start] = -1 - number
        self._hashes += hash_chain(parent, ids.tobytes(), self._media_digest)

    def _media_digest(self, token: int) -> bytes:
        name = self._request.mm_features[-1 - token].identifier
        return blake2b(name.encode(), digest_size=16).digest()
