"""Slots of the host tier by last use, compared with an ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from kvloom.tiers.host import slots as module
from kvloom.tiers.host.slots import LruOrder, Slots


@pytest.mark.parametrize("seed", range(4))
def test_slots_are_ordered_by_last_use(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STALE_LIMIT", 8)  # stale uses are removed often
    rng = np.random.default_rng(seed)
    slots = Slots()
    recent, model = LruOrder(slots), OrderedDict[int, None]()
    for tick in range(400):
        some = rng.permutation(40)[: rng.integers(0, 12)]
        recent.touch(some.astype(np.int64), tick)
        for slot in some.tolist():
            model[slot] = None
            model.move_to_end(slot)
        for slot in rng.permutation(list(model))[: rng.integers(0, 6)].tolist():
            slots.tick[slot] = -1
            del model[slot]
        most = int(rng.integers(1, 50))
        assert recent.oldest(most).tolist() == list(model)[:most]
        assert recent.least_recent() == next(iter(model), None)
        assert len(recent._batches) <= recent._queued, "no batch is empty"
        assert recent._queued <= 2 * 40 + 8 + 12, "stale uses are removed"


def test_slots_grow_and_are_allocated_once() -> None:
    slots, mine = Slots(), list[int]()
    for first in range(0, 5000, 100):
        taken = slots.allocate(list(range(first, first + 100)), 7)
        assert slots.offset[taken].tolist() == list(range(first, first + 100))
        mine += taken
    assert len(set(mine)) == 5000
    assert slots.offset[mine].tolist() == list(range(5000)), "growing keeps all values"
    slots.free(mine.pop())
    assert slots.allocate([1], 7)[0] not in mine
