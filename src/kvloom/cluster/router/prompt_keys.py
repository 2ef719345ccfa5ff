"""Computes the block hashes of a prompt from the request's JSON. They equal the block hashes that the workers
compute.

    request                      hashes
    with token ids               block hashes, for each root (hash before the first block) that workers use
    text or chat                 block hashes, after a tokenizer or a worker's /tokenize has returned the tokens
    text without known tokens    hashes of 64-byte pieces of the text; show only which worker had this text before
    chat with images             hashes of 64-byte pieces; each image is replaced by a text of `image_tokens` tokens
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from kvloom.core import (
    HASH_TOKENS,
    TOKEN_BYTES,
    activation_mark,
    hash_chain,
    private_mark,
    public_length,
    root_hash,
    token_bytes,
)
from kvloom.events_wire import wire_hashes

from .fleet import AdapterOffer, Fleet, Offer, Worker
from .text_tokenizer import TextTokenizer

__all__ = ["PromptKeys", "PromptReader", "roots_of", "salt_of"]

CACHED_BYTES = 64 << 20
"""Largest size of the cached tokens that workers returned."""
CACHED_ENTRY = 256
"""Bytes that an entry of this cache uses besides its tokens."""
LONG_TEXT = 1 << 16
"""A text with more characters is tokenised in a thread, so that other requests do not wait."""
LONGEST_TEXT = 1 << 22
"""A text with more characters is not tokenised, but hashed as pieces of text."""
TEXT_BYTES = 1 << 20
"""Only the first bytes of a text without known tokens are hashed."""
MAX_IMAGES = 128
"""Further images of a request count as no tokens."""
TOKENIZE_SECONDS = 2.0
CHARACTERS_PER_TOKEN = 4
CHAT_FIELDS = (
    "messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message", "chat_template",
    "chat_template_kwargs", "documents", "reasoning_effort", "add_special_tokens", "model", "cache",
)  # fmt: skip


class Roots(NamedTuple):
    """The roots (hashes before the first block) of a request on a set of workers. `private` is the root for the tenant,
    and `public` the root for public prefixes, or None if the workers support none. `adapter` is the version of the
    request's LoRA adapter on these workers."""

    private: bytes
    public: bytes | None = None
    adapter: AdapterOffer | None = None
    block_tokens: int = HASH_TOKENS


@dataclass(slots=True)
class PromptKeys:
    """A prompt in the router. If its tokens are unknown, `text` has hashes of the pieces of its text."""

    tokens: bytes | None
    """Token ids of the prompt as bytes, or None if they are unknown."""
    text: list[int]
    length: int
    """Number of tokens. The number is an estimate if only the text is known."""
    public_tokens: int = 0
    """Number of tokens that the request marked as a public prefix."""

    def hashes(self, roots: Roots) -> list[int]:
        """Return the block hashes of the prompt on workers with these roots. Return an empty list if the tokens of the
        prompt are unknown. Takes about 0.2 µs per block.

        With an activated LoRA, the hashes before the invocation tokens are those of the base model. Hashes of a public
        prefix do not depend on the tenant.
        """
        if self.tokens is None:
            return []
        adapter, marks = roots.adapter, []
        is_activated = adapter is not None and bool(adapter.invocation_tokens)
        if not is_activated and not self.public_tokens:
            return wire_hashes(hash_chain(roots.private, self.tokens))
        ids, root = np.frombuffer(self.tokens, "<i4").copy(), roots.private
        if adapter is not None and is_activated:
            mark = activation_mark(ids, adapter.invocation_tokens, adapter.digest)
            marks += [] if mark is None else [mark]
        public = public_length(self.public_tokens, len(ids), roots.block_tokens, marks)
        if public and roots.public is not None:
            root = roots.public
            marks.append(private_mark(public, int(ids[public]), roots.private))
        for number, mark in enumerate(marks):
            ids[mark.start] = -1 - number
        return wire_hashes(hash_chain(root, ids.tobytes(), lambda id_: marks[-1 - id_].digest))


