"""All changes for single model families. A row states how a family differs from most models, and what kvloom
does.

| family                   | difference                               | solution                               |
|--------------------------|------------------------------------------|----------------------------------------|
| DeepSeek (MLA)           | caches latents, but its attention        | attention in latent space              |
|                          | expects expanded keys and values         | (`absorb_latent`)                      |
| longrope, dynamic rope   | rotary frequencies depend on the longest | frequencies are chosen once            |
| (Phi-3, Phi-4, …)        | sequence of a step                       | (`fix_rope_frequencies`)               |
| GPT-2, BERT, …           | check every step's tokens for padding,   | the check is disabled (`prepare`)      |
|                          | and warn                                 |                                        |
| Granite hybrids, windows | sliding layers need a mask that the      | an empty mask for every layer kind     |
|                          | model does not make                      | (`add_mask_names`)                     |
| MiniMax                  | its mixer has no function that a kernel  | the mixer gets a new forward           |
|                          | could replace                            | (`scans.lightning_forward`)            |
| Llama 3.2 Vision         | attends to images in separate layers     | these layers read image pages          |
|                          |                                          | (`cross_attention`)                    |
| Gemma 3n and 4           | some layers read the K and V of an       | they get the number of that layer      |
|                          | earlier layer                            | (`name_kv_sources`)                    |
| Bloom, Falcon, …         | attention is inside a module, or adds a  | the model runs with transformers' own  |
|                          | bias or a mask                           | cache (`separation_reason`)            |
| BART, T5, Whisper, …     | the decoder also reads the output of an  | the encoder's K and V are media pages; |
|                          | encoder                                  | see `packed_decoder`                   |
| XLNet, Reformer, …       | the probe (`loading.probe`) would state  | refused by name (`REFUSED_FAMILIES`)   |
|                          | a misleading reason                      |                                        |
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from .latents import absorb
from .mixers import is_mixer
from .packed_decoder import packing_refusal

__all__ = [
    "REFUSED_FAMILIES",
    "absorb_latent",
    "add_mask_names",
    "calls_registry",
    "fix_rope_frequencies",
    "keep_latents",
    "keeps_latents",
    "prepare",
    "refusal_reason",
    "separation_reason",
    "up_projection",
]

FIXED_ROPE = "settled"
"""A rope type that transformers does not update, so the chosen frequencies stay fixed."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""The rope types whose frequencies transformers updates."""
INDEXER = "an indexer selects the tokens that its layers read"
_NOT_CAUSAL = "earlier tokens attend to later ones, so the K and V of a text change with each new token"
_CODEBOOKS = "its tokens are frames of sound, with one number from each of several codebooks"
_DRAFT = "it reads the K and V of another model, for which it drafts tokens"
REFUSED_FAMILIES = {
    "blt": "it groups bytes into patches, and its layers store patches, not tokens",
    "cpmant": "it puts tokens of its own before each text",
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
    "prophetnet": "it computes a prompt differently from the same tokens one after the other",
    "reformer": "its cache has hidden states in hash buckets, and no K and V",
    "xlm": _NOT_CAUSAL,
    "xlnet": _NOT_CAUSAL,
}
"""Model types that cannot run, and the reason. A type is listed only if the probe would give a misleading reason."""
_OTHER_STATES = "it keeps its states in a place of its own"
SEPARATE: dict[str, str] = {
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "openai-gpt": "its modeling code has no cache",
    "recurrent_gemma": _OTHER_STATES,
    "rwkv": _OTHER_STATES,
    "whisper": "it counts the positions of tokens itself",
    "xlstm": _OTHER_STATES,
    "axk2": INDEXER,
    "deepseek_v32": INDEXER,
    "deepseek_v4": "its layers read compressed tokens",
    "diffllama": "each of its layers attends twice",
    "doge": "its layers add masks that depend on the values of tokens",
    "git": "its attention is written inside its modules",
    "glm_moe_dsa": INDEXER,
    "hrm_text": "its layers run several times, each time with K and V of their own",
    "hy_v4": INDEXER,
    "minimax_m3_vl_text": INDEXER,
    "zamba": "its recurrent layers have heads, for which there is no kernel",
    "zamba2": "layers share one attention module",
    "zaya": "its layers have convolutions over queries and keys, for which there is no kernel",
    "jetmoe": "it assigns query heads to KV heads in its own order",
    "inkling_text": "its layers add a bias to attention",
}
"""Model types that call the attention registry, but cannot run on packed tokens, and the reason."""


