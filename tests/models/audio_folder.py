"""A folder with a tiny audio model that has a tokenizer, a processor and a chat template."""

from __future__ import annotations

import wave
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.engine.made_tokenizers import byte_level
from tests.models.audio_prompts import TINY, audio_model

__all__ = ["TEMPLATE", "audio_folder", "recording", "wav"]

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'audio' %}<|AUDIO|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
RATE = 16_000
SECONDS = 1
"""Length to which the tiny feature extractor pads a clip: 40 frames."""


def audio_folder(folder: Path, template: str = TEMPLATE) -> tuple[Path, Any, Any]:
    """Write a tiny Qwen2-Audio; return its folder, model and processor."""
    path = folder / "tiny-qwen2-audio"
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>"]})
    tokenizer.chat_template = template
    text = {**TINY["qwen2_audio"]["text_config"], "vocab_size": len(tokenizer)}
    token = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    model = audio_model("qwen2_audio", text_config=text, audio_token_index=token)
    features = transformers.WhisperFeatureExtractor(
        feature_size=8,
        sampling_rate=RATE,
        hop_length=400,
        chunk_length=SECONDS,
        n_fft=400,
        return_attention_mask=True,
    )
    processor = transformers.Qwen2AudioProcessor(
        features,
        tokenizer,
        chat_template=template,
        audio_token="<|AUDIO|>",
        audio_bos_token="[",
        audio_eos_token="]",
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path, model, processor


def recording(seed: int, seconds: float = 0.7, rate: int = RATE) -> Any:
    """Return samples of noise."""
    return np.random.default_rng(seed).uniform(-0.9, 0.9, round(seconds * rate)).astype(np.float32)


def wav(samples: Any, rate: int = RATE, width: int = 2) -> bytes:
    """Return a WAV file of samples [samples] or [channels, samples]."""
    rows = np.atleast_2d(samples).T
    scaled = np.clip(
        np.round(rows * (1 << (8 * width - 1))), -(1 << (8 * width - 1)), (1 << (8 * width - 1)) - 1
    )
    values = scaled.astype(np.int64) + (128 if width == 1 else 0)
    raw = values.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width]
    target = BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(rows.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw.tobytes())
    return target.getvalue()
