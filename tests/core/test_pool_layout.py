"""Layouts: the facts of real models, and what must hold for any set of layers."""

import pytest
from hypothesis import given, strategies as st

from kvloom.core.layout.layer_spec import Field, LayerSpec, Visibility, attention_fields
from kvloom.core.layout.pool_layout import HASH_TOKENS, MAX_WASTE, PoolLayout
from kvloom.models.specs import known_models, load_spec, with_draft


def layers(**counts: tuple[int, LayerSpec]) -> dict[str, LayerSpec]:
    return {f"{name}.{i}": spec for name, (count, spec) in counts.items() for i in range(count)}


def state(size: int) -> LayerSpec:
    return LayerSpec("state", (Field("recurrent", (size,), "int8"),))


def shipped(name: str, block_tokens: int = 16) -> PoolLayout:
    return PoolLayout.build(load_spec(name).layers, block_tokens)


def test_gemma_3_slides_in_five_runs_of_eight() -> None:
    layout = shipped("gemma-3-12b")
    sliding, full = layout.groups
    assert (len(sliding.layers), sliding.runs, sliding.run_layers) == (40, 5, 8)
    assert (len(full.layers), full.runs, full.run_layers) == (8, 1, 8)
    assert sliding.page_bytes == full.page_bytes == layout.slab_bytes
    assert sliding.pages_per_slab == full.pages_per_slab == 1


def test_256_and_384_bytes_meet_at_768() -> None:
    layout = PoolLayout.build(layers(a=(1, state(256)), b=(1, state(384))))
    assert layout.slab_bytes == 768
    assert [g.pages_per_slab for g in layout.groups] == [3, 2]
    assert [layout.waste(g) for g in layout.groups] == [0, 0]


def test_a_large_state_is_one_page_a_layer() -> None:
    group = shipped("nemotron-h-8b").of("state")[0]
    assert (len(group.layers), group.runs, group.run_layers) == (24, 24, 1)


def test_a_uniform_model_has_one_page_a_block() -> None:
    layout = shipped("llama-3-8b")
    (group,) = layout.groups
    assert (group.runs, group.pages_per_slab, layout.slab_bytes) == (1, 1, 16 * 131_072)


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("name", known_models())
def test_padding_stays_within_its_bound(name: str, block_tokens: int) -> None:
    check(shipped(name, block_tokens))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "fp32"])
@pytest.mark.parametrize("name", known_models())
def test_padding_stays_within_its_bound_for_other_dtypes(name: str, kv_dtype: str) -> None:
    check(PoolLayout.build(load_spec(name, kv_dtype).layers))


@pytest.mark.parametrize("target", ["llama-3-70b", "gemma-3-27b", "qwen3-next-80b", "deepseek-v3"])
def test_padding_stays_within_its_bound_beside_a_draft(target: str) -> None:
    check(PoolLayout.build(with_draft(load_spec(target), load_spec("llama-3.2-1b")).layers))


@pytest.mark.parametrize("name", ["gemma-3-12b", "nemotron-h-8b", "deepseek-v3"])
def test_a_slab_of_mapping_granularity(name: str) -> None:
    granularity = 2 * 2**20
    layout = PoolLayout.build(load_spec(name).layers, granularity=granularity)
    assert layout.slab_bytes % granularity == 0
    check(layout)


def check(layout: PoolLayout) -> None:
    """Check the invariants of every layout."""
    for group in layout.groups:
        assert 0 <= layout.waste(group) <= MAX_WASTE
        assert group.page_bytes <= group.page_stride
        assert group.pages_per_slab * group.page_stride == layout.slab_bytes
        assert group.page_stride % 16 == 0
        assert group.run_layers * group.runs >= len(group.layers)
        places = [group.locate(layer) for layer in group.layers]
        assert len(set(places)) == len(places)
        assert all(run < group.runs and place < group.run_layers for run, place in places)
    for numbering in ("token", "state", "media"):
        columns = [c for g in layout.of(numbering) for c in range(g.columns.start, g.columns.stop)]
        assert columns == list(range(layout.width(numbering)))


