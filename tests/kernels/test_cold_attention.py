"""Attention over cold pages equals the oracle over all pages, however they are cut into pieces."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels.attention import KVPages, Mask, add_cold_attention, attend, cold

BLOCK, PAGES, COLD, COUNT = 16, 40, 21, 7
"""Tokens of a page, pages, cold blocks of the sequence, its queries."""


@pytest.mark.parametrize("piece_bytes", [1, 40_000, 32 << 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", ["plain", "latent", "dynamic int8", "static int8", "sinks"])
def test_pieces_join_to_the_attention_over_all_pages(
    kind: str, softcap: float | None, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "PIECE_BYTES", piece_bytes)
    gen = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, v_dim = (4, 1, 24, 16) if kind == "latent" else (4, 2, 16, 16)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    k, v = drawn(PAGES, BLOCK, kv_heads, dim), drawn(PAGES, BLOCK, kv_heads, v_dim)
    k_scale = v_scale = None
    if kind == "latent":
        v = k[..., :v_dim]
    if kind.endswith("int8"):
        k, v = ((x * 40).clamp(-127, 127).to(torch.int8) for x in (k, v))
        shape = (PAGES, BLOCK, kv_heads) if kind.startswith("dynamic") else (kv_heads,)
        k_scale, v_scale = (drawn(*shape).abs() / 40 for _ in range(2))
    sinks = drawn(heads) if kind == "sinks" else None
    q, length = drawn(COUNT, heads, dim), COLD * BLOCK + 20
    table = torch.randperm(PAGES, generator=gen)[: -(-length // BLOCK)].int()[None]
    mask = Mask(softcap=softcap, sinks=sinks)
    starts, scale = torch.tensor([0, COUNT]), 0.3

    def over(tables: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(q, k, v, tables, starts, torch.tensor([tokens]), mask, scale, k_scale, v_scale)

    wanted, wanted_lse = over(table, length)
    out, lse = over(table[:, COLD:].contiguous(), length - COLD * BLOCK)
    assert not torch.allclose(out, wanted, atol=1e-3)
    add_cold_attention(out, lse, q, KVPages(k, v, k_scale, v_scale), table[0, :COLD].long(), scale, softcap)
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-6, rtol=2e-5)
