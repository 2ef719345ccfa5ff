"""Tiny random encoder-decoder models, inputs for their encoders, and the tokens that `generate()` gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

__all__ = ["FAMILIES", "NEW", "config_of", "expected", "input_of", "reference", "tiny"]

NEW = 8
_BART: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 128,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_BIG_BIRD = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
_LED = {
    "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128, "attention_window": 8,
}  # fmt: skip
_MOE = {"num_experts": 4, "expert_capacity": 64}
_AUDIO = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "t5": _T5,
    "whisper": {name: value for name, value in (_BART | _AUDIO).items() if name != "max_position_embeddings"},
    "bigbird_pegasus": _BART | _BIG_BIRD,
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "led": {name: value for name, value in (_BART | _LED).items() if name != "max_position_embeddings"},
    "longt5": {**_T5, "local_radius": 7},
    "m2m_100": _BART,
    "marian": _BART,
    "mbart": _BART,
    "mt5": _T5,
    "mvp": _BART,
    "nllb-moe": {**_BART, **_MOE, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "pegasus": _BART,
    "pegasus_x": {**_BART, "block_size": 16, "num_global_tokens": 4},
    "plbart": _BART,
    "switch_transformers": {**_T5, **_MOE, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "umt5": _T5,
}


def config_of(family: str, **changes: Any) -> Any:
    """The config of a checkpoint with encoder and decoder."""
    return tiny(family, **changes).config


def tiny(family: str, **changes: Any) -> Any:
    """A model in float32, with weights large enough that its tokens depend on all that it reads."""
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    auto = (
        transformers.AutoModelForSpeechSeq2Seq if family == "whisper" else transformers.AutoModelForSeq2SeqLM
    )
    model = auto.from_config(config, dtype=torch.float32).eval()
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                is_cross = any(
                    part in name for part in ("encoder_attn", "EncDecAttention", "cross_attention")
                )
                weight.normal_(0, 0.6 if is_cross else 0.3, generator=generator)
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    return model


def input_of(family: str, seed: int, tokens: int = 30) -> Any:
    """The input of an encoder: token ids, or the frames of a clip."""
    generator = torch.Generator().manual_seed(seed)
    if family == "whisper":
        return torch.randn(8, 40, generator=generator) * 3
    return torch.randint(3, 60, (tokens,), generator=generator).tolist()


def expected(family: str, model: Any, given: Any, decoder: Sequence[int] = (), new: int = NEW) -> list[int]:
    """Greedy tokens of the decoder, from transformers' own loop. They begin with those that it was given."""
    return reference(family, model, given, decoder, new)[0]


def reference(
    family: str, model: Any, given: Any, decoder: Sequence[int] = (), new: int = NEW
) -> tuple[list[int], list[float]]:
    """The tokens that `expected` returns, and the log-probabilities of the new ones."""
    inputs: dict[str, Any] = {"input_features": given[None]} if family == "whisper" else {}
    if family != "whisper":
        inputs["input_ids"] = torch.tensor([given])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if decoder:
        inputs["decoder_input_ids"] = torch.tensor([list(decoder)])
    if family == "bigbird_pegasus":  # a short text would change the attention of all later texts
        model.get_encoder().set_attention_type(model.config.attention_type)
    with torch.inference_mode():  # Whisper's own generate() also decides on languages and time stamps
        found = transformers.GenerationMixin.generate(
            model, **inputs, max_new_tokens=new, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    tokens = found.sequences[0].tolist()
    logprobs = torch.cat(found.logits).log_softmax(-1).gather(1, found.sequences[0, -new:, None])[:, 0]
    return tokens, logprobs.tolist()