class PromptReader:
    """Reads the prompts of requests.

    - `tokenizer` is a folder with a tokenizer.json, with which texts are tokenised. If it is None, a worker tokenises
      texts. A worker always tokenises chats.
    - If `uses_workers` is False, prompts that a worker would tokenise are hashed as pieces of text instead.
    - An image counts as `image_tokens` tokens.
    """

    def __init__(
        self,
        fleet: Fleet,
        tokenizer: str | None = None,
        uses_workers: bool = True,
        image_tokens: int = 512,
    ) -> None:
        self._fleet, self._uses_workers, self._image_tokens = fleet, uses_workers, image_tokens
        self._cached: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._cached_bytes = 0
        self._tokenizer: TextTokenizer | None = None
        if tokenizer is not None:
            from tokenizers import Tokenizer

            path = Path(tokenizer) / "tokenizer.json"
            if not path.is_file():
                raise ValueError(f"--tokenizer {tokenizer}: there is no tokenizer.json in this folder")
            self._tokenizer = TextTokenizer(Tokenizer.from_file(str(path)))
        self.fallbacks = 0
        """Number of prompts that could not be tokenised."""

    async def read(self, body: dict[str, Any], headers: dict[str, str], tenant: str = "") -> PromptKeys:
        """Return the prompt of a request. Does not raise: for an invalid prompt, it returns keys without tokens, and
        the worker refuses the request. Requests of different tenants, or with different values of `cache_salt`, have
        different keys.
        """
        root = root_hash("text", tenant, "", salt_of(body))
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
            prompt = prompt[0]  # all prompts of a request go to one worker, and the first prompt decides
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            try:
                tokens = token_bytes(prompt)
            except (ValueError, OverflowError, TypeError):
                return PromptKeys(None, [], len(prompt))
            return PromptKeys(tokens, [], len(prompt), _public_tokens(body))
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            if len(prompt) > LONGEST_TEXT:
                return self._by_text(root, prompt.encode(errors="replace"))
            if self._tokenizer is not None:
                special, tokenise = body.get("add_special_tokens") is not False, self._tokenizer.tokens
                if len(prompt) > LONG_TEXT:
                    tokens = await asyncio.to_thread(tokenise, prompt, special, tenant)
                else:
                    tokens = tokenise(prompt, special, tenant)
                return PromptKeys(tokens, [], len(tokens) // TOKEN_BYTES, _public_tokens(body))
            asked: dict[str, Any] = {"prompt": prompt, "model": body.get("model")}
            asked |= {name: body[name] for name in ("add_special_tokens", "cache") if name in body}
            return await self._by_worker(asked, root, prompt.encode(errors="replace"), headers)
        if isinstance(body.get("messages"), list) and not _has_media(body["messages"]):
            asked = {name: body[name] for name in CHAT_FIELDS if name in body}
            return await self._by_worker(asked, root, msgspec.json.encode(body["messages"]), headers)
        fields = ("instructions", "system", "input", "messages")
        rest = {name: self._without_images(body[name]) for name in fields if name in body}
        return self._by_text(root, msgspec.json.encode(rest))

    def _without_images(self, messages: Any) -> Any:
        """Return messages in which a text replaces each image. The text depends on the content of the image, and is
        about as long as the text of `image_tokens` tokens."""
        if not isinstance(messages, list):
            return messages
        found, images = [], 0
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                parts = []
                for part in content:
                    if _is_image(part):
                        images += 1
                        tokens = self._image_tokens if images <= MAX_IMAGES else 0
                        parts.append(_digest(part, tokens * CHARACTERS_PER_TOKEN))
                    else:
                        parts.append(part)
                found.append({**message, "content": parts})
            else:
                found.append(message)
        return found

    async def _by_worker(
        self, asked: dict[str, Any], root: bytes, text: bytes, headers: dict[str, str]
    ) -> PromptKeys:
        request = msgspec.json.encode(asked)
        own = "\n".join(headers.get(name, "") for name in ("authorization", "x-api-key"))
        key = blake2b(
            request + root + own.encode(), digest_size=16
        ).digest()  # the root depends on the tenant
        found = self._cached.get(key)
        if found is None and self._uses_workers and len(request) <= LONGEST_TEXT:
            found = await self._tokenize(request, asked.get("model"), headers)
        if found is None:
            return self._by_text(root, text)
        tokens, public = found
        self._cached_bytes += CACHED_ENTRY + len(tokens) if key not in self._cached else 0
        self._cached[key] = found
        self._cached.move_to_end(key)
        while self._cached_bytes > CACHED_BYTES:
            self._cached_bytes -= CACHED_ENTRY + len(self._cached.popitem(last=False)[1][0])
        return PromptKeys(tokens, [], len(tokens) // TOKEN_BYTES, public)

    async def _tokenize(
        self, request: bytes, model: Any, headers: dict[str, str]
    ) -> tuple[bytes, int] | None:
        """Let the worker with the fewest requests tokenise a prompt. Return the tokens, and how many of them are a
        public prefix. Return None if the worker does not answer in time."""
        able = [
            w
            for w in self._fleet.workers.values()
            if w.answers and w.url and (model is None or model in w.models or w.has_adapter(model))
        ]
        if not able:
            return None
        worker: Worker = min(able, key=lambda w: len(w.streams))
        try:
            async with self._fleet.session.post(
                f"{worker.url}/tokenize",
                data=request,
                headers={**headers, "content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=TOKENIZE_SECONDS),
            ) as answer:
                if answer.status != 200:
                    return None
                found = msgspec.json.decode(await answer.read())
                return token_bytes(found["tokens"]), int(found.get("public_tokens") or 0)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
            return None

    def _by_text(self, root: bytes, text: bytes) -> PromptKeys:
        """Return the keys of a prompt whose tokens are unknown: a chain of hashes of 64-byte pieces of the text. `root`
        is the parent of the first hash."""
        self.fallbacks += 1
        return PromptKeys(
            None, wire_hashes(hash_chain(root, text[:TEXT_BYTES])), len(text) // CHARACTERS_PER_TOKEN + 1
        )


def salt_of(body: dict[str, Any]) -> str:
    """Return the field `cache_salt` of a request, or "" if the field is missing or is not a text."""
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) else ""


def _public_tokens(body: dict[str, Any]) -> int:
    """Return the field `cache.public_tokens` of a request, or 0 if it is missing or invalid."""
    cache = body.get("cache")
    found = cache.get("public_tokens") if isinstance(cache, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def _is_image(part: Any) -> bool:
    """Whether a part of a message is an image or an audio clip. The type of such parts has different names in chats, in
    the Responses API and in the Messages API."""
    types = ("image_url", "input_image", "image", "input_audio", "audio_url")
    return isinstance(part, dict) and part.get("type") in types


def _digest(part: Any, size: int) -> str:
    """Return a text of `size` characters that depends on the content of `part`, a part of a message. O(bytes of
    the part)."""
    digest = blake2b(msgspec.json.encode(part), digest_size=32).hexdigest()
    return (digest * (size // len(digest) + 1))[:size]


def _has_media(messages: list[Any]) -> bool:
    return any(
        isinstance(message, dict)
        and isinstance(message.get("content"), list)
        and any(
            isinstance(part, dict) and part.get("type") not in (None, "text") for part in message["content"]
        )
        for message in messages
    )


def roots_of(
    fleet: Fleet,
    model: str,
    names: list[str],
    tenant: str,
    salt: str,
    lossy: bool,
    adapter: str | None = None,
) -> dict[Roots, list[str]]:
    """Group the workers `names` by the roots that a request has on them. Return a dictionary: roots → names of workers.
    Usually all workers have the same roots.
    """
    found: dict[Roots, list[str]] = {}
    for name in names:
        offer: Offer = fleet.workers[name].models[model]
        root = Fleet.root(model, offer, tenant, salt, lossy, adapter)
        version = None if adapter is None else offer.adapters.get(adapter)
        public = Fleet.public_root(offer, lossy, adapter)
        found.setdefault(Roots(root, public, version, offer.block_tokens), []).append(name)
    return found
