"""Texts that identify the weights of a model and of a LoRA adapter. Pages that were computed with other weights are
never loaded.

An identity covers the config and a digest of the weight files. A folder and a hub id of the same files have the
same identity.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom.adapters.common import weights_digest

from .version import VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["adapter_identity", "model_identity"]

_IRRELEVANT_FIELDS = ("_name_or_path", "transformers_version", "architectures", "use_cache", "_commit_hash")


def model_identity(vllm_config: VllmConfig) -> str:
    """Return a text that identifies the model. Two models have the same text only if they compute the same K and V.
    Reads about 1 MiB of each weight file. Raises ValueError if no weight files are found.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _IRRELEVANT_FIELDS}
    facts: dict[str, Any] = {
        "config": json.dumps(config, sort_keys=True, default=str),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "vllm": VERSION.installed_minor(),
    }
    if load.load_format == "dummy":
        facts["weights"] = f"dummy {model.model} {model.seed}"
    else:
        facts["weights"] = weights_digest(model.model, model.revision)
    if (
        vllm_config.speculative_config is not None
        and vllm_config.speculative_config.draft_model_config is not None
    ):
        draft = vllm_config.speculative_config.draft_model_config
        if Path(draft.model).exists():  # its pages may be in the same groups
            facts["draft"] = weights_digest(draft.model, draft.revision)
    text = json.dumps(facts, sort_keys=True)
    return f"vllm {blake2b(text.encode(), digest_size=16).hexdigest()}"


def adapter_identity(name: str, path: str) -> str:
    """Return a text that identifies a LoRA adapter by its name and its files. Another version of the adapter with the
    same name has another identity.
    """
    return f"{name} {weights_digest(path, None)}"