SPECS = st.one_of(
    st.builds(
        lambda heads, dim, dtype, span: LayerSpec("token", attention_fields(heads, dim, dtype), span),
        st.integers(1, 16),
        st.sampled_from([40, 64, 80, 128, 256]),
        st.sampled_from(["bf16", "int8", "fp32"]),
        st.sampled_from([Visibility("full"), Visibility("sliding", 1024), Visibility("chunked", 8192)]),
    ),
    st.integers(1, 2**22).map(state),
    st.integers(1, 8).map(
        lambda heads: LayerSpec("token", attention_fields(heads, 64, "bf16"), axis="media")
    ),
)


@given(
    st.lists(st.tuples(st.integers(1, 64), SPECS), min_size=1, max_size=3), st.sampled_from([16, 32, 64, 128])
)
def test_any_layers_make_a_layout(groups: list[tuple[int, LayerSpec]], block_tokens: int) -> None:
    specs = layers(**{f"g{i}": group for i, group in enumerate(groups)})
    layout = PoolLayout.build(specs, block_tokens)
    check(layout)
    assert sorted(name for group in layout.groups for name in group.layers) == sorted(specs)
    assert layout == PoolLayout.build(specs, block_tokens)


@given(st.sampled_from(known_models()), st.integers(0, 100_000), st.integers(0, 7000))
def test_a_sequence_occupies_what_it_needs_and_little_more(name: str, length: int, media: int) -> None:
    layout = shipped(name)
    needed = sum(
        group.unit_bytes
        * {"state": 1, "media": media, "token": group.spec.visibility.visible_tokens(length)}[
            "media" if group.spec.axis == "media" else group.spec.unit
        ]
        for group in layout.groups
    )
    # At most one block too many at either end of a group, and the padding.
    slack = sum(2 * g.runs * layout.slab_bytes / g.pages_per_slab for g in layout.groups)
    assert needed <= layout.slab_bytes_for(length, [media]) <= needed / (1 - MAX_WASTE) + slack


def test_occupied_bytes_by_hand() -> None:
    layout = shipped("gemma-3-12b")
    page = layout.slab_bytes
    assert layout.slab_bytes_for(0) == 0
    assert layout.slab_bytes_for(1) == 6 * page
    assert layout.slab_bytes_for(16) == 6 * page
    assert layout.slab_bytes_for(17) == 12 * page
    assert layout.slab_bytes_for(1024) == 6 * 64 * page
    # Token 1040 sees from 17 on: blocks 1 to 65 of the sliding layers, all 66 of the full ones.
    assert layout.slab_bytes_for(1041) == (5 * 65 + 66) * page


def test_media_runs_are_rounded_one_by_one() -> None:
    layout = shipped("llama-3.2-11b-vision")
    page = layout.slab_bytes
    assert layout.slab_bytes_for(0, [1, 1]) == 2 * page
    assert layout.slab_bytes_for(0, [32]) == 2 * page
    assert layout.slab_bytes_for(1, []) == 4 * page


def test_the_table_has_a_row_a_group() -> None:
    rows = shipped("falcon-h1-7b").table()
    assert [row["kind"] for row in rows] == ["full", "state"]
    assert [row["layers"] for row in rows] == [44, 44]


@pytest.mark.parametrize("block_tokens", [0, -16, 8, 24])
def test_blocks_are_multiples_of_the_grain(block_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"block_tokens {block_tokens} is not a positive multiple of {HASH_TOKENS}"
    ):
        shipped("llama-3-8b", block_tokens)


@pytest.mark.parametrize("granularity", [0, -16, 24])
def test_the_granularity_is_aligned(granularity: int) -> None:
    with pytest.raises(ValueError, match=f"granularity {granularity}"):
        PoolLayout.build(load_spec("llama-3-8b").layers, granularity=granularity)


def test_a_layout_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        PoolLayout.build({})


def test_an_unknown_layer_is_refused_with_its_name() -> None:
    with pytest.raises(KeyError, match=r"layers\.99"):
        shipped("llama-3-8b").groups[0].locate("layers.99")
