"""Norms, gated activations and rotary embeddings in one launch each, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels.fused import operations as fused

pytest.importorskip("triton", reason="the kernels are Triton's")
from kvloom.kernels.fused import triton_linear, triton_operations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + ([torch.bfloat16, torch.float16] if DEVICE == "cuda" else [])
"""The interpreter computes no bf16 as a GPU does."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, slack: float = 4) -> None:
    assert found.dtype == wanted.dtype
    eps = torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=slack * eps, atol=slack * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("shape", [(1, 5, 96), (3, 64), (7, 200), (1, 4, 3, 128), (0, 64)])
def test_norms(shape: tuple[int, ...], form: fused.NormForm, dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], seed=1, dtype=dtype)
    wanted = fused.rms_norm(x.cpu(), weight.cpu(), 1e-6, form).to(DEVICE)
    close(triton_operations.rms_norm(x, weight, 1e-6, form == "gemma"), wanted)


def test_norms_of_heads_that_lie_apart() -> None:
    joined, weight = randn(6, 512), randn(64, seed=1)
    for part in (joined[:, :256].view(6, 4, 64), joined[None, :, 256:384].view(1, 6, 2, 64).transpose(1, 2)):
        wanted = fused.rms_norm(part.cpu(), weight.cpu(), 1e-5).to(DEVICE)
        found = triton_operations.rms_norm(part, weight, 1e-5, False)
        assert found.is_contiguous()
        close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((5, 96), 0), ((3, 2, 64), 0), ((3, 2, 64), 2), ((2, 3, 4, 32), 0), ((2, 3, 4, 32), 4), ((0, 8), 0)],
)
def test_gated_norms(shape: tuple[int, ...], groups: int, order: fused.GateOrder, dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype)
    gate = randn(*shape[:-1], 3 * shape[-1], seed=2, dtype=dtype)[..., shape[-1] : 2 * shape[-1]]
    weight = randn(*([groups] if groups else []), shape[-1], seed=1, dtype=dtype)
    wanted = fused.gated_rms_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-6, order).to(DEVICE)
    found = triton_operations.gated_rms_norm(x, gate, weight, 1e-6, order == "first")
    close(found, wanted, slack=16)


def test_gated_norms_that_do_not_fit() -> None:
    for x, gate, weight in ((4, 4, 5), (4, 5, 4)):
        with pytest.raises(ValueError, match="do not fit together"):
            fused.gated_rms_norm(randn(2, x), randn(2, gate), randn(weight), 1e-6, "first")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(5, 96), (1, 3, 6000), (0, 8)])
def test_gates(shape: tuple[int, ...], activation: fused.Activation, dtype: torch.dtype) -> None:
    x = 4 * randn(*shape, dtype=dtype)
    # 1 + tanh of what is far below 0 has few digits left.
    close(
        triton_operations.act_and_mul(x, activation),
        fused.act_and_mul(x.cpu(), activation).to(DEVICE),
        slack=64,
    )


