"""The values of a page do not depend on its KV dtype: they are close to the original after any conversion."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.core import Field, attention_fields
from kvloom.tiers import HostConfig, HostTier, PageFields, PageValues, ValueTier

LAYERS, TOKENS, HEADS, DIMS = 3, 16, 2, 8
COUNT = LAYERS * TOKENS * HEADS * DIMS * 2
ERRORS = {"fp32": 0.0, "fp16": 1e-3, "bf16": 8e-3, "int8": 5e-3, "fp8": 0.07}
"""Largest error relative to the largest value of a token and head."""


def fields_of(dtype: str, latent: bool = False, padding: int = 64) -> PageFields:
    fields = attention_fields(HEADS, DIMS, dtype)
    if latent:
        fields = (Field("latent", (2 * HEADS * DIMS,), dtype),)
        fields += (Field("latent_scale", (1,), "fp32"),) if dtype in ("int8", "fp8") else ()
    layer = TOKENS * sum(field.bytes for field in fields)
    return PageFields(fields, LAYERS, TOKENS, layer, LAYERS * layer + padding)


def values_of(page: bytearray, fields: PageFields) -> np.ndarray:
    found = np.zeros(COUNT, np.float32)
    values = PageValues(fields)
    assert values.bytes == found.nbytes
    values.read(page, found)
    return found


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("first", ERRORS)
@pytest.mark.parametrize("second", ERRORS)
def test_values_survive_a_change_of_dtype(first: str, second: str, latent: bool) -> None:
    wanted = np.random.default_rng(0).normal(0, 3, COUNT).astype(np.float32)
    pages = [bytearray(fields_of(dtype, latent).page_bytes) for dtype in (first, second)]
    PageValues(fields_of(first, latent)).fill(pages[0], wanted)
    middle = values_of(pages[0], fields_of(first, latent))
    PageValues(fields_of(second, latent)).fill(pages[1], middle)
    found = values_of(pages[1], fields_of(second, latent))
    width = 2 * HEADS * DIMS if latent else DIMS
    most = np.abs(wanted).reshape(-1, width).max(1).repeat(width)
    assert (np.abs(found - wanted) <= (ERRORS[first] + ERRORS[second]) * most).all()
    if first == second:
        again = bytearray(len(pages[1]))
        PageValues(fields_of(second, latent)).fill(again, found)
        assert np.abs(values_of(again, fields_of(second, latent)) - found).max() <= 1e-6 * np.abs(found).max()


def test_values_equal_those_of_the_kernels_pages() -> None:
    torch = pytest.importorskip("torch")
    from kvloom.kernels.write.reference import write

    keys = torch.randn(TOKENS, HEADS, DIMS, generator=torch.Generator().manual_seed(1))
    pages = torch.zeros(1, TOKENS, HEADS, DIMS, dtype=torch.int8)
    scales = torch.zeros(1, TOKENS, HEADS)
    write(pages, torch.arange(TOKENS), keys, scales)
    fields = fields_of("int8")
    page = bytearray(fields.page_bytes)
    k, _, k_scale, _ = fields.views(page)
    k[0], k_scale[0] = pages[0].numpy().view(np.uint8), scales[0].numpy().view(np.uint32)
    found = values_of(page, fields)[: keys.numel()].reshape(keys.shape)
    assert np.allclose(found, (pages[0].float() * scales[0][..., None]).numpy(), rtol=1e-6)


def test_states_are_copied_without_padding() -> None:
    fields = PageFields((Field("state", (5,), "bf16"),), 2, 0, 10, 32)
    page, values = bytearray(range(32)), bytearray(20)
    PageValues(fields).read(page, values)
    assert values == bytes(range(20))
    other = bytearray(40)
    PageValues(PageFields(fields.fields, 2, 0, 10, 40)).fill(other, values)
    assert other == bytes(range(20)) + bytes(20)


def test_values_need_scales_and_a_lossy_tier() -> None:
    fields = fields_of("fp8")
    with pytest.raises(ValueError, match="field 'k' has dtype fp8 without scales"):
        PageValues(PageFields(fields.fields[:2], 1, TOKENS, 512, 512))
    host = HostTier(HostConfig(1 << 20, slab_bytes=1 << 16))
    with pytest.raises(ValueError, match="stores exact pages"):
        ValueTier(host, {})
    host.close()
