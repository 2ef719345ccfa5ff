"""The page pool of one Hugging Face model, with its prefix cache and its tiers. Does not run the model."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import count
from typing import Any

from kvloom.core import CacheControl, CheckpointPolicy, KVCache, Match, PoolLayout, Sequence, format_bytes
from kvloom.engine import Action, OffloadConfig, OffloadManager, Request, SamplingParams, open_offload
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.memory import allocate, layer_views
from kvloom.models.loading import model_fingerprint

from .model_layers import ModelLayers

__all__ = ["PageStore"]

MAX_SEQUENCES = 1024
MAX_TOKENS = 131072
_POLL_SECONDS = 0.002


class PageStore:
    """Opens sequences on cached pages, from the pool or from tiers, and reserves pages for new tokens."""

    def __init__(
        self, model: Any, layers: ModelLayers, memory: int, tiers: Many[str], block_tokens: int, policy: str
    ) -> None:
        self.layout = PoolLayout.build(layers.specs, block_tokens)
        self._bytes = memory
        slabs = self.layout.slabs_in(memory)
        if slabs < 2:
            raise ValueError(
                f"memory of {format_bytes(memory)} is too small: give at least {2 * self.layout.slab_bytes:,} bytes"
            )
        self.buffer = allocate(self.layout, slabs, model.device)
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
        self.kv = KVCache(
            self.layout,
            slabs,
            model=f"{model.config.model_type} {model_fingerprint(model)}",
            policy=policy,
            max_sequences=MAX_SEQUENCES,
            max_tokens=max(limit, MAX_TOKENS),
            checkpoint_policy=CheckpointPolicy(before_last=True),
        )
        self.views = layer_views(self.buffer, self.layout)
        self.offload: OffloadManager | None = None
        """Offloads and loads pages. None without tiers."""
        if tiers:
            config = OffloadConfig(load="always")
            self.offload = open_offload(tiers, self.kv, self.buffer, self.apply_copies, config)
        self._orders = count()

    def open(self, prompts: list[list[int]], controls: list[CacheControl]) -> list[Sequence]:
        """Open one sequence per prompt. Each sequence begins with the cached tokens of its prompt. Pages in tiers are
        loaded first, and the call waits for them. All sequences have the same length: sequences with longer hits are
        rolled back.
        """
        opened: list[Sequence] = []
        try:
            for prompt, control in zip(prompts, controls, strict=True):
                opened.append(self.kv.open(self._loaded_match(prompt, control)))
            self.equalise(opened)
        except BaseException:
            self.close_sequences(opened)
            raise
        return opened

    def _loaded_match(self, prompt: list[int], control: CacheControl) -> Match:
        """Load the missing pages of a prompt from tiers and wait for them. Then look up the prompt in the pool and
        return the match."""
        match = self.kv.match(prompt, control)
        if self.offload is None:
            return match
        request = Request(next(self._orders), tuple(prompt), SamplingParams(), control)
        try:
            while self.offload.before_admission(request, match).action is Action.WAIT:
                while self.offload.is_pending(request, has_followers=False):
                    self.offload.poll()
                    self.offload.wait(_POLL_SECONDS)
                match = self.kv.match(prompt, control)
        finally:
            self.offload.cancel(request)
        return match if match.version == self.kv.version else self.kv.match(prompt, control)

    @staticmethod
    def equalise(sequences: list[Sequence]) -> None:
        """Roll sequences back until all have the same length."""
        while len({one.length for one in sequences}) > 1:
            least = min(one.length for one in sequences)
            for one in sequences:
                one.rollback(max(0, one.length - least))

    def extend(self, sequences: list[Sequence], tokens: int) -> None:
        """Reserve pages for `tokens` more tokens of each sequence, and make pending copies. Raises MemoryError if the
        pool is too small.
        """
        for one in sequences:
            if one.extend(tokens):
                raise self.out_of_memory(sum(each.length + tokens for each in sequences))
        self.apply_copies()

    def out_of_memory(self, tokens: int) -> MemoryError:
        """Return the error for a batch of `tokens` tokens that does not fit into the pool."""
        return MemoryError(
            f"the batch needs pages for {tokens} tokens and their states, but the pool of "
            f"{format_bytes(self._bytes)} is too small: give kvloom.Cache more memory, or use a smaller batch"
        )

    def apply_copies(self) -> None:
        """Start queued offloads, then make the pending copies between pages of the pool."""
        if self.offload is not None:
            self.offload.flush()
        copies = self.kv.take_copies()
        for batch in copies:
            copy_pages(self.buffer, batch.page_stride, batch.source, batch.target)
        if self.offload is not None and copies:
            self.offload.before_step(pages_moved=True)

    def close_sequences(self, sequences: list[Sequence]) -> None:
        """Close sequences. Their pages stay cached, and tiers get copies in the background."""
        for one in sequences:
            if one.open:
                one.close()
        self.apply_copies()
        if self.offload is not None:
            self.offload.flush()
            self.offload.poll()

    def close(self) -> None:
        """Store queued pages in the tiers, and close the tiers."""
        if self.offload is not None:
            self.apply_copies()
            self.offload.close()
            self.kv.loading.remove_listener()
            self.offload = None
