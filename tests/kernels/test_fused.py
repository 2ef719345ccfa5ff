"""Norms, gated activations and rotary embeddings in one launch each, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels import fused

pytest.importorskip("triton", reason="the kernels are Triton's")
from kvloom.kernels import triton_fused

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
def test_norms(shape: tuple[int, ...], form: fused.Norm, dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], seed=1, dtype=dtype)
    wanted = fused.rms_norm(x.cpu(), weight.cpu(), 1e-6, form).to(DEVICE)
    close(triton_fused.rms_norm(x, weight, 1e-6, form == "gemma"), wanted)


def test_norms_of_heads_that_lie_apart() -> None:
    joined, weight = randn(6, 512), randn(64, seed=1)
    for part in (joined[:, :256].view(6, 4, 64), joined[None, :, 256:384].view(1, 6, 2, 64).transpose(1, 2)):
        wanted = fused.rms_norm(part.cpu(), weight.cpu(), 1e-5).to(DEVICE)
        found = triton_fused.rms_norm(part, weight, 1e-5, False)
        assert found.is_contiguous()
        close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(5, 96), (1, 3, 6000), (0, 8)])
def test_gates(shape: tuple[int, ...], activation: fused.Activation, dtype: torch.dtype) -> None:
    x = 4 * randn(*shape, dtype=dtype)
    # 1 + tanh of what is far below 0 has few digits left.
    close(triton_fused.gated(x, activation), fused.gated(x.cpu(), activation).to(DEVICE), slack=64)


def test_large_gates_do_not_overflow() -> None:
    x = torch.tensor([[-200.0, 200.0, 90.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for activation in ("silu", "gelu_tanh"):
        close(triton_fused.gated(x, activation), torch.tensor([[0.0, 200.0, 90.0]], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (5, 1, 80), (32, 8, 128), (3, 3, 256)])
def test_rotary_embeddings(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    joined = randn(1, 5, (heads + kv_heads) * dim, dtype=dtype)
    q = joined[..., : heads * dim].view(1, 5, heads, dim).transpose(1, 2)
    k = joined[..., heads * dim :].view(1, 5, kv_heads, dim).transpose(1, 2)
    cos, sin = randn(1, 5, dim, seed=2, dtype=dtype), randn(1, 5, dim, seed=3, dtype=dtype)
    before = joined.clone()
    wanted = fused.rotate(q.cpu(), k.cpu(), cos.cpu(), sin.cpu())
    for found, want in zip(triton_fused.rotate(q, k, cos, sin), wanted, strict=True):
        assert found.transpose(1, 2).is_contiguous()
        close(found, want.to(DEVICE))
    assert torch.equal(joined, before), "the arguments stay as they are"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit x"):
        fused.rms_norm(randn(2, 8), randn(9), 1e-6)
    with pytest.raises(ValueError, match="no halves"):
        fused.gated(randn(2, 7))
    with pytest.raises(ValueError, match="one angle for each"):
        fused.rotate(randn(1, 2, 3, 8), randn(1, 2, 3, 8), randn(1, 4, 8), randn(1, 4, 8))
