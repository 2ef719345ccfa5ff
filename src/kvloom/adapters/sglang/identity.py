"""The text that identifies a model in a key. Pages of another model, dtype or quantisation are never loaded."""

from __future__ import annotations

import json
import logging
from typing import Any

from sglang.srt.runtime_context import get_server_args

from kvloom.adapters.common import model_folder, weights_digest

from .version import VERSION

__all__ = ["model_identity"]

log = logging.getLogger("kvloom.sglang")
_ARGUMENTS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "json_model_override_args",
)
"""Arguments of SGLang's server that change the K and V of a token."""


def model_identity(served_name: str | None, model: str | None) -> str:
    """Return a text that identifies the model. Two models have the same text only if they compute the same K and V.
    `model` replaces the model path of SGLang's server. Reads about 1 MiB of each weight file.
    """
    try:
        arguments: Any = get_server_args()
    except ValueError:  # a process without a server
        arguments = None
    path = model or getattr(arguments, "model_path", None) or served_name or ""
    facts = {name: str(getattr(arguments, name, None)) for name in _ARGUMENTS}
    facts |= {"served name": str(served_name), "sglang": VERSION.installed_minor()}
    if getattr(arguments, "load_format", None) == "dummy":
        facts["weights"] = f"dummy {path} {getattr(arguments, 'random_seed', None)}"
    else:
        facts["weights"] = _weights(path, getattr(arguments, "revision", None))
    draft = getattr(arguments, "speculative_draft_model_path", None)
    if draft:
        facts["draft"] = _weights(draft, getattr(arguments, "speculative_draft_model_revision", None))
    return f"sglang {json.dumps(facts, sort_keys=True)}"


def _weights(path: str, revision: str | None) -> str:
    """Return the config and a digest of the weights, as one text. If weight files are missing, log a warning and return
    the path instead.
    """
    try:
        digest = weights_digest(path, revision)
        config = model_folder(path, revision) / "config.json"
        return f"{digest} {config.read_text() if config.exists() else ''}"
    except (ValueError, OSError) as error:
        log.warning("pages are identified by the name %r only, not by the weights: %s", path, error)
        return f"name {path}"
