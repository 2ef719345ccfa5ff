"""The exceptions: what single families need beyond the seams. Every one of them stands here, and nowhere else.

| family                     | what is different                                   | what is done                              |
|----------------------------|-----------------------------------------------------|-------------------------------------------|
| DeepSeek (MLA)             | caches latents, expects expanded keys and values    | attention in the latent space (`absorb`)  |
| Mamba-1, Jamba             | transformers' scan takes no initial state           | our scan in its place (`replace_scans`)   |
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kvloom.kernels.state import Rows, mamba1_scan

from .mixers import running

__all__ = ["absorb", "keeps_latents", "replace_scans"]

MAMBA1 = ("falcon_mamba", "jamba", "mamba")


def keeps_latents(module: Any) -> bool:
    """Whether an attention module caches one latent a token and projects keys and values up from it."""
    return hasattr(module, "kv_b_proj")


def absorb(module: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA in the latent space: queries times the keys' up-projection, and the values' up-projection [heads, dim, rank]."""
    weight = module.kv_b_proj.weight.view(query.shape[1], -1, module.kv_lora_rank)
    keys, values = torch.split(weight, [module.qk_nope_head_dim, module.v_head_dim], 1)
    nope, rope = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat((torch.einsum("thd,hdr->thr", nope, keys), rope), -1), values


def replace_scans() -> None:
    """Put a scan with an initial state in the place of transformers' for Mamba-1. Harmless to repeat."""
    for family in MAMBA1:
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        if hasattr(modeling, "mamba_selective_scan"):
            modeling.mamba_selective_scan = _scan  # type: ignore[attr-defined]


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    D: torch.Tensor | None = None,  # noqa: N803  (its name at the call)
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """`mamba_selective_scan` as modeling code calls it ([batch, channels, tokens]), from the state of its rows."""
    size, channels, tokens = x.shape

    def rows_of(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.transpose(1, 2).reshape(size * tokens, -1)

    states = torch.zeros((size + 1, channels, a.shape[1]), dtype=torch.float32, device=x.device)
    current = running()
    before = None if current is None else current.get_recurrent_state()
    if before is not None:
        states[1:] = before
    slots = torch.arange(1, size + 1, device=x.device)
    starts = torch.arange(size + 1, device=x.device) * tokens
    packed = [rows_of(part) for part in (x, dt, b, c, z)]
    assert packed[0] is not None
    assert packed[1] is not None
    assert packed[2] is not None
    assert packed[3] is not None
    y = mamba1_scan(
        packed[0], packed[1], a, packed[2], packed[3], states, Rows(starts, slots, slots, tokens), D, packed[4],
        delta_bias, delta_softplus,
    )  # fmt: skip
    y = y.view(size, tokens, channels).transpose(1, 2)
    return (y, states[1:]) if return_last_state else y
