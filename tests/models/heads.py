"""Tiny checkpoints with heads in the public layouts, and the straightforward computation of their drafts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvloom.models.loading import load

from .zoo import tiny

__all__ = ["MTP_FAMILIES", "Reference", "save_mtp"]

LAYERS, DAMPING = 4, 0.03
ONE_LAYER: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 0},
    "qwen3_next": {"layer_types": ["full_attention"]},
    "glm4_moe": {"first_k_dense_replace": 0},
}
MTP_FAMILIES = list(ONE_LAYER)


def save_mtp(path: Path, family: str, alike: bool = True, **changes: Any) -> Any:
    """Save a tiny target with a head in the family's public layout, and load it.

    If `alike`, the layers change the embeddings little, and the head's projection keeps them: many drafts are right."""
    damped(tiny(family, **changes), alike).save_pretrained(path)
    one_layer(family, alike, **changes).save_pretrained(path / "layer")
    tensors = load_file(path / "model.safetensors")
    size = tensors["model.norm.weight"].shape[0]
    layer = load_file(path / "layer" / "model.safetensors")
    parts = {
        name.removeprefix("model.layers.0."): x
        for name, x in layer.items()
        if name.startswith("model.layers.0.")
    }
    gen = torch.Generator().manual_seed(1)
    new = {name: 1 + 0.1 * torch.randn(size, generator=gen) for name in ("enorm", "hnorm", "norm")}
    if family == "qwen3_next":  # its norms multiply by 1 + weight
        new = {name: x - 1 for name, x in new.items()}
    kept = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    new["eh_proj"] = kept + 0.05 * torch.randn(size, 2 * size, generator=gen)
    if family == "qwen3_next":
        tensors |= {f"mtp.layers.0.{name}": x for name, x in parts.items()}
        names = {
            "eh_proj": "fc",
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "norm": "norm",
        }
        tensors |= {f"mtp.{names[name]}.weight": x for name, x in new.items()}
    else:
        before = f"model.layers.{LAYERS}."
        tensors |= {before + name: x for name, x in parts.items()}
        names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}
        tensors |= {f"{before}{names[name]}.weight": x for name, x in new.items()}
        tensors[f"{before}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{before}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return load(str(path), torch.float32, "cpu")[0]


def damped(model: Any, alike: bool) -> Any:
    """Scale down what the layers of a model add to the embeddings."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if alike and re.search(r"(o_proj|out_proj|down_proj)", name):
                weight.mul_(DAMPING)
    return model


def one_layer(family: str, alike: bool, **changes: Any) -> Any:
    """Return a model with one layer, as its head has it."""
    model = tiny(family, **{**changes, "num_hidden_layers": 1, **ONE_LAYER[family]})
    gen = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=gen), alpha=0.1)
    return damped(model, alike)


class Reference:
    """Computes drafts of a saved head over whole sequences, with transformers' attention and without pages."""

    def __init__(self, path: Path, family: str, alike: bool = True, **changes: Any) -> None:
        self.target = load(str(path), torch.float32, "cpu")[0]
        self.layer = one_layer(family, alike, **changes)
        for model in (self.target, self.layer):
            model.set_attn_implementation("eager")
        tensors = load_file(path / "model.safetensors")
        before = "mtp." if family == "qwen3_next" else f"model.layers.{LAYERS}."
        self.zero_centred = family == "qwen3_next"
        names = {
            "projection": ("eh_proj", "fc"),
            "embedding": ("enorm", "pre_fc_norm_embedding"),
            "state": ("hnorm", "pre_fc_norm_hidden"),
            "last": ("shared_head.norm", "norm"),
        }
        self.weights = {
            name: tensors[f"{before}{both[self.zero_centred]}.weight"] for name, both in names.items()
        }
        self.eps = self.target.config.rms_norm_eps

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[name] + 1 if self.zero_centred else self.weights[name]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the greedy draft of `count` tokens after `tokens`."""
        tokens, size = list(tokens), self.weights["last"].shape[0]
        states = torch.zeros(1, size)
        if len(tokens) > 1:
            found = self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
            states = torch.cat((states, found))
        for _ in range(count):
            embedded = self.target.model.embed_tokens(torch.tensor(tokens))
            both = torch.cat((self.norm(embedded, "embedding"), self.norm(states, "state")), -1)
            joined = both @ self.weights["projection"].T
            collected: list[torch.Tensor] = []
            hook = self.layer.model.layers[0].register_forward_hook(
                lambda _, __, x, to=collected: to.append(x)
            )
            self.layer.model(inputs_embeds=joined[None])
            hook.remove()
            own = self.norm(collected[0][0, -1], "last")
            tokens.append(int(self.target.lm_head(own).argmax()))
            states = torch.cat((states, own[None]))
        return tokens[-count:]
