"""Reads Hugging Face configs and returns layer specs, which describe the data that each layer stores. Needs no
torch, weights or network.

| file           | content                                                                        |
|----------------|--------------------------------------------------------------------------------|
| layer_specs    | `model_spec`: a config to the specs of its layers                              |
| families_table | one row for each model family                                                  |
| config_reading | the functions that the table uses: layer patterns, fields of tokens and states |
| head_specs     | `with_head`: the layer of a draft head, beside the target's                    |
| catalog        | models known by name, configs on disk, embedded models                         |
"""

from .catalog import embedded, embedded_models, folder_of, is_gguf, known_models, load_config, load_spec
from .config_reading import ModelError
from .families_table import ENCODER_DECODERS, FAMILIES
from .head_specs import HIDDEN_STATE, with_head
from .layer_specs import (
    DRAFT_PREFIX,
    KV_DTYPES,
    KV_KINDS,
    KVDtype,
    Media,
    ModelSpec,
    kv_dtypes,
    model_spec,
    with_draft,
)

__all__ = [
    "DRAFT_PREFIX",
    "ENCODER_DECODERS",
    "FAMILIES",
    "HIDDEN_STATE",
    "KV_DTYPES",
    "KV_KINDS",
    "KVDtype",
    "Media",
    "ModelError",
    "ModelSpec",
    "embedded",
    "embedded_models",
    "folder_of",
    "is_gguf",
    "known_models",
    "kv_dtypes",
    "load_config",
    "load_spec",
    "model_spec",
    "with_draft",
    "with_head",
]
