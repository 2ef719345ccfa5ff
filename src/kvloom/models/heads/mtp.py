"""Multi-token-prediction heads. Some checkpoints contain such a head in addition to the target's layers.

    x = projection(concat(norm(embedding of token n), norm(hidden state of token n - 1)))
    hidden state = norm(decoder layer(x))      logits = target's output matrix(hidden state)

| weights of                | DeepSeek-V3, GLM-4.5: `model.layers.N.` (N layers)  | Qwen3-Next: `mtp.`      |
|---------------------------|-----------------------------------------------------|-------------------------|
| projection                | `eh_proj`                                           | `fc`                    |
| norm of embeddings        | `enorm`                                             | `pre_fc_norm_embedding` |
| norm of hidden states     | `hnorm`                                             | `pre_fc_norm_hidden`    |
| norm after the layer      | `shared_head.norm`                                  | `norm`                  |
| decoder layer             | all others                                          | `layers.0`              |
| embeddings, output matrix | `embed_tokens`, `shared_head.head`; or the target's | the target's            |

transformers does not load these weights with the target. The layer has the target's architecture, with full
attention. For further draft tokens, the head runs again on its own output. If there are several heads, only the
first is used.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvloom.models.loading import BUILDING, progress_bars
from kvloom.models.paged import checkpoint_of, prepare
from kvloom.models.sharding import whole_of
from kvloom.models.specs import ModelError

from .head import Head, States, collect_outputs, own_or_shared
from .tensors import read_tensors

__all__ = ["MTPHead", "load_mtp_head"]

_NAMES = {
    "eh_proj.weight": "projection",
    "enorm.weight": "embedding_norm",
    "hnorm.weight": "state_norm",
    "shared_head.norm.weight": "model.norm.weight",
    "shared_head.head.weight": "output",
    "embed_tokens.weight": "embedding",
    "mtp.fc.weight": "projection",
    "mtp.pre_fc_norm_embedding.weight": "embedding_norm",
    "mtp.pre_fc_norm_hidden.weight": "state_norm",
    "mtp.norm.weight": "model.norm.weight",
}
"""The name that each weight of a head has in `MTPHead`. Weights that are not listed belong to the head's decoder
layer."""
_NEEDED = ("projection", "embedding_norm", "state_norm", "model.norm.weight")


class MTPHead(Head):
    """A multi-token-prediction head. It has its own layer and norms, and shares matrices with the target."""

    def __init__(self, model: Any, tensors: dict[str, torch.Tensor]) -> None:
        norm = model.get_decoder().norm
        super().__init__(model, len(norm.weight))
        self.embedding_norm, self.state_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.projection = nn.Linear(1, 1, bias=False)
        for name in ("embedding_norm", "state_norm", "projection"):
            getattr(self, name).weight = nn.Parameter(tensors[name].to(norm.weight), requires_grad=False)
        self.requires_grad_(False).eval()

    def join(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        embeddings = self.model.get_input_embeddings()(tokens)
        both = torch.cat((self.embedding_norm(embeddings), self.state_norm(before)), -1)
        joined: torch.Tensor = self.projection(both)
        return joined

    @contextmanager
    def target_states(self, decoder: Any) -> Iterator[States]:
        with collect_outputs([decoder]) as found:
            yield lambda: found[-1]

    @contextmanager
    def own_states(self) -> Iterator[States]:
        with collect_outputs([self.model.get_decoder()]) as found:
            yield lambda: found[-1]


def load_mtp_head(target: Any) -> MTPHead:
    """Load the head of a target's checkpoint on the target's device and in its dtype. Raises ModelError if the
    checkpoint has no head."""
    name = str(getattr(target.config, "_name_or_path", "") or "the model")
    try:
        folder = checkpoint_of(target)
    except ModelError:
        raise ModelError(
            f"speculate mtp reads heads from a checkpoint, and {name} was not loaded from one"
        ) from None
    whole = whole_of(target)
    config = _layer_config(target.config if whole is None else whole.config)
    tensors = read_tensors(folder, lambda key: _renamed(key, target.config.num_hidden_layers))
    missing = [key for key in _NEEDED if key not in tensors]
    if len(missing) == len(_NEEDED):
        raise ModelError(
            f"speculate mtp: {name} has no multi-token-prediction heads (weights model.layers."
            f"{target.config.num_hidden_layers}.eh_proj or mtp.fc): use speculate suffix or draft=MODEL"
        )
    if missing:
        raise ModelError(f"speculate mtp: the head of {name} lacks the weights of its {', '.join(missing)}")
    _set_experts(config, any(".mlp.experts." in key for key in tensors))
    embeddings, output = target.get_input_embeddings(), target.get_output_embeddings()
    weight = output.weight
    with BUILDING, progress_bars(False):
        model, info = type(target).from_pretrained(
            None,
            config=config,
            state_dict={key: tensor for key, tensor in tensors.items() if key.startswith("model.")},
            dtype=weight.dtype,
            output_loading_info=True,
        )
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    lacking = sorted(set(info["missing_keys"]) - shared) + sorted(info["unexpected_keys"])
    if lacking or info["mismatched_keys"]:
        first = lacking[0] if lacking else sorted(info["mismatched_keys"])[0][0]
        raise ModelError(f"speculate mtp: the head of {name} does not fit its config: {first}")
    model.to(weight.device)
    prepare(model)
    model.config.vocab_size = target.config.vocab_size
    model.set_input_embeddings(own_or_shared(embeddings, tensors.get("embedding")))
    model.set_output_embeddings(own_or_shared(output, tensors.get("output")))
    return MTPHead(model, tensors)


def _renamed(key: str, layers: int) -> str | None:
    """Return the name of a checkpoint's weight in our modules, or None if the weight does not belong to the head.
    `layers` is the number of layers of the target."""
    own = f"model.layers.{layers}."
    if key.startswith("mtp."):
        if key in _NAMES:
            return _NAMES[key]
        return (
            re.sub(r"^mtp\.layers\.0\.", "model.layers.0.", key) if key.startswith("mtp.layers.0.") else None
        )
    if not key.startswith(own):
        return None
    part = key.removeprefix(own)
    return _NAMES.get(part, f"model.layers.0.{part}")


def _layer_config(config: Any) -> Any:
    """Return the config of a model with a single layer. The layer has the architecture of the target's layers. The
    vocabulary size is a placeholder, because the embeddings and the output matrix of the target are shared later."""
    if getattr(config, "quantization_config", None):
        raise ModelError("speculate mtp does not support quantised weights: use a checkpoint in bfloat16")
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    return config


def _set_experts(config: Any, has_experts: bool) -> None:
    """Set the config so that the layer of the head has experts. Without `has_experts`, the layer has a dense MLP
    instead. Each family has its own config fields for this choice, so all known fields are set."""
    fields: dict[str, Any] = {
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "mlp_only_layers": [] if has_experts else [0],
        "decoder_sparse_step": 1,
    }
    for name, value in fields.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
