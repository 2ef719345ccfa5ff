"""Memory formats: round trips are exact, and every value has the position of the format."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvloom.core import DTYPE_BYTES, LayerSpec, Order, PoolLayout, attention_fields
from kvloom.tiers.encoding import (
    Format,
    PageFields,
    PageShape,
    from_format,
    join_units,
    split_units,
    to_format,
)

SIZES = [(1, 1, 1, 1), (3, 5, 7, 11), (2, 16, 8, 64), (5, 1, 3, 2), (1, 17, 1, 9)]
FORMATS: list[Format] = ["2LTD", "T2D", "2TD", "NHD", "HND"]


def random_page(shape: PageShape) -> np.ndarray:
    return np.random.default_rng(shape.page_bytes).integers(0, 256, shape.page_bytes, dtype=np.uint8)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_a_round_trip_is_exact_at_every_size(kind: Format, order: Order) -> None:
    for (layers, tokens, heads, dims), element in product(SIZES, (1, 2, 4, 8)):
        shape = PageShape(layers, tokens, heads, dims, element, order)
        page = random_page(shape)
        block = to_format(page, shape, kind)
        back = np.zeros_like(page)
        from_format(block, shape, kind, back)
        assert np.array_equal(back, page), shape
        other = PageShape(layers, tokens, heads, dims, element, "NHD" if order == "HND" else "HND")
        turned = np.zeros_like(page)
        from_format(block, other, kind, turned)
        assert np.array_equal(to_format(turned, other, kind), block), (
            "the bytes do not depend on the order of the page"
        )


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16", "fp32"])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_a_page_of_the_pool_has_the_values_that_its_layers_see(order: Order, dtype: str) -> None:
    """8-bit values with static scales have their tokens last in a page; the format must not."""
    torch = pytest.importorskip("torch")
    from kvloom.kernels.memory import allocate, layer_views

    spec = LayerSpec("token", attention_fields(2, 8, dtype, scales=False))
    layout = PoolLayout.build({"0": spec, "1": spec, "2": spec}, 16)
    buffer = allocate(layout, 2)
    buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
    (group,) = layout.groups
    shape = PageShape(3, 16, 2, 8, DTYPE_BYTES[dtype], order)
    page = buffer.numpy()[group.page_stride :][: shape.page_bytes].copy()
    block = to_format(page, shape, "NHD")
    for name, view in layer_views(buffer, layout, order).items():
        for field, key in enumerate(("k", "v")):
            seen = np.array(view.fields[key][1].contiguous().view(torch.uint8).numpy())
            assert np.array_equal(np.ascontiguousarray(block[int(name), field]).view(np.uint8), seen)
    back = np.zeros_like(page)
    from_format(block, shape, "NHD", back)
    assert np.array_equal(back, page)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_a_page_splits_into_units_and_joins_again(order: Order) -> None:
    fields = attention_fields(2, 8, "int8")
    size = sum(field.bytes for field in fields)
    whole = PageFields(fields, 3, 48, 48 * size, 3 * 48 * size + 32, order)
    unit = PageFields(fields, 3, 16, 16 * size, 3 * 16 * size, order)
    page = np.random.default_rng(0).integers(0, 256, whole.page_bytes, dtype=np.uint8)
    page[-32:] = 0  # padding
    units = [np.zeros(unit.page_bytes, np.uint8) for _ in range(3)]
    split_units(page, whole, units, unit)
    for number, one in enumerate(units):
        for field, (here, there) in enumerate(zip(unit.views(one), whole.views(page), strict=True)):
            assert np.array_equal(here, there[:, number * 16 : (number + 1) * 16]), field
    back = np.full_like(page, 0)
    join_units(units, unit, back, whole)
    assert np.array_equal(back, page)
    back[:] = 255
    join_units(units[:2], unit, back, whole)
    for here, there in zip(whole.views(back), whole.views(page), strict=True):
        assert np.array_equal(here[:, :32], there[:, :32])
        assert not here[:, 32:].any()
    with pytest.raises(ValueError, match="bytes"):
        split_units(page[1:], whole, units, unit)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_every_value_has_the_position_of_the_format(order: Order) -> None:
    layers, tokens, heads, dims = 3, 5, 2, 7
    shape = PageShape(layers, tokens, heads, dims, 4, order)
    page = np.arange(shape.page_bytes // 4, dtype=np.uint32)
    ours = page.reshape(layers, 2, *((tokens, heads) if order == "NHD" else (heads, tokens)), dims)
    blocks = {kind: to_format(page, shape, kind) for kind in FORMATS}
    for layer, field, token, head, dim in product(*map(range, (layers, 2, tokens, heads, dims))):
        value = (
            ours[layer, field, token, head, dim] if order == "NHD" else ours[layer, field, head, token, dim]
        )
        wide = head * dims + dim
        assert blocks["2LTD"][field, layer, token, wide] == value
        assert blocks["T2D"][layer, token, field, wide] == value
        assert blocks["2TD"][layer, field, token, wide] == value
        assert blocks["NHD"][layer, field, token, head, dim] == value
        assert blocks["HND"][layer, field, head, token, dim] == value


def test_a_latent_has_one_field_and_its_own_format() -> None:
    shape = PageShape(3, 5, 1, 576, 2, fields=1)
    page = random_page(shape)
    block = to_format(page, shape, "MLA")
    assert block.shape == (3, 5, 576)
    assert np.array_equal(block.ravel().view(np.uint8), page), "tokens whole, as ours with one head"
    back = np.zeros_like(page)
    from_format(block, shape, "MLA", back)
    assert np.array_equal(back, page)
    with pytest.raises(ValueError, match="use MLA for latents"):
        to_format(page, shape, "2LTD")
    with pytest.raises(ValueError, match="use MLA for latents"):
        to_format(random_page(PageShape(1, 2, 3, 4, 2)), PageShape(1, 2, 3, 4, 2), "MLA")


def test_a_block_may_be_of_any_type_of_that_size_and_any_stride() -> None:
    shape = PageShape(2, 3, 4, 5, 2)
    page = random_page(shape)
    block = to_format(page, shape, "2LTD").view(np.float16)
    strided = np.zeros((2, 2, 3, 40), np.float16)[..., ::2]
    strided[...] = block
    back = np.zeros_like(page)
    from_format(strided, shape, "2LTD", back)
    assert np.array_equal(back, page)


def test_a_mismatch_is_refused_before_any_write() -> None:
    shape = PageShape(2, 3, 4, 5, 2)
    page = np.zeros(shape.page_bytes, np.uint8)
    with pytest.raises(ValueError, match=r"the page has 10 bytes; .* has 480"):
        to_format(page[:10], shape, "2LTD")
    with pytest.raises(ValueError, match=r"is not 2LTD of \(2, 2, 3, 20\)"):
        from_format(np.ones((2, 2, 3, 21), np.uint16), shape, "2LTD", page)
    with pytest.raises(ValueError, match="elements of 4 bytes"):
        from_format(np.ones((2, 2, 3, 20), np.uint32), shape, "2LTD", page)
    with pytest.raises(ValueError, match="read-only"):
        from_format(np.ones((2, 2, 3, 20), np.uint16), shape, "2LTD", bytes(shape.page_bytes))
    assert not page.any()
    for wrong, message in [
        ({"layers": 0}, "layers=0"),
        ({"element_bytes": 3}, "element_bytes=3"),
        ({"order": "DNH"}, "order='DNH'"),
        ({"fields": 3}, "fields=3"),
    ]:
        with pytest.raises(ValueError, match=message):
            PageShape(**{"layers": 2, "tokens": 3, "heads": 4, "dims": 5, "element_bytes": 2, **wrong})  # type: ignore[arg-type, dict-item]
    with pytest.raises(ValueError, match="'XYZ' is none of"):
        to_format(page, shape, "XYZ")  # type: ignore[arg-type]
