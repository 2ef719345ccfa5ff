"""What leaves the pool is copied down, and which copies need not wait for the step in flight."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvloom.core import Field, KVCache, LayerSpec, PoolLayout, Span
from kvloom.core.clock import VirtualClock
from kvloom.engine.arena import HostPages, form_of, open_host
from kvloom.engine.keeping import Keeping
from kvloom.tiers.mover import Mover

SLABS = 64


class Copies(HostPages):
    """Notes which copies wait for the last mark alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.old: dict[int, bool] = {}

    def down(self, stride: int, pages: Any, offsets: Any, old: bool = False) -> Any:
        self.old.update(dict.fromkeys(np.asarray(pages).tolist(), old))
        return super().down(stride, pages, offsets, old)


def test_only_what_was_published_before_the_step_in_flight_is_copied_beside_it() -> None:
    layout = PoolLayout.build({"a": LayerSpec("token", (Field("k", (2, 16), "fp32"),), Span("full"))})
    clock = VirtualClock()
    cache = KVCache(layout, SLABS, max_sequences=4, max_tokens=512, clock=clock)
    buffer = torch.zeros(SLABS * layout.slab_bytes, dtype=torch.uint8)
    host, _ = open_host(layout, SLABS * layout.slab_bytes, False, buffer.device)
    pages, mover = Copies(layout, buffer, host), Mover(host, ())
    forms = {group.index: [form_of(group, 0)] for group in layout.groups}
    keeping = Keeping(cache, pages, mover, forms, forms, {"back"})

    def served(first: int, tokens: int, ends: int | None = None) -> set[int]:
        """Publish a prompt of so many tokens, part of it before and part of it after a step was launched."""
        clock.advance(1)
        prompt = np.arange(first, first + tokens, dtype=np.int32)
        sequence = cache.open(cache.match(prompt))
        cache.extend(sequence, tokens)
        found = set(cache.table(0)[0, sequence.row, : tokens // layout.block_tokens].tolist())
        if ends is not None:
            cache.commit(sequence, prompt[:ends])
            clock.advance(1)
            keeping.launching()
            clock.advance(1)
        cache.commit(sequence, prompt[0 if ends is None else ends :])
        cache.close(sequence)
        return found

    before = served(1000, 64)
    running = served(2000, 96, ends=48)  # the launch is in the midst of it
    after = served(3000, 32)
    cache.shrink(SLABS - 1)
    keeping.take()
    assert before | running | after <= pages.old.keys()
    assert all(pages.old[page] for page in before)
    assert not any(pages.old[page] for page in running | after)
    mover.close()
    pages.close()
