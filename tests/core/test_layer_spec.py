"""Fields, visibility and layer specs: sizes, and the rule of what a query sees."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloom.core import DTYPE_BYTES, Field, LayerSpec, Visibility, attention_fields

SPANS = st.one_of(
    st.just(Visibility("full")),
    st.integers(1, 5000).map(lambda size: Visibility("sliding", size)),
    st.integers(1, 5000).map(lambda size: Visibility("chunked", size)),
)
POSITIONS = st.integers(0, 100_000)


def visible(span: Visibility, position: int) -> set[int]:
    """Return the tokens that a query sees, by a plain loop."""
    before = range(position + 1)
    if span.kind == "sliding":
        return {p for p in before if position - p < span.size}
    if span.kind == "chunked":
        return {p for p in before if p // span.size == position // span.size}
    return set(before)


@given(SPANS, st.integers(0, 300))
def test_first_visible_is_the_first_of_an_unbroken_run(span: Visibility, position: int) -> None:
    assert visible(span, position) == set(range(span.first_visible(position), position + 1))


@given(SPANS, POSITIONS)
def test_a_query_sees_itself_and_nothing_later(span: Visibility, position: int) -> None:
    assert 0 <= span.first_visible(position) <= position


@given(SPANS, POSITIONS, POSITIONS)
def test_first_visible_never_falls(span: Visibility, a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert span.first_visible(low) <= span.first_visible(high)


@given(SPANS, st.integers(0, 300))
def test_visible_tokens_counts_what_the_last_query_sees(span: Visibility, length: int) -> None:
    assert span.visible_tokens(length) == (len(visible(span, length - 1)) if length else 0)


@given(SPANS, POSITIONS)
def test_a_window_bounds_the_pages_in_use(span: Visibility, length: int) -> None:
    assert span.visible_tokens(length) <= (min(length, span.size) if span.windowed else length)


@pytest.mark.parametrize(
    ("span", "position", "first"),
    [
        (Visibility("full"), 9999, 0),
        (Visibility("sliding", 4), 3, 0),
        (Visibility("sliding", 4), 4, 1),
        (Visibility("sliding", 1), 7, 7),
        (Visibility("chunked", 4), 3, 0),
        (Visibility("chunked", 4), 4, 4),
        (Visibility("chunked", 4), 7, 4),
    ],
)
def test_first_visible_by_hand(span: Visibility, position: int, first: int) -> None:
    assert span.first_visible(position) == first


def test_visibilities_print_their_kind() -> None:
    assert [str(s) for s in (Visibility("full"), Visibility("sliding", 8), Visibility("chunked", 4))] == [
        "full",
        "sliding 8",
        "chunked 4",
    ]


@given(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(1, 64), min_size=1, max_size=4))
def test_a_field_is_as_large_as_its_elements(dtype: str, shape: list[int]) -> None:
    size = DTYPE_BYTES[dtype]
    for side in shape:
        size *= side
    assert Field("x", tuple(shape), dtype).bytes == size


def test_quantised_attention_carries_its_scales() -> None:
    assert sum(f.bytes for f in attention_fields(8, 128, "bf16")) == 2 * 8 * 128 * 2
    assert sum(f.bytes for f in attention_fields(8, 128, "int8")) == 2 * 8 * (128 + 4)
    assert [f.name for f in attention_fields(8, 128, "fp8")] == ["k", "v", "k_scale", "v_scale"]
    assert [f.name for f in attention_fields(8, 128, "fp8", scales=False)] == ["k", "v"]
    assert all(f.shard_axis == 0 for f in attention_fields(8, 128, "int8"))


def test_kinds_for_people() -> None:
    kv, state = attention_fields(2, 8, "bf16"), (Field("recurrent", (4, 4), "fp32"),)
    assert LayerSpec("token", kv).kind == "full"
    assert LayerSpec("token", kv, Visibility("sliding", 8)).kind == "sliding"
    assert LayerSpec("token", kv, axis="media").kind == "cross"
    assert LayerSpec("state", state).kind == "state"
    assert LayerSpec("state", state).bytes == 64


KV = attention_fields(2, 8, "bf16")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Field("k", (8,), "fp7"), "unknown dtype 'fp7'"),
        (lambda: Field("k", (), "bf16"), "positive sizes"),
        (lambda: Field("k", (8, 0), "bf16"), r"\(8, 0\)"),
        (lambda: Field("k", (8, -2), "bf16"), r"\(8, -2\)"),
        (lambda: Field("k", (8,), "bf16", shard_axis=1), "shard_axis 1"),
        (lambda: Field("k", (8,), "bf16", shard_axis=-1), "shard_axis -1"),
        (lambda: Visibility("wavy"), "'wavy'"),  # type: ignore[arg-type]
        (lambda: Visibility("full", 8), "size 8"),
        (lambda: Visibility("sliding"), "size 0"),
        (lambda: Visibility("chunked", -4), "size -4"),
        (lambda: LayerSpec("page", KV), "'page'"),  # type: ignore[arg-type]
        (lambda: LayerSpec("token", ()), "at least one field"),
        (lambda: LayerSpec("token", (*KV, KV[0])), "repeat"),
        (lambda: LayerSpec("token", KV, axis="sound"), "'sound'"),  # type: ignore[arg-type]
        (lambda: LayerSpec("state", KV, Visibility("sliding", 8)), "sliding 8"),
        (lambda: LayerSpec("token", KV, Visibility("chunked", 8), axis="media"), "chunked 8"),
    ],
)
def test_invalid_bounds_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
