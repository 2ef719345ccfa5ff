"""The plan's arithmetic: published facts to the byte, and what must hold for any load."""

import io

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from kvloom.arguments import parse_size
from kvloom.models.specs import ModelError, known_models, load_config, load_spec, with_draft, with_head
from kvloom.plan import Load, Plan, PlanError, format_bytes, make_plan, render

GIB = 2**30


def plan(model: str, context: int, image_tokens: int = 0, **options: int | None) -> Plan:
    names = ("concurrency", "max_context")
    load = Load(context, image_tokens, **{k: options.pop(k) for k in names if k in options})  # type: ignore[arg-type]
    return make_plan(load_spec(model), load, **options)  # type: ignore[arg-type]


def test_llama_3_70b_needs_327680_bytes_a_token() -> None:
    assert plan("llama-3-70b", 1).to_dict()["bytes_per_token"] == 327_680


@pytest.mark.parametrize("model", ["gemma-2-2b", "gemma-2-9b", "gemma-2-27b"])
def test_uniform_paging_wastes_a_quarter_on_gemma_2(model: str) -> None:
    assert plan(model, 8192).schemes["uniform"].waste == 0.25


def test_uniform_paging_wastes_over_half_on_ministral() -> None:
    assert plan("ministral-8b", 131_072).schemes["uniform"].waste == 0.5625


def test_uniform_paging_wastes_four_fifths_on_llama_vision() -> None:
    assert round(plan("llama-3.2-11b-vision", 43, 6193).schemes["uniform"].waste, 3) == 0.796


def test_bytes_of_a_plain_model_by_hand() -> None:
    got = plan("llama-3-8b", 1000, concurrency=3, gpu_memory=10 * GIB)
    token = 131_072
    assert got.needed_bytes == 3 * 1000 * token
    assert got.schemes["contiguous"].bytes == 3 * 8192 * token
    assert got.schemes["contiguous"].max_requests == 10 * GIB // (8192 * token) == 10
    assert got.schemes["uniform"].bytes == 3 * 1008 * token
    assert got.schemes["kvloom"].bytes == 3 * 1008 * token
    assert got.schemes["kvloom"].max_requests == 10 * GIB // (1008 * token) == 81
    assert got.schemes["uniform"].waste == pytest.approx(8 / 1008)


def test_images_of_a_stream_model_count_as_tokens_of_every_layer() -> None:
    assert plan("qwen2.5-vl-7b", 100, 1500).needed_bytes == plan("qwen2.5-vl-7b", 1600).needed_bytes
    assert plan("gemma-3-12b", 2000, 256).needed_bytes == plan("gemma-3-12b", 2256).needed_bytes


def test_images_of_a_cross_model_use_cross_layers_only() -> None:
    layer_token = 4096
    got = plan("llama-3.2-11b-vision", 43, 6193)
    assert got.needed_bytes == (32 * 43 + 8 * 6193) * layer_token
    assert got.schemes["contiguous"].bytes == (32 * 131_072 + 8 * 6193) * layer_token
    assert got.schemes["uniform"].bytes == 40 * 6240 * layer_token


def test_states_are_counted_once() -> None:
    short, long = plan("mamba2-2.7b", 16), plan("mamba2-2.7b", 100_000)
    assert short.needed_bytes == long.needed_bytes == long.schemes["kvloom"].bytes
    assert long.to_dict()["bytes_per_token"] == 0
    assert long.to_dict()["kv_dtype"] is None


def test_max_context_sizes_contiguous_buffers() -> None:
    small = plan("llama-3.1-8b", 1000, max_context=2048).schemes["contiguous"].bytes
    assert small == 2048 * 131_072


def test_a_context_beyond_the_limit_is_noted() -> None:
    got = plan("llama-3-8b", 10_000)
    assert got.max_context == 10_000
    assert "10,000 tokens are more than the model's limit of 8,192" in got.notes[0]


