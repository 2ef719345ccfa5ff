"""LoRA adapters for tests: random weights in PEFT's format, and the same weights merged into a plain model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["adapter_layers", "greedy", "merged", "write_adapter"]


def adapter_layers(
    model: Any, targets: tuple[str, ...], below: str | tuple[str, ...] = ""
) -> dict[str, nn.Linear]:
    """The linear layers of a model whose last name is one of `targets`, by full name, which begins with `below`
    (or one of them)."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and name.rpartition(".")[2] in targets and name.startswith(below)
    }


def write_adapter(
    folder: Path,
    model: Any,
    targets: tuple[str, ...],
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    size: float = 0.2,
    below: str | tuple[str, ...] = "",
    **config: Any,
) -> Path:
    """Write an adapter with random weights, and return its folder."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in adapter_layers(model, targets, below).items():
        a = torch.randn(rank, layer.in_features, generator=draw)
        b = torch.randn(layer.out_features, rank, generator=draw)
        tensors[f"base_model.model.{name}.lora_A.weight"] = size * a
        tensors[f"base_model.model.{name}.lora_B.weight"] = size * b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of a plain model with the adapter in its weights: W + scale * B A."""
    from safetensors.torch import load_file

    found = copy.deepcopy(model)
    fields = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = fields["lora_alpha"] / (fields["r"] ** 0.5 if fields.get("use_rslora") else fields["r"])
    modules = dict(found.named_modules())
    for name in {key.partition(".lora_")[0] for key in tensors}:
        a, b = (tensors[f"{name}.lora_{which}.weight"].double() for which in "AB")
        layer = modules[name.removeprefix("base_model.model.")]
        with torch.no_grad():
            layer.weight.copy_(layer.weight.double() + scale * (b @ a).to(layer.weight.device))
    return found


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    """The tokens of Hugging Face's `generate()`."""
    found = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, use_cache=True)
    return found[0, len(prompt) :].tolist()
