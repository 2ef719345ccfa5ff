"""The exceptions: what single families need beyond the seams. Every one of them stands here, and nowhere else.

| family                     | what is different                                   | what is done                              |
|----------------------------|-----------------------------------------------------|-------------------------------------------|
| DeepSeek (MLA)             | caches latents, expects expanded keys and values    | attention in the latent space (`absorb_latent`)  |
| Phi-3 and -4 (longrope)    | rotary frequencies follow the longest row of a step | chosen once for a model (`fix_rope_frequencies`)   |
| GPT-2, BERT, …             | look for padding in every step's tokens, and warn   | they do not look (`prepare`)               |
| Granite hybrids, windows   | make no mask for layers of that kind, and look it up | a void one for every kind (`add_mask_names`) |
| MiniMax                    | no function to replace by a kernel of ours          | a forward of ours (`scans.lightning`)     |
| Llama 3.2 Vision           | attends to images in layers of their own            | read from pages of theirs (`crossing.py`) |
| RecurrentGemma, indexers   | nothing that looking at calls would explain well    | refused by name or field (`refusal_reason`)      |
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvloom.models.specs import ModelError

__all__ = [
    "absorb_latent",
    "add_mask_names",
    "calls_registry",
    "fix_rope_frequencies",
    "keeps_latents",
    "prepare",
    "refusal_reason",
]

FIXED_LONGROPE = "longrope, settled"
"""A rope type that transformers does not act upon."""
INDEXER = "it attends to tokens that an indexer of its own chooses, which is not supported yet"
REFUSED = {
    "recurrent_gemma": "it keeps its states in its modules and not in a cache, and begins them anew with every chunk",
    "deepseek_v4": INDEXER,
}


def refusal_reason(config: Any) -> str | None:
    """Why a family is refused by name, where looking at what it calls (`probe.examine`) would not say it well."""
    text = config.get_text_config()
    return REFUSED.get(text.model_type) or (INDEXER if getattr(text, "index_topk", None) else None)


def calls_registry(model: Any) -> bool:
    """Whether the code of a model's attention looks its function up in transformers' registry."""
    return any(
        "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[cls.__module__])
        for cls in {type(module) for module in model.modules()}
        if cls.__module__.startswith("transformers.models.")
    )


def prepare(model: Any, context: int | None = None) -> None:
    """What a model needs before it runs, here or on shapes alone. Harmless to repeat. Raises ModelError (`fix_rope_frequencies`)."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _nothing
    fix_rope_frequencies(model, context)
    add_mask_names(model)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def add_mask_names(model: Any) -> None:
    """Give a Granite hybrid a void mask for every kind of its layers: its forward makes none for sliding ones, though its
    layers take them. Harmless to repeat."""
    kinds = getattr(model.config, "layer_types", None) or ()
    if model.config.model_type != "granitemoehybrid" or "sliding_attention" not in kinds:
        return
    if getattr(model, "has_mask_names", False):
        return
    model.has_mask_names = True

    def name(_: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**keywords, "attention_mask": dict.fromkeys(kinds)}

    model.model.register_forward_pre_hook(name, with_kwargs=True)


def fix_rope_frequencies(model: Any, context: int | None = None) -> None:
    """Choose the frequencies of rotary positions that would change with the longest sequence in a batch: keys are kept, so
    a token's must not depend on who else is running. The long ones are chosen where `context` (the model's own limit if
    None) goes beyond the length it was first trained for; shorter requests then differ from `generate()`, which would use
    the short ones. Harmless to repeat; with another `context` it chooses anew. Raises ModelError where there is no such choice (dynamic scaling)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "dynamic":
                raise ModelError(
                    "its rotary frequencies change with the length of a batch (rope type dynamic): use yarn or linear"
                )
            if kind != "longrope" and not (kind == FIXED_LONGROPE and context is not None):
                continue
            config = module.config
            parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            first = int(parameters["original_max_position_embeddings"])
            long = (context or config.max_position_embeddings) > first
            chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](
                config, seq_len=first + 1 if long else first, layer_type=layer_type
            )
            name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
            old = getattr(module, name)
            module.register_buffer(name, chosen.to(old.device, old.dtype), persistent=False)
            module.rope_type = (
                FIXED_LONGROPE if layer_type is None else {**module.rope_type, layer_type: FIXED_LONGROPE}
            )


def keeps_latents(module: Any) -> bool:
    """Whether an attention module caches one latent a token and projects keys and values up from it."""
    return hasattr(module, "kv_b_proj")


def absorb_latent(module: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA in the latent space: queries times the keys' up-projection, and the values' up-projection [heads, dim, rank]."""
    weight = module.kv_b_proj.weight.view(query.shape[1], -1, module.kv_lora_rank)
    keys, values = torch.split(weight, [module.qk_nope_head_dim, module.v_head_dim], 1)
    nope, rope = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat((torch.einsum("thd,hdr->thr", nope, keys), rope), -1), values
