"""Reads prompts of text, images and audio clips with the model's processor. The result is token ids with expanded
placeholders, and the tensors of each image and clip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .audio_clips import clip_samples

if TYPE_CHECKING:
    from kvloom.models.vision import Vision

__all__ = ["clip_frames", "clip_tensors", "encode_image_prompt", "load_processor"]

FRAME_MASKS = ("feature_attention_mask", "input_features_mask")
"""Names of the mask that separates the frames of a clip from padding, in the output of processors."""


def load_processor(model: str) -> Any:
    """Load the processor of a folder or hub id. Raises ValueError if there is no processor. Takes seconds."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"images and audio need the model's processor, which cannot be loaded: {error}"
        ) from error


def encode_image_prompt(
    processor: Any,
    vision: Vision,
    text: str,
    images: Sequence[Any] = (),
    audio: Sequence[Any] = (),
    **options: Any,
) -> tuple[list[int], list[Any]]:
    """Return the token ids of a text with placeholders, and its images and clips in the form that the engine accepts.
    A clip is the bytes of a WAV file, or (samples, rate).

    `options` are passed to the processor. Runs on the CPU and uses no state of the engine, so any thread may call
    this function.
    """
    if vision.needs_image:
        found = processor.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return list(found), [clip_tensors(processor, vision, clip) for clip in audio]
    given: dict[str, Any] = {"images": list(images)} if images else {}
    clips = [clip_samples(clip, _rate(processor)) for clip in audio]
    if clips:
        given["audio"] = clips
    made = processor(text=text, **given, return_tensors="pt", **options)
    ids: list[int] = made["input_ids"][0].tolist()
    if len(clips) < 2:
        for samples in clips:
            _check_whole(processor, samples, made)
        return ids, vision.split(made)
    pictures = vision.split({name: part for name, part in made.items() if "feature" not in name})
    return ids, [*pictures, *(_clip_tensors(processor, vision, clip) for clip in clips)]


def clip_tensors(processor: Any, vision: Vision, clip: Any) -> Any:
    """Return the tensors of a clip, which is the bytes of a WAV file, (samples, rate), or already tensors."""
    if isinstance(clip, Mapping):
        return clip
    return _clip_tensors(processor, vision, clip_samples(clip, _rate(processor)))


def clip_frames(processor: Any, clip: Any) -> tuple[Any, float]:
    """Return the frames of a clip of any length for Whisper ([mel bins, frames]), and its seconds. The clip is the bytes
    of a WAV file, or (samples, rate). The frames of a clip of at most one window are padded to the window."""
    rate, extractor = _rate(processor), processor.feature_extractor
    samples = clip_samples(clip, rate)
    whole = {"truncation": False, "padding": "longest"} if len(samples) > extractor.n_samples else {}
    made = extractor(samples, sampling_rate=rate, return_tensors="pt", **whole)
    return made["input_features"][0], len(samples) / rate


def _clip_tensors(processor: Any, vision: Vision, samples: Any) -> Any:
    """Return the tensors of one clip. Each clip is processed alone, so that its tensors do not depend on other
    clips."""
    if vision.needs_image:  # the clip is the input of an encoder, and has no place in a text
        extractor = processor.feature_extractor
        if len(samples) > extractor.n_samples:
            raise ValueError(
                f"an audio clip of {len(samples) / _rate(processor):.1f} seconds is longer than the "
                f"{extractor.n_samples / _rate(processor):.1f} seconds that the model takes: send several, or use LLM.transcribe "
                "or /v1/audio/transcriptions"
            )
        made = extractor(samples, sampling_rate=_rate(processor), return_tensors="pt")
    else:
        made = processor(text=processor.audio_token, audio=[samples], return_tensors="pt")
    _check_whole(processor, samples, made)
    [tensors] = vision.split(made)
    return tensors


def _check_whole(processor: Any, samples: Any, made: Mapping[str, Any]) -> None:
    """Raise ValueError if a processor has cut off the end of a clip, because processors themselves report no error.
    `samples` is the whole clip, and `made` the output of the processor."""
    hop = getattr(getattr(processor, "feature_extractor", None), "hop_length", None)
    mask = next((made[name] for name in FRAME_MASKS if name in made), None)
    if hop is None or mask is None:
        return
    kept = int(mask.sum()) * int(hop)
    if kept < len(samples) - int(hop):
        rate = _rate(processor)
        raise ValueError(
            f"an audio clip of {len(samples) / rate:.1f} seconds is longer than the {kept / rate:.1f} seconds that the "
            "model takes: send a shorter one, or several"
        )


def _rate(processor: Any) -> int:
    """Return the sampling rate of the audio that a model takes, in Hz. The rate is 16,000 if the processor has none."""
    for part in ("feature_extractor", "audio_processor"):
        rate = getattr(getattr(processor, part, None), "sampling_rate", None)
        if rate:
            return int(rate)
    return 16_000
