"""Tiny targets and heads in the public layouts, and the straightforward computation of their drafts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvloom.models.loading import load

from .zoo import config_of, tiny

__all__ = ["MTP_FAMILIES", "EagleReference", "Reference", "save_eagle", "save_mtp", "write_eagle"]

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


def save_eagle(
    path: Path, family: str = "llama", alike: bool = True, sizes: dict[str, Any] | None = None, **fields: Any
) -> Any:
    """Save a tiny target and an EAGLE-3 head (in `path / "eagle"`) in the public layout, and load the target.

    If `alike`, the head's attention selects the token itself and replaces the state by its embedding, so that many
    drafts are right. `sizes` are further fields of both configs, and `fields` of the head's config."""
    path.mkdir(parents=True, exist_ok=True)
    damped(tiny(family, num_hidden_layers=6, **(sizes or {})), alike).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    output = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    write_eagle(path / "eagle", output, alike, sizes, **fields)
    return load(str(path), torch.float32, "cpu")[0]


def write_eagle(
    folder: Path, output: torch.Tensor, alike: bool = True, sizes: dict[str, Any] | None = None, **fields: Any
) -> None:
    """Write an EAGLE-3 head in the public layout. `output` is the output matrix of its target. See `save_eagle`."""
    config = config_of("llama", num_key_value_heads=4, **(sizes or {})).to_dict()
    size, inner = config["hidden_size"], config["intermediate_size"]
    gen = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen) * (0.05 if alike else 0.3)

    one, none = (torch.eye(size), torch.zeros(size, size)) if alike else (torch.zeros(size, size),) * 2
    kept = torch.arange(0, len(output), 2) if not alike else torch.arange(3, len(output))
    weights = {
        "fc.weight": noise(size, 3 * size) * 8,
        "norm.weight": 1 + noise(size),
        "lm_head.weight": output[kept].clone(),
        "d2t": kept - torch.arange(len(kept)),
        "t2d": torch.isin(torch.arange(len(output)), kept),
        "midlayer.input_layernorm.weight": 1 + noise(size),
        "midlayer.hidden_norm.weight": 1 + noise(size),
        "midlayer.post_attention_layernorm.weight": 1 + noise(size),
        "midlayer.self_attn.q_proj.weight": torch.cat((2 * one, none), 1) + noise(size, 2 * size),
        "midlayer.self_attn.k_proj.weight": torch.cat((2 * one, none), 1) + noise(size, 2 * size),
        "midlayer.self_attn.v_proj.weight": torch.cat((one, -one), 1) + noise(size, 2 * size),
        "midlayer.self_attn.o_proj.weight": one + noise(size, size),
        "midlayer.mlp.gate_proj.weight": noise(inner, size),
        "midlayer.mlp.up_proj.weight": noise(inner, size),
        "midlayer.mlp.down_proj.weight": noise(size, inner),
    }
    folder.mkdir(parents=True)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(kept),
        "max_position_embeddings": 32,  # as in public folders, less than that of the target
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


class EagleReference:
    """Computes drafts of a saved EAGLE-3 head over whole sequences, with plain matrix products."""

    def __init__(self, path: Path, after: tuple[int, ...] = (2, 3, 3), normed_residual: bool = False) -> None:
        self.target = load(str(path), torch.float32, "cpu")[0]
        self.target.set_attn_implementation("eager")
        self.weights = load_file(path / "eagle" / "model.safetensors")
        self.config = json.loads((path / "eagle" / "config.json").read_text(encoding="utf-8"))
        self.after, self.normed_residual = after, normed_residual

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = float(self.config["rms_norm_eps"])
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weights[f"{name}.weight"]

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"midlayer.{name}.weight"].T

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        count, heads = len(x), int(self.config["num_attention_heads"])
        q, k, v = (
            self.project(x, f"self_attn.{name}_proj").view(count, heads, -1).transpose(0, 1) for name in "qkv"
        )
        half = q.shape[-1] // 2
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()

        def turned(y: torch.Tensor) -> torch.Tensor:
            a, b = y[..., :half], y[..., half:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        scores = turned(q) @ turned(k).mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        return self.project((scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1), "self_attn.o_proj")

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the greedy draft of `count` tokens after `tokens`."""
        tokens, size = list(tokens), self.weights["norm.weight"].shape[0]
        states = torch.zeros(1, size)
        if len(tokens) > 1:
            outputs = self.target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            joined = torch.cat([outputs[after][0] for after in self.after], -1)
            states = torch.cat((states, joined @ self.weights["fc.weight"].T))
        for _ in range(count):
            embedded = self.target.model.embed_tokens(torch.tensor(tokens))
            normed = self.norm(states, "midlayer.hidden_norm")
            both = torch.cat((self.norm(embedded, "midlayer.input_layernorm"), normed), -1)
            x = (normed if self.normed_residual else states) + self.attend(both)
            y = self.norm(x, "midlayer.post_attention_layernorm")
            gate = torch.nn.functional.silu(self.project(y, "mlp.gate_proj")) * self.project(y, "mlp.up_proj")
            x = x + self.project(gate, "mlp.down_proj")
            draft = int((self.norm(x[-1], "norm") @ self.weights["lm_head.weight"].T).argmax())
            tokens.append(draft + int(self.weights["d2t"][draft]))
            states = torch.cat((states, x[-1:]))
        return tokens[-count:]