def test_large_gates_do_not_overflow() -> None:
    x = torch.tensor([[-200.0, 200.0, 90.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for activation in ("silu", "gelu_tanh"):
        close(triton_operations.act_and_mul(x, activation), torch.tensor([[0.0, 200.0, 90.0]], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (5, 1, 80), (32, 8, 128), (3, 3, 256)])
def test_rotary_embeddings(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    joined = randn(1, 5, (heads + kv_heads) * dim, dtype=dtype)
    q = joined[..., : heads * dim].view(1, 5, heads, dim).transpose(1, 2)
    k = joined[..., heads * dim :].view(1, 5, kv_heads, dim).transpose(1, 2)
    cos, sin = randn(1, 5, dim, seed=2, dtype=dtype), randn(1, 5, dim, seed=3, dtype=dtype)
    before = joined.clone()
    wanted = fused.apply_rotary(q.cpu(), k.cpu(), cos.cpu(), sin.cpu())
    for found, want in zip(triton_operations.apply_rotary(q, k, cos, sin), wanted, strict=True):
        assert found.transpose(1, 2).is_contiguous()
        close(found, want.to(DEVICE))
    assert torch.equal(joined, before), "the arguments stay as they are"


def heads_of(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [1, heads, 5 tokens, dim] as they lie in rows that hold values, too."""
    joined = 3 * randn(5, heads + 2 * kv_heads, dim, dtype=dtype)
    return tuple(x.transpose(0, 1)[None] for x in joined.split((heads, kv_heads, kv_heads), 1)[:2])  # type: ignore[return-value]


def two_norms(dim: int, form: fused.NormForm, dtype: torch.dtype) -> tuple[fused.RMSNorm, fused.RMSNorm]:
    q, k = (fused.RMSNorm(randn(dim, seed=i, dtype=dtype), 1e-6, form) for i in (1, 2))
    return q, k


HEADS = [(4, 2, 64), (6, 2, 96), (16, 8, 128), (16, 8, 256), (1, 1, 64), (4, 1, 256), (5, 1, 80)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_norms_before_a_rotation_are_the_bits_of_norms_and_a_rotation(
    heads: int, kv_heads: int, dim: int, form: fused.NormForm, dtype: torch.dtype
) -> None:
    q, k = heads_of(heads, kv_heads, dim, dtype)
    cos, sin = randn(5, 2, dim, seed=3, dtype=dtype)[None].unbind(2)  # side by side, as a table has them
    norms = two_norms(dim, form, dtype)
    before = q.clone(), k.clone()
    apart = (
        triton_operations.rms_norm(x, n.weight, n.eps, form == "gemma")
        for x, n in zip((q, k), norms, strict=True)
    )
    wanted = triton_operations.apply_rotary(*apart, cos, sin)
    for found, want in zip(triton_operations.apply_rotary(q, k, cos, sin, norms), wanted, strict=True):
        assert found.transpose(1, 2).is_contiguous()
        assert torch.equal(found, want)
    assert all(map(torch.equal, (q, k), before)), "the arguments stay as they are"
    on_cpu = [fused.RMSNorm(n.weight.cpu(), n.eps, form) for n in norms]
    plain = fused.apply_rotary(q.cpu(), k.cpu(), cos.cpu(), sin.cpu(), (on_cpu[0], on_cpu[1]))
    for want, each in zip(wanted, plain, strict=True):
        close(want, each.to(DEVICE), slack=32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_two_norms_in_one_launch_are_their_own_bits(
    tokens: int, heads: int, kv_heads: int, dim: int, form: fused.NormForm, dtype: torch.dtype
) -> None:
    joined = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype)[:, : heads + kv_heads]
    norms = two_norms(dim, form, dtype)
    found = triton_operations.rms_norms(joined, heads, norms)
    assert found.is_contiguous()
    for x, norm, part in zip(
        joined.split((heads, kv_heads), 1), norms, found.split((heads, kv_heads), 1), strict=True
    ):
        assert torch.equal(part, triton_operations.rms_norm(x, norm.weight, norm.eps, form == "gemma"))


def test_norms_that_differ_in_more_than_their_weights_are_taken_one_by_one() -> None:
    q, k = heads_of(4, 2, 64, torch.float32)
    cos, sin = randn(1, 5, 64, seed=3), randn(1, 5, 64, seed=4)
    norms = fused.RMSNorm(randn(64, seed=1), 1e-2, "gemma"), fused.RMSNorm(randn(64, seed=2), 1e-6)
    wanted = fused.apply_rotary(norms[0](q), norms[1](k), cos, sin)
    found = fused.apply_rotary(q, k, cos, sin, norms)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    rows = torch.cat((q, k), 1)[0].transpose(0, 1)
    wanted_rows = torch.cat((norms[0](q), norms[1](k)), 1)[0].transpose(0, 1)
    assert torch.equal(fused.rms_norms(rows, 4, norms), wanted_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("dim", [768, 1000, 3840])
def test_a_norm_of_a_sum_is_the_bits_of_a_norm(dim: int, form: fused.NormForm, dtype: torch.dtype) -> None:
    x, y = (randn(3, dim, seed=i, dtype=dtype) for i in range(2))
    post, pre = two_norms(dim, form, dtype)
    found = triton_operations.add_norm(x, y, post, pre)
    assert found is not None
    assert torch.equal(found, triton_operations.rms_norm(x, pre.weight, pre.eps, form == "gemma"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forms", [("llama", "llama"), ("gemma", "gemma"), ("llama", None)])
def test_norms_that_are_added(
    forms: tuple[fused.NormForm, fused.NormForm | None], dtype: torch.dtype
) -> None:
    x, y = (randn(1, 5, 200, seed=i, dtype=dtype) for i in range(2))
    post, pre = (
        None if form is None else fused.RMSNorm(randn(200, seed=2 + i, dtype=dtype), 1e-6, form)
        for i, form in enumerate(forms)
    )
    assert post is not None
    here, there = x.clone(), x.cpu()
    on_cpu = [
        None if norm is None else fused.RMSNorm(norm.weight.cpu(), norm.eps, norm.form)
        for norm in (post, pre)
    ]
    assert on_cpu[0] is not None
    found = triton_operations.add_norm(here, y, post, pre)
    wanted = fused.add_norm(there, y.cpu(), on_cpu[0], on_cpu[1])
    close(here, there.to(DEVICE), slack=8)
    assert (found is None) == (wanted is None) == (pre is None)
    if found is not None and wanted is not None:
        close(found, wanted.to(DEVICE), slack=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "k"), [(64, 128), (37, 200), (130, 1500), (66, 4100)])
@pytest.mark.parametrize("added", [False, True])
def test_a_row_times_a_matrix(out: int, k: int, added: bool, dtype: torch.dtype) -> None:
    x, weight, base = (
        randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(1, k), (out, k), (1, out)])
    )
    into = base.clone() if added else None
    found = triton_linear.row_linear(x, weight, into)
    assert into is None or found is into
    wanted = x.double().cpu() @ weight.double().cpu().t() + (base.double().cpu() if added else 0)
    assert torch.dist(found.double().cpu(), wanted) <= 4 * torch.finfo(dtype).eps * wanted.norm()


def test_a_product_is_added_in_place_whatever_the_rows() -> None:
    weight, x = randn(8, 6, seed=1), randn(1, 3, 6)
    into = randn(1, 3, 8, seed=2)
    wanted = into + x @ weight.t()
    assert fused.linear(x, weight, into=into) is into
    close(into, wanted, slack=16)
    with pytest.raises(ValueError, match="bias or into"):
        fused.linear(x, weight, bias=randn(8), into=into)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        fused.add_norm(randn(2, 8), randn(2, 9), fused.RMSNorm(randn(8), 1e-6))
    with pytest.raises(ValueError, match="does not fit x"):
        fused.rms_norm(randn(2, 8), randn(9), 1e-6)
    with pytest.raises(ValueError, match="no halves"):
        fused.act_and_mul(randn(2, 7))
    with pytest.raises(ValueError, match="one angle for each"):
        fused.apply_rotary(randn(1, 2, 3, 8), randn(1, 2, 3, 8), randn(1, 4, 8), randn(1, 4, 8))
