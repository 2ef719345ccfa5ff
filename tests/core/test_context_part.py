"""Context parallelism: every token of a block is stored by one rank, and pages shrink accordingly."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.core import WHOLE, ContextPart, LayerSpec, PoolLayout, Visibility, attention_fields

TOKEN = LayerSpec("token", attention_fields(2, 8, "fp32"))
WINDOW = LayerSpec("token", attention_fields(2, 8, "fp32"), Visibility("sliding", 8))


@pytest.mark.parametrize(("count", "block"), [(1, 16), (2, 16), (4, 16), (2, 64), (16, 16)])
def test_every_token_is_stored_by_one_rank_at_its_own_place(count: int, block: int) -> None:
    positions, stored = np.arange(5 * block), []
    for rank in range(count):
        part = ContextPart(rank, count)
        size = part.page_tokens(block)
        places = part.places(positions, block)
        own = positions[places >= 0]
        assert places[places >= 0].tolist() == np.tile(np.arange(size), 5).tolist()
        assert part.positions(np.arange(5 * size), size).tolist() == own.tolist()
        stored += own.tolist()
    assert sorted(stored) == positions.tolist()


def test_a_rank_that_does_not_exist_and_an_uneven_block_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 must be from 0 to 1"):
        ContextPart(2, 2)
    with pytest.raises(ValueError, match="16 tokens cannot be divided between 3 ranks"):
        PoolLayout.build({"a": TOKEN}, part=ContextPart(0, 3))


def test_pages_of_full_attention_are_divided_and_windows_are_not() -> None:
    layers = {"a": TOKEN, "b": WINDOW}
    whole, mine = PoolLayout.build(layers), PoolLayout.build(layers, part=ContextPart(1, 4))
    sizes = [[group.layer_bytes for group in layout.groups] for layout in (whole, mine)]
    assert sizes[1] == [sizes[0][0] // 4, sizes[0][1]]
    assert [group.parts for group in mine.groups] == [4, 1]
    assert whole.part == WHOLE
    assert [group.parts for group in whole.groups] == [1, 1]
    assert mine.bytes_per_token() == TOKEN.bytes // 4 + WINDOW.bytes
