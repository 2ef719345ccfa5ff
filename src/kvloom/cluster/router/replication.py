"""Copies hot prefixes to further workers, so that no hot prefix is lost when one worker dies.

    request hits L tokens on worker A ──▶ count hits of this prefix ──▶ hot, and on fewer than `copies` workers?
      1  A:  the first L tokens, max_tokens 1, do_remote_decode     A copies the pages to its shared host memory
      2  B:  the same request, with A's kv_transfer_params          B pulls the pages through its peer tier

Requests 1 and 2 are the same as in a hand-over. They have the API key and the salt of the request that made the prefix
hot. If one of them fails, worker A still has the prefix.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from kvloom.core import HASH_TOKENS, TOKEN_BYTES

from .call import FORWARDED, Call
from .fleet import Fleet, now

__all__ = ["ReplicationOptions", "Replicator"]

log = logging.getLogger("kvloom.router")
MAX_PREFIXES = 50_000
FORGET_SECONDS = 600.0
"""A prefix is no longer hot after this many seconds without a hit."""
PAUSE_SECONDS = 30.0
"""Seconds between two copies of the same prefix."""
MAX_RUNNING = 4
CALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ReplicationOptions:
    """A prefix with at least `min_tokens` tokens and at least `hits` hits is copied until `copies` workers have it. If
    `copies` is 1, nothing is copied."""

    copies: int = 1
    hits: int = 3
    min_tokens: int = 256


@dataclass(slots=True)
class _Prefix:
    hits: int = 0
    at: float = 0.0
    copied_at: float = -PAUSE_SECONDS


class Replicator:
    """Counts hits of prefixes, and copies hot prefixes to more workers. Must be used by one event loop."""

    def __init__(self, fleet: Fleet, options: ReplicationOptions | None = None) -> None:
        self._fleet, self.options = fleet, options or ReplicationOptions()
        self._prefixes: OrderedDict[int, _Prefix] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self.copied = self.failed = 0

    def observe(
        self, call: Call, cached: int, hashes: Sequence[int], lengths: Mapping[str, Sequence[int]]
    ) -> None:
        """Count a hit of the first `cached` tokens of a call. `hashes` are the block hashes of the prompt. `lengths`
        has, for each worker, the number of its cached prompt tokens by medium. If the prefix is hot, and too few
        workers have it, start to copy it to another worker in the background. Takes microseconds.
        """
        tokens = cached // HASH_TOKENS * HASH_TOKENS
        options = self.options
        if options.copies < 2 or tokens < options.min_tokens or not hashes or call.body.get("lossy") is True:
            return
        prefix = self._count(hashes[min(len(hashes), tokens // HASH_TOKENS) - 1])
        if (
            prefix.hits < options.hits
            or now() < prefix.copied_at + PAUSE_SECONDS
            or len(self._running) >= MAX_RUNNING
        ):
            return
        pair = self._pair(call.model, tokens, lengths, call.adapter)
        if pair is None:
            return
        prefix.copied_at = now()
        task = asyncio.create_task(self._copy(call, tokens, *pair))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _count(self, hash_: int) -> _Prefix:
        prefix = self._prefixes.pop(hash_, None)
        if prefix is None or now() - prefix.at > FORGET_SECONDS:
            prefix = _Prefix()
        prefix.hits += 1
        prefix.at = now()
        self._prefixes[hash_] = prefix
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return prefix

    def _pair(
        self, model: str, tokens: int, lengths: Mapping[str, Sequence[int]], adapter: str | None = None
    ) -> tuple[str, str] | None:
        """Return two workers: a source that has the prefix and shares its pages, and a target that lacks the prefix and
        reads from the source. Return None if there are enough copies, or if there is no such pair."""
        candidates = self._fleet.candidates(model, adapter)
        have = [name for name in candidates if lengths.get(name, (0,))[-1] >= tokens]
        if len(have) >= self.options.copies:
            return None
        offers = {name: self._fleet.workers[name].models[model] for name in {*candidates, *lengths} if name in self._fleet.workers and model in self._fleet.workers[name].models}  # fmt: skip
        sources = [
            name
            for name, offer in offers.items()
            if offer.peer and lengths.get(name, (0,))[-1] >= tokens and self._fleet.workers[name].is_alive
        ]
        loads = self._fleet.models[model].scorer.loads
        pairs = [
            (loads[target].backlog(now()), loads[target].tokens, source, target)
            for source in sources
            for target in candidates
            if target not in have and target in loads and offers[source].peer in offers[target].reads
        ]
        return min(pairs)[2:] if pairs else None

    async def _copy(self, call: Call, tokens: int, source: str, target: str) -> None:
        """Copy the pages of the first `tokens` tokens of a call from the worker `source` to the worker `target`."""
        assert call.keys is not None
        assert call.keys.tokens is not None
        # Send one more token, because the last token of a prompt is never a hit.
        ids = np.frombuffer(call.keys.tokens[: (tokens + 1) * TOKEN_BYTES], "<i4").tolist()
        model = call.adapter or call.model
        body: dict[str, Any] = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body |= {name: call.body[name] for name in ("tenant", "cache_salt") if name in call.body}
        if call.keys.public_tokens:
            body["cache"] = {"public_tokens": call.keys.public_tokens}
        headers = {name: value for name, value in call.headers.items() if name in FORWARDED}
        try:
            found = await self._send(
                source, {**body, "kv_transfer_params": {"do_remote_decode": True}}, headers
            )
            await self._send(target, {**body, "kv_transfer_params": found["kv_transfer_params"]}, headers)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            self.failed += 1
            log.warning("copying %d tokens from %s to %s failed: %s", tokens, source, target, error)
            return
        self.copied += 1
        log.info("copied a hot prefix of %d tokens from %s to %s", tokens, source, target)

    async def _send(self, worker: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        url = f"{self._fleet.workers[worker].url}/v1/completions"
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with self._fleet.session.post(
            url, data=msgspec.json.encode(body), headers={**headers, "content-type": "application/json"}, timeout=timeout
        ) as answer:  # fmt: skip
            data = await answer.read()
            if answer.status != 200:
                raise ValueError(f"{worker} returned status {answer.status}")
        return dict(msgspec.json.decode(data))

    def close(self) -> None:
        """Cancel running copies."""
        for task in self._running:
            task.cancel()
