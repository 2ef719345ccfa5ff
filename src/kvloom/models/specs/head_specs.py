"""The layer specs of draft heads (EAGLE-3, multi-token prediction), from configs. A head is one decoder layer with full
attention. Its pages also store one hidden state of the target for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvloom.core import Field

from .catalog import load_config
from .config_reading import ModelError, dtype_name
from .layer_specs import ModelSpec, kv_dtypes, model_spec, text_config, with_draft

__all__ = ["HIDDEN_STATE", "with_head"]

HIDDEN_STATE = "hidden"
"""Name of the field that stores the target's hidden state of each token."""


def with_head(
    target: ModelSpec, config: Mapping[str, Any], head: str, kv_dtype: str | None = None
) -> ModelSpec:
    """Return one spec with the layers of a target and of its draft head. `config` is the config of the target, and
    `head` is "mtp" or "eagle=FOLDER". Raises ModelError for a head that cannot be read."""
    kind, _, folder = head.partition("=")
    if head != "mtp" and not (kind == "eagle" and folder):
        raise ModelError(f"head {head!r} is not known: use mtp or eagle=FOLDER")
    fields = text_config(config)
    fields.setdefault("dtype", config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    limit = fields.get("max_position_embeddings")
    if kind == "eagle":
        own = load_config(folder)
        fields = {**own, **own.get("transformer_layer_config", {}), "dtype": fields["dtype"]}
        fields |= {"model_type": "llama", "max_position_embeddings": limit}
    elif fields.get("num_nextn_predict_layers") == 0:
        raise ModelError(f"{target.name} has no multi-token-prediction heads (num_nextn_predict_layers is 0)")
    elif fields.get("layer_types") is not None:
        fields["layer_types"] = ["full_attention"]
    fields["num_hidden_layers"] = 1
    spec = model_spec(fields, kind, kv_dtypes(kv_dtype)[0])
    if any(layer.unit == "state" for layer in spec.layers.values()):
        raise ModelError(f"the layers of {target.name} have states, and a head has attention")
    return with_draft(
        target, spec, Field(HIDDEN_STATE, (int(fields["hidden_size"]),), dtype_name(fields["dtype"]))
    )
