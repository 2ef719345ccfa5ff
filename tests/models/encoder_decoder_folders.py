"""Folders with a tiny BART and a tiny Whisper that have tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.engine.made_tokenizers import byte_level
from tests.models.tiny_encoder_decoders import tiny

__all__ = ["RATE", "SECONDS", "bart_folder", "whisper_folder"]

RATE, SECONDS = 8000, 1
_SPECIAL = [
    "<|endoftranscript|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|notimestamps|>",
]


def bart_folder(folder: Path) -> tuple[Path, Any, Any]:
    """Write a tiny BART; return its folder, model and tokenizer."""
    path, tokenizer = folder / "tiny-bart", byte_level()
    model = tiny("bart", vocab_size=len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path, model, tokenizer


def whisper_folder(folder: Path, hop: int = 400, ends: bool = False) -> tuple[Path, Any, Any]:
    """Write a tiny Whisper with windows of a second; return its folder, model and processor. A frame has `hop` samples.
    With `ends`, the model has an end-of-sequence token."""
    path, tokenizer = folder / "tiny-whisper", byte_level()
    features = transformers.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=RATE, hop_length=hop, chunk_length=SECONDS, n_fft=400
    )
    stamps = [f"<|{i * 0.02:.2f}|>" for i in range(features.nb_max_frames // 2 + 1)]
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL + stamps})
    end, start, english, german, transcribe, translate, without = tokenizer.convert_tokens_to_ids(_SPECIAL)
    model = tiny(
        "whisper", vocab_size=len(tokenizer), decoder_start_token_id=start,
        max_source_positions=features.nb_max_frames // 2,
    )  # fmt: skip
    settings = model.generation_config
    settings.lang_to_id = {"<|en|>": english, "<|de|>": german}
    settings.task_to_id = {"transcribe": transcribe, "translate": translate}
    settings.no_timestamps_token_id, settings.is_multilingual = without, True
    settings.suppress_tokens = [*range(3, 60), start, english, german, transcribe, translate, without]
    settings.begin_suppress_tokens = list(range(60, 120))
    if ends:
        settings.eos_token_id, settings.max_initial_timestamp_index = end, 5
    else:
        settings.suppress_tokens.append(end)
    settings.return_timestamps, settings._from_model_config = False, False
    model.save_pretrained(path)
    processor = transformers.WhisperProcessor(features, tokenizer)
    processor.save_pretrained(path)
    return path, model, processor
