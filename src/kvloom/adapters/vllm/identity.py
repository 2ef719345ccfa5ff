"""What identifies the weights of a model and of a LoRA adapter. Pages of other weights are never loaded.

An identity covers the config and, for every weight file, its size, its first bytes and SAMPLES samples of its other
bytes. A folder and a hub id with the same files have the same identity.
"""

from __future__ import annotations

import json
import logging
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .version import installed_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["adapter_identity", "model_identity", "weights_digest"]

log = logging.getLogger("kvloom.vllm")
SAMPLES = 64
SAMPLE_BYTES = 64
HEAD_BYTES = 1 << 20
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_IRRELEVANT_FIELDS = ("_name_or_path", "transformers_version", "architectures", "use_cache", "_commit_hash")


def model_identity(vllm_config: VllmConfig) -> str:
    """Return a text that differs between models whose keys and values could differ. Reads some KiB of each weight
    file. Raises ValueError if no identity can be found.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _IRRELEVANT_FIELDS}
    facts: dict[str, Any] = {
        "config": json.dumps(config, sort_keys=True, default=str),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "vllm": ".".join((installed_version() or "").split(".")[:2]),
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
    """Return the identity of a LoRA adapter: its name and its files. Another version under the same name has another
    identity.
    """
    return f"{name} {weights_digest(path, None)}"


def weights_digest(model: str, revision: str | None) -> str:
    """Return a digest of the weight files of a folder or hub id. Raises ValueError if there are none."""
    path = Path(model)
    if not path.exists():
        path = _snapshot(model, revision)
    files = [path] if path.is_file() else sorted(f for kind in WEIGHTS for f in path.glob(kind))
    if not files:
        raise ValueError(
            f"{model}: no weight files ({', '.join(WEIGHTS)}) identify the weights, so stored pages of other weights "
            "could be loaded: use a folder with weight files"
        )
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            digest.update(data.read(HEAD_BYTES))
            for number in range(SAMPLES):
                data.seek(size * number // SAMPLES)
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _snapshot(model: str, revision: str | None) -> Path:
    """Return the local folder of a hub id. vLLM has already downloaded the config and the weights."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise ValueError(
            f"{model}: the downloaded files are not found ({error}), so the weights have no identity: "
            "use the path of a local folder"
        ) from error