def test_a_draft_shares_the_pool() -> None:
    both = with_draft(load_spec("llama-3.1-70b"), load_spec("llama-3.2-1b"))
    got = make_plan(both, Load(4096))
    assert got.to_dict()["bytes_per_token"] == 327_680 + 32_768
    assert [row["group"] for row in got.to_dict()["groups"]] == ["full #0", "draft full #1"]


def test_a_head_shares_the_pool() -> None:
    both = with_head(load_spec("deepseek-v3"), load_config("deepseek-v3"), "mtp")
    got = make_plan(both, Load(4096)).to_dict()
    assert got["bytes_per_token"] == 61 * 576 * 2 + 576 * 2 + 7168 * 2
    assert [row["group"] for row in got["groups"]] == ["full #0", "draft full #1"]


def test_heads_that_do_not_exist_are_refused() -> None:
    spec, config = load_spec("llama-3.1-8b"), load_config("llama-3.1-8b")
    for head, words in (("medusa", "use mtp or eagle=FOLDER"), ("eagle=/no/folder", "there is no file")):
        with pytest.raises(ModelError, match=words):
            with_head(spec, config, head)
    with pytest.raises(ModelError, match="num_nextn_predict_layers is 0"):
        with_head(spec, {**config, "num_nextn_predict_layers": 0}, "mtp")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 0}, "context is 0"),
        ({"context": -7}, "context is -7"),
        ({"context": 10, "image_tokens": -1}, "image tokens is -1"),
        ({"context": 10, "concurrency": 0}, "concurrency is 0"),
        ({"context": 10, "image_tokens": 5}, "llama-3-8b takes no images, but 5"),
        ({"context": 100, "max_context": 99}, "max context 99 is shorter than the request's 100"),
        ({"context": 10, "block_tokens": 24}, "block_tokens 24.*multiple of 16"),
    ],
)
def test_invalid_loads_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan("llama-3-8b", **options)


@given(
    st.sampled_from(known_models()),
    st.integers(1, 300_000),
    st.integers(0, 10_000),
    st.integers(1, 64),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(1, 200 * GIB),
)
def test_any_load_is_bounded(
    model: str, context: int, images: int, concurrency: int, block: int, memory: int
) -> None:
    spec = load_spec(model)
    images = images if spec.media else 0
    got = make_plan(spec, Load(context, images, concurrency), block, memory)
    for scheme in got.schemes.values():
        assert got.needed_bytes <= scheme.bytes
        assert 0 <= scheme.waste < 1
        assert scheme.max_requests is not None
        assert scheme.max_requests * scheme.bytes <= memory * concurrency
    assert got.schemes["kvloom"].bytes <= 1.06 * got.schemes["uniform"].bytes + _slack(got)


def _slack(got: Plan) -> int:
    """A window may begin anywhere in its first block: one block more a group than whole blocks hold."""
    return got.load.concurrency * sum(g.runs * got.layout.slab_bytes for g in got.layout.groups)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * GIB),
        ("80G", 80 * GIB),
        ("80gb", 80 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("512MiB", 2**29),
        ("4k", 4096),
        ("1000", 1000),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "80 gigs", "-4GiB", "GiB", "1e9", "0", "0.0GiB", "4iB", "9" * 400, "NaN"]
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_sizes_are_formatted() -> None:
    assert [format_bytes(n) for n in (0, 1023, 327_680, 80 * GIB, 5 * 2**50)] == [
        "0 B",
        "1023 B",
        "320 KiB",
        "80 GiB",
        "5,120 TiB",
    ]


@pytest.mark.parametrize(("encoding", "width"), [("utf-8", 110), ("utf-8", 80), ("ascii", 110)])
@pytest.mark.parametrize("model", known_models())
def test_every_model_renders_whole_and_without_colours(model: str, encoding: str, width: int) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding, errors="replace"), width=width)
    render(make_plan(load_spec(model), Load(4096, concurrency=8), gpu_memory=80 * GIB), console)
    console.file.flush()
    text = raw.getvalue().decode(encoding)
    assert model in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("contiguous", "uniform", "kvloom", "80 GiB"):
        assert word in text
    if encoding == "ascii":
        assert "?" not in text
