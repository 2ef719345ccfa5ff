"""EAGLE-3 heads: folders with a config.json and safetensors, trained for one target.

    h = fc(concat(hidden states of the target after a low, a middle and a high layer))
    x = h of token n - 1 + attention(concat(norm(embedding of token n), norm(h of token n - 1)))
    x = x + mlp(norm(x))      logits = output matrix(norm(x))

x is the head's own hidden state. For tokens that the target has not computed, x takes the place of h.

| in the folder                         | meaning                                                                                       |
|---------------------------------------|-----------------------------------------------------------------------------------------------|
| `fc`, `midlayer.*`, `norm`, `lm_head` | the weights above; the layer is a Llama layer with inputs of double size                      |
| `d2t`                                 | difference between target token id and draft token id, for each token of the draft vocabulary |
| `t2d`                                 | which target tokens are in the draft vocabulary; not needed                                   |
| `embed_tokens`                        | embeddings of the head; if missing, the embeddings of the target are used                     |

By default, hidden states are read after 2 layers of the target, after half of its layers, and before its last 3 layers.
The config field `eagle_aux_hidden_state_layer_ids` overrides this list. In a list at the top level of the config, a
value n means: after the first n layers. In a list inside `eagle_config`, it means: after the layer with index n,
counted from 0.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvloom.models.loading import BUILDING
from kvloom.models.paged import prepare
from kvloom.models.specs import ModelError

from .head import Head, States, collect_outputs, own_or_shared
from .tensors import read_tensors

__all__ = ["EagleHead", "load_eagle_head", "new_eagle_head"]

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads two inputs for each token: the token's embedding, and the hidden state of
    the token before it. The layer gets both as one concatenated tensor."""

    def __init__(self, layer: Any, config: Any) -> None:
        """Take over the modules of a Llama layer (`layer`)."""
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self._residual_is_normed = bool(getattr(config, "norm_before_residual", False))
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            new = nn.Linear(2 * config.hidden_size, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, new.to(old.weight.dtype))

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
        embeddings, states = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(states)
        joined = torch.cat((self.input_layernorm(embeddings), normed), -1)
        attended, _ = self.self_attn(hidden_states=joined, **named)
        x: torch.Tensor = (normed if self._residual_is_normed else states) + attended
        return torch.add(x, self.mlp(self.post_attention_layernorm(x)))


class EagleHead(Head):
    """An EAGLE-3 head. `after` contains numbers of target layers. For each number n, the head reads the hidden
    states after the first n layers of the target."""

    target_ids: torch.Tensor | None
    """The target's id of each token in the draft vocabulary. None if the vocabularies are the same."""

    def __init__(self, model: Any, target_size: int, after: Sequence[int], vocabulary: int) -> None:
        size = model.config.hidden_size
        super().__init__(model, size)
        self.fc = nn.Linear(target_size * len(after), size, bias=False, dtype=model.dtype)
        self.after, self._vocabulary = list(after), vocabulary
        self.register_buffer("target_ids", None)

    def join(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.model.get_input_embeddings()(tokens), before), -1)

    @contextmanager
    def target_states(self, decoder: Any) -> Iterator[States]:
        with collect_outputs([decoder.layers[count - 1] for count in self.after], copies=True) as found:
            yield lambda: self.fc(torch.cat(found, -1))

    @contextmanager
    def own_states(self) -> Iterator[States]:
        with collect_outputs([self.model.get_decoder().layers[-1]]) as found:
            yield lambda: found[-1]

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        if self.target_ids is None:
            return logits
        every = logits.new_full((len(logits), self._vocabulary), -torch.inf)
        return every.index_copy_(1, self.target_ids, logits)


def new_eagle_head(fields: dict[str, Any], target: Any, vocabulary: int) -> EagleHead:
    """Return a head with random weights on the CPU. `fields` are the fields of the head's config. `vocabulary` is
    the number of tokens that the head can propose."""
    text, weight = target.config.get_text_config(), target.get_output_embeddings().weight
    with BUILDING:
        model = _one_layer_model(fields, text, vocabulary, weight.dtype)
        return EagleHead(model, text.hidden_size, _layer_counts(fields, text.num_hidden_layers), len(weight))


