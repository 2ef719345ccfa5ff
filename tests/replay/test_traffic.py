from __future__ import annotations

import numpy as np
import pytest

from kvloom.replay.traffic import Traffic, number_blocks

from .samples import traffic


def test_blocks_are_numbered_from_zero_whatever_their_ids() -> None:
    rows, distinct = number_blocks([[7, 2**64 - 1], [7, 3], []])
    assert distinct == 3
    assert rows[0][0] == rows[1][0]
    assert sorted({*rows[0].tolist(), *rows[1].tolist()}) == [0, 1, 2]
    assert [row.dtype for row in rows] == [np.int32] * 3


def test_the_same_id_after_another_block_is_another_block() -> None:
    rows, distinct = number_blocks([[1, 5, 9], [2, 5, 9], [1, 5]])
    assert distinct == 6
    assert rows[0].tolist()[:2] == rows[2].tolist()
    assert not set(rows[0].tolist()) & set(rows[1].tolist())


def test_repeated_ids_in_a_request_are_distinct_blocks() -> None:
    rows, distinct = number_blocks([[4, 4, 4], [4, 4]])
    assert distinct == 3
    assert rows[0].tolist()[:2] == rows[1].tolist()


@pytest.mark.parametrize("row", [[-1], [1.5], ["a"], [[1]], [2**64], [True], None, 3])
def test_invalid_ids_are_refused(row: object) -> None:
    with pytest.raises(ValueError, match="block ids must be whole numbers"):
        number_blocks([[1, 2], row])  # type: ignore[list-item]


def test_traffic_of_several_origins_shares_no_blocks_and_is_in_order_of_time() -> None:
    both = Traffic.merged([traffic([1, 2], [1, 3], every=2.0), traffic([1, 2], [1, 2], every=1.0)])
    assert [r.at for r in both.requests] == [0.0, 0.0, 1.0, 2.0]
    assert both.distinct == 5
    assert both.asked == 8


def test_blocks_of_different_sizes_cannot_be_mixed() -> None:
    with pytest.raises(ValueError, match="different block sizes"):
        Traffic.merged([traffic([1]), traffic([1], block_tokens=64)])
    with pytest.raises(ValueError, match="at least one"):
        Traffic.merged([])