def refusal_reason(config: Any) -> str | None:
    """Return the reason why a family is refused by name, or None."""
    if getattr(config, "has_lora_adapter", False):  # Granite Speech
        return (
            "its checkpoint has a LoRA adapter that only prompts with audio use: move the adapter to another folder, "
            "set has_lora_adapter to false in config.json, and serve it with lora NAME=FOLDER"
        )
    return REFUSED_FAMILIES.get(config.model_type) or REFUSED_FAMILIES.get(
        config.get_text_config(decoder=True).model_type
    )


def calls_registry(model: Any) -> bool:
    """Return whether a model's attention code uses transformers' attention registry."""
    return any(
        "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[cls.__module__])
        for cls in {type(module) for module in model.modules()}
        if cls.__module__.startswith("transformers.models.")
    )


def separation_reason(model: Any) -> str | None:
    """Return the reason why a model cannot compute the packed sequences of a step, or None if it can. If there is
    a reason, the model runs with transformers' own cache (`own_cache`)."""
    if not hasattr(model, "get_input_embeddings"):  # a draft head is not a transformers model
        return None
    if model.config.is_encoder_decoder:
        return packing_refusal(model)
    reason = SEPARATE.get(model.config.get_text_config().model_type)
    if reason is not None:
        return reason
    if not (_takes(model, "cache_params") or _takes(model, "position_ids")):
        decoder = model.get_decoder()  # an audio model may pass keywords on to its text model
        if decoder is model or not _takes(decoder, "position_ids"):
            return "it counts the positions of tokens itself"
    if not calls_registry(model) and not any(is_mixer(module) for module in model.modules()):
        return "its attention is written inside its modules"
    return None


def _takes(module: Any, argument: str) -> bool:
    return argument in inspect.signature(module.forward).parameters


def prepare(model: Any, context: int | None = None) -> None:
    """Prepare a model to run on pages or on the meta device. Repeated calls are allowed."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _nothing
    fix_rope_frequencies(model, context)
    add_mask_names(model)
    name_kv_sources(model)


def name_kv_sources(model: Any) -> None:
    """Set `kv_source` in the attention modules of layers without K and V of their own. `kv_source` is the number of
    the layer whose K and V the module reads. This is the last layer of the same kind that has K and V. Repeated
    calls are allowed."""
    config = model.config.get_text_config()
    count = getattr(config, "num_kv_shared_layers", None) or 0
    if not count:
        return
    kinds = config.layer_types
    own = len(kinds) - count
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer >= own and hasattr(module, "q_proj"):
            module.kv_source = max(i for i in range(own) if kinds[i] == kinds[layer])


def _nothing(*_: Any, **__: Any) -> None:
    pass


def keep_latents(module: Any) -> None:
    """Make an MLA module pass latents to attention, without expanding them to keys and values. kvloom's attention reads
    latents from pages."""
    if hasattr(module, "expand_kv"):
        module.expand_kv = _latents_only


def _latents_only(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotated


def add_mask_names(model: Any) -> None:
    """Give a Granite hybrid an empty mask for every layer kind. Its own forward makes no mask for sliding layers
    and would fail. Repeated calls are allowed."""
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
    """Fix rotary frequencies that would otherwise depend on the longest sequence of a batch. Stored keys must not
    depend on other requests.

    With longrope, chooses the long frequencies if `context` exceeds the original training length. The default `context`
    is the model's limit. With the long frequencies, short requests differ from `generate()`. Later calls may pass
    another `context`. With dynamic rope scaling, the frequencies are those of the model's limit, which no sequence
    exceeds. They equal those of shorter sequences.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind not in LENGTH_DEPENDENT and not (kind == FIXED_ROPE and context is not None):
                continue
            config = module.config
            parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            length = None
            if parameters["rope_type"] == "longrope":
                first = int(parameters["original_max_position_embeddings"])
                length = first + ((context or config.max_position_embeddings) > first)
            chosen, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
                config, seq_len=length, layer_type=layer_type
            )
            name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
            old = getattr(module, name)
            module.register_buffer(name, chosen.to(old.device, old.dtype), persistent=False)
            module.rope_type = (
                FIXED_ROPE if layer_type is None else {**module.rope_type, layer_type: FIXED_ROPE}
            )


def keeps_latents(module: Any) -> bool:
    """Return whether an attention module caches one latent per token and projects keys and values from it."""
    return hasattr(module, "kv_b_proj")


def up_projection(module: Any) -> torch.Tensor:
    """Return the weights [heads, dims, rank] that project a latent to the keys and values of each head, without the
    rotated part of keys."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)


def absorb_latent(module: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors for MLA attention in latent space: the queries multiplied by the up-projection of keys,
    and the up-projection of values [heads, dim, rank]."""
    weight = up_projection(module)
    return absorb(query, weight, module.qk_rope_head_dim), weight[:, module.qk_nope_head_dim :]
