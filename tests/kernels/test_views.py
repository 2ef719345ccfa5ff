"""Views of the pool: every byte of a page belongs to one place of one field, in either order."""

from __future__ import annotations

import pytest
import torch

from kvloom.core import Field, LayerSpec, PoolLayout, attention_fields
from kvloom.kernels.memory import Order, allocate, layer_views

LAYERS = {
    "a": LayerSpec("token", attention_fields(2, 64, "bf16")),
    "b": LayerSpec("token", attention_fields(2, 64, "int8")),
    "latent": LayerSpec("token", (Field("latent", (1, 80), "fp16"),)),
    "state": LayerSpec("state", (Field("ssm", (4, 8), "fp32", shard_axis=0),)),
}


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_fields_fill_their_pages_without_meeting(order: Order) -> None:
    layout = PoolLayout.build(LAYERS)
    buffer = allocate(layout, 3)
    buffer.zero_()
    for name, view in layer_views(buffer, layout, order).items():
        group = layout.groups[view.group]
        used = 0
        for field in view.fields.values():
            before = int(buffer.count_nonzero())
            page = field[group.pages_per_slab]
            page.view(torch.int8 if field.dtype == torch.float8_e4m3fn else field.dtype).fill_(1)
            used += page.numel() * page.element_size()
            assert torch.equal(page.float(), torch.ones_like(page, dtype=torch.float32))
            assert int(buffer.count_nonzero()) > before
            assert (field[: group.pages_per_slab] == 0).all()
        begin = group.pages_per_slab * group.page_stride
        assert used <= group.layer_bytes
        assert not buffer[begin + group.page_stride :].any(), name
        buffer.zero_()


def test_orders_name_what_is_dense() -> None:
    layout = PoolLayout.build(LAYERS)
    buffer = allocate(layout, 3)
    heads_first, tokens_first = layer_views(buffer, layout), layer_views(buffer, layout, "NHD")
    assert heads_first["a"].fields["k"].stride()[1:] == (64, 16 * 64, 1)
    assert tokens_first["a"].fields["k"].stride()[1:] == (2 * 64, 64, 1)
    assert heads_first["b"].fields["v"].stride()[1:] == (1, 16 * 64, 16)
    assert heads_first["b"].fields["k_scale"].stride()[1:] == (1, 16)
    assert tokens_first["b"].fields["v"].stride()[1:] == (2 * 64, 64, 1)
    assert heads_first["latent"].fields["latent"].stride()[1:] == (80, 80, 1)
    assert heads_first["state"].fields["ssm"].stride()[1:] == (8, 1)
    with pytest.raises(ValueError, match="unknown page order"):
        layer_views(buffer, layout, "DHN")  # type: ignore[arg-type]


def test_a_field_that_its_dtype_cannot_begin_at_is_refused() -> None:
    odd = (Field("a", (3,), "bf16"), Field("b", (4,), "fp32"))
    layout = PoolLayout.build({"odd": LayerSpec("state", odd)})
    with pytest.raises(ValueError, match="begins at byte 6 of its page"):
        layer_views(allocate(layout, 2), layout)
