"""The shapes of the three embedded models, and how their layers are computed while they learn.

All are architectures of transformers, loaded by AutoModelForCausalLM without code of their own:

| name   | architecture     | weights | layers                                                                    |
|--------|------------------|---------|---------------------------------------------------------------------------|
| llama  | llama            | 8.0 M   | 6 of full attention                                                       |
| hybrid | granitemoehybrid | 7.7 M   | 2 of full attention, 2 of a window of 256 tokens, 3 Mamba-2               |
| draft  | llama            | 0.9 M   | 2 of full attention: few, since what a draft costs on a CPU is its layers |

No architecture of transformers 5.17 to 5.22 has all three kinds in its published form. GraniteMoeHybrid builds an attention
layer for any kind but linear_attention and takes a mask for each kind, so that its config can say sliding_attention; only
masks that its forward makes by itself lack that kind. Its first layer is full attention: transformers asks the first layer
for the length of what is cached.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  (its usual name)

from .tokens import BOS, CONTEXT, EOS, PAD

__all__ = ["NAMES", "attend", "build", "convolve", "for_training", "masks", "scan"]

NAMES = ("llama", "hybrid", "draft")
ATTENTION = "embedded-training"
HEAD = 64
PATTERN = ("full", "linear", "sliding", "linear", "sliding", "linear", "full")
_RESIDUAL = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "output_linear.weight")


def build(name: str, vocabulary: int, tiny: bool = False) -> Any:
    """A model with random weights in float32, ready to learn. `tiny`: the same kinds of layers at a fraction of the size
    (for trying things out)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in NAMES:
        raise ValueError(f"model {name!r} is not known; known: {', '.join(NAMES)}")
    width, inner = (64, 128) if tiny else (320, 896)
    shape = {
        "llama": _llama(width, inner, 6, 4, 2),
        "draft": _llama(32, 64, 2, 2, 1) if tiny else _llama(128, 352, 2, 2, 1),
        "hybrid": _hybrid(width, window=32 if tiny else 256),
    }[name]
    config = AutoConfig.for_model(
        **shape,
        vocab_size=vocabulary,
        head_dim=16 if tiny else HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    if name == "hybrid":
        config.attention_multiplier = config.head_dim**-0.5
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _initialise(model, config.num_hidden_layers)
    if name == "hybrid":  # with this cache, generate() makes a mask for every kind of layer
        model.generation_config.cache_implementation = "static"
        model.generation_config.disable_compile = True
    return model


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _hybrid(width: int, window: int) -> dict[str, Any]:
    return {
        **_llama(width, width * 8 // 5, len(PATTERN), 4, 2),
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": width * 8 // 5,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "layer_types": [f"{kind}_attention" for kind in PATTERN],
        "sliding_window": window,
        "mamba_expand": 2,
        "mamba_n_heads": 2 * width // HEAD,
        "mamba_d_head": HEAD,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
    }


@torch.no_grad()
def _initialise(model: Any, layers: int) -> None:
    """Smaller weights where a layer adds to the residual stream, and Mamba's time steps from 0.001 to 0.1: with
    transformers' own (all 1.3) a state forgets within a few tokens."""
    for name, weight in model.named_parameters():
        if name.endswith(_RESIDUAL):
            weight.mul_((2 * layers) ** -0.5)
        elif name.endswith("dt_bias"):
            steps = torch.logspace(-3, -1, len(weight))
            weight.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the steps back


# While learning: whole rows of equal length, no cache. Plain torch, since a kernel library may not be there.


def masks(model: Any) -> dict[str, Any]:
    """The keyword that says which mask each kind of layer takes: none, `attend` knows them."""
    if model.config.model_type != "granitemoehybrid":
        return {}
    return {"attention_mask": dict.fromkeys(model.config.layer_types)}


def for_training(model: Any) -> None:
    """Put faster functions in the place of transformers' for this process: its reference of Mamba-2 is made to be read."""
    if model.config.model_type != "granitemoehybrid":
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    model.config._attn_implementation = ATTENTION
    modeling = importlib.import_module(type(model).__module__)
    modeling.mamba2_chunk_scan = scan  # type: ignore[attr-defined]
    modeling.causal_conv1d_fn = convolve  # type: ignore[attr-defined]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of whole rows ([rows, heads, tokens, dim] in, [rows, tokens, heads, dim] out), in blocks where it slides."""
    config = module.config
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if config.layer_types[module.layer_idx] == "sliding_attention":
        out = _slide(query, key, value, config.sliding_window, scaling)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _slide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scaling: float) -> torch.Tensor:
    """A block of `window` queries sees itself and the block before: two blocks of keys instead of a whole row."""
    rows, heads, tokens, dim = q.shape
    blocks = -(-tokens // window)

    def cut(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 0, 0, blocks * window - x.shape[2]))
        return (
            x.reshape(rows, heads, blocks, window, dim)
            .transpose(1, 2)
            .reshape(rows * blocks, heads, window, dim)
        )

    def with_previous(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((cut(F.pad(x, (0, 0, window, 0))[:, :, : blocks * window]), cut(x)), 2)

    own = torch.arange(window, device=q.device)
    seen = torch.arange(-window, window, device=q.device)
    near = (seen <= own[:, None]) & (seen > own[:, None] - window)
    visible = near.expand(blocks, window, 2 * window).clone()
    visible[0, :, :window] = False
    visible = visible.repeat(rows, 1, 1)[:, None]
    out = F.scaled_dot_product_attention(cut(q), with_previous(k), with_previous(v), visible, scale=scaling)
    out = (
        out.view(rows, blocks, heads, window, dim).transpose(1, 2).reshape(rows, heads, blocks * window, dim)
    )
    return out[:, :, :tokens]


def convolve(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    **_: Any,
) -> torch.Tensor:
    """A causal depthwise convolution ([rows, channels, tokens]) as a sum of shifted rows."""
    tokens, width = hidden_states.shape[-1], weight.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    weight = weight.to(hidden_states.dtype)
    out = sum(padded[..., i : i + tokens] * weight[:, i, None] for i in range(width))
    assert isinstance(out, torch.Tensor)
    if bias is not None:
        out = out + bias.to(out.dtype)[:, None]
    if activation not in (None, "silu"):
        raise ValueError(f"activation {activation!r} is not known here; silu is")
    return out if activation is None else F.silu(out)


def scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  (the names at the call)
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Mamba-2 over whole rows from an empty state, in chunks, by matrix products in float32.

    x [rows, tokens, heads, dim], dt [rows, tokens, heads], B and C [rows, tokens, groups, state]. Within a chunk it is
    attention with decay for a mask; across chunks each one's contribution to the state decays on its way.
    """
    if initial_states is not None or return_final_states:
        raise ValueError("this scan is for training: it begins with an empty state and gives none back")
    tokens, heads, dim = hidden_states.shape[1:]
    with torch.autocast(hidden_states.device.type, enabled=False):
        step = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
        x = hidden_states.float()

        def chunks(part: torch.Tensor) -> torch.Tensor:
            """[rows, tokens, heads, size] as [rows, heads, chunks, chunk, size]."""
            part = F.pad(part, (0, 0, 0, 0, 0, -tokens % chunk_size)).transpose(1, 2)
            return part.reshape(*part.shape[:2], -1, chunk_size, part.shape[-1])

        values = chunks(x * step[..., None])
        decay = chunks((step * A.float())[..., None])[..., 0].cumsum(-1)
        b, c = chunks(B.float()), chunks(C.float())
        alike = c @ b.transpose(-1, -2)  # once for the heads of a group
        b, c, alike = (part.repeat_interleave(heads // part.shape[1], 1) for part in (b, c, alike))

        weights = _falling(decay).exp() * alike
        out = weights @ values
        end = decay[..., -1:]
        added = ((values * (end - decay).exp()[..., None]).transpose(-1, -2) @ b).flatten(-2)
        ends = end[..., 0].cumsum(-1)
        before = F.pad(ends, (1, -1))  # a chunk begins where the one before it ended
        state = _falling(before, ends, -1).exp() @ added
        state = state.view(*state.shape[:-1], dim, -1)
        out = out + (c @ state.transpose(-1, -2)) * decay.exp()[..., None]
        rest: torch.Tensor = D.float()[:, None] * x
        return out.flatten(2, 3).transpose(1, 2)[:, :tokens] + rest


def _falling(to: torch.Tensor, since: torch.Tensor | None = None, diagonal: int = 0) -> torch.Tensor:
    """`to[i] - since[j]` for every j up to i (+ `diagonal`), minus infinity elsewhere: the logarithm of what is left."""
    since = to if since is None else since
    size = to.shape[-1]
    hidden = torch.ones(size, size, dtype=torch.bool, device=to.device).tril(diagonal).logical_not()
    return (to[..., :, None] - since[..., None, :]).masked_fill(hidden, -torch.inf)