def load_eagle_head(folder: str, target: Any) -> EagleHead:
    """Load an EAGLE-3 head on the device and in the dtype of `target`. Raises ModelError if the head does not fit
    the target."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"speculate eagle: {folder} is not a folder with a config.json: give an EAGLE-3 folder"
        )
    fields = _fields(path)
    tensors = read_tensors(path, _renamed)
    if "fc.weight" not in tensors or not any("hidden_norm" in name for name in tensors):
        raise ModelError(
            f"speculate eagle: {folder} has no EAGLE-3 weights (fc, midlayer): other heads are not known"
        )
    output, embeddings = target.get_output_embeddings(), target.get_input_embeddings()
    weight = output.weight
    head = new_eagle_head(fields, target, len(tensors.get("lm_head.weight", weight)))
    model = head.model
    offsets, own = tensors.pop("d2t", None), tensors.pop("embed_tokens.weight", None)
    has_output = "lm_head.weight" in tensors
    named = {name if name.startswith("fc.") else f"model.{name}": x for name, x in tensors.items()}
    _assign(head, named, folder)
    head.to(weight.device)
    if offsets is not None:
        head.target_ids = offsets.to(weight.device) + torch.arange(len(offsets), device=weight.device)
    _check_vocabulary(head, len(model.lm_head.weight), folder)
    prepare(model)
    model.config.vocab_size = len(embeddings.weight)
    model.set_input_embeddings(own_or_shared(embeddings, own))
    if not has_output:
        model.set_output_embeddings(output)
    head.requires_grad_(False).eval()
    return head


def _fields(path: Path) -> dict[str, Any]:
    """Return the fields of a head's config, together with the fields of a nested layer config."""
    try:
        fields: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return {**fields, **fields.pop("transformer_layer_config", {})}
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / 'config.json'} is not a config: {error}") from error


def _renamed(name: str) -> str | None:
    """Return the name that a head's weight has in a Llama model with one layer. Return None for a weight that is
    not needed."""
    if name == "t2d":
        return None
    name = re.sub(r"^(midlayer|layers\.0)\.", "model.layers.0.", name)
    return f"model.{name}" if name == "norm.weight" else name


def _one_layer_model(fields: dict[str, Any], text: Any, vocabulary: int, dtype: torch.dtype) -> Any:
    """Return a Llama model whose one layer is an `EagleLayer`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    left_out = {"architectures", "auto_map", "model_type", "torch_dtype", "dtype", "quantization_config"}
    given = {name: value for name, value in fields.items() if name not in left_out}
    given |= {
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": text.max_position_embeddings,
    }
    config = LlamaConfig(**given)
    model = LlamaForCausalLM._from_config(config, dtype=dtype)
    model.model.layers[0] = EagleLayer(model.model.layers[0], config)
    return model


def _layer_counts(fields: dict[str, Any], layers: int) -> list[int]:
    """Return a sorted list of layer counts. A count n means that hidden states are read after the first n layers
    of the target. Raises ModelError for an invalid count."""
    within = (fields.get("eagle_config") or {}).get(LAYER_IDS)
    counts = fields.get(LAYER_IDS) or (within and [last + 1 for last in within])
    counts = counts or [2, layers // 2, layers - 3]
    if not all(isinstance(count, int) and 1 <= count <= layers for count in counts):
        raise ModelError(
            f"speculate eagle reads hidden states after {counts} layers, and the target has {layers}"
        )
    return sorted(counts)


def _assign(head: EagleHead, tensors: dict[str, torch.Tensor], folder: str) -> None:
    """Copy weights into a head. Raises ModelError if weights are missing, unknown, or of another size."""
    try:
        found = head.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ModelError(
            f"speculate eagle: {folder} does not fit its config or the target: {error}"
        ) from error
    shared = {"model.model.embed_tokens.weight", "model.lm_head.weight"}
    wrong = [*found.unexpected_keys, *(name for name in found.missing_keys if name not in shared)]
    if wrong:
        kind = "has an unknown" if found.unexpected_keys else "lacks the"
        raise ModelError(f"speculate eagle: {folder} {kind} weight {wrong[0].removeprefix('model.')}")


def _check_vocabulary(head: EagleHead, size: int, folder: str) -> None:
    """Raise ModelError if the draft vocabulary is not a part of the target's vocabulary."""
    ids, vocabulary = head.target_ids, head._vocabulary
    if ids is None and size == vocabulary:
        return
    if ids is None or len(ids) != size or not bool(((ids >= 0) & (ids < vocabulary)).all()):
        raise ModelError(
            f"speculate eagle: the {size} tokens of {folder} are not tokens of the target, which has {vocabulary}: "
            "use a head that was trained for this target"
        )
