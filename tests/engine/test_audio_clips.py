"""WAV files and arrays as samples of a model's sampling rate, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvloom.engine.audio_clips import clip_samples, wav_seconds
from tests.models.audio_folder import recording, wav


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_integer_samples_of_every_width_are_decoded(width: int) -> None:
    samples = recording(1)
    found = clip_samples(wav(samples, width=width), 16_000)
    assert found.dtype == np.float32
    assert np.abs(found - samples).max() <= 1 / (1 << (8 * width - 1)) + 1e-6


def test_channels_are_mixed_and_a_stream_without_length_is_read_to_its_end() -> None:
    left, right = recording(1), recording(2)
    data = wav(np.stack([left, right]), width=4)
    assert np.allclose(clip_samples(data, 16_000), (left + right) / 2, atol=1e-6)
    assert wav_seconds(data) == pytest.approx(0.7)
    streamed = bytearray(data)
    streamed[40:44] = streamed[4:8] = b"\xff\xff\xff\x7f"  # lengths that a recorder did not know
    assert wav_seconds(bytes(streamed)) == pytest.approx(0.7, abs=0.001)
    assert np.array_equal(clip_samples(bytes(streamed), 16_000), clip_samples(data, 16_000))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_another_rate_keeps_tones_and_drops_what_the_new_rate_cannot_have(rate: int) -> None:
    seconds, target = 1, 16_000
    times, wanted = np.arange(rate * seconds) / rate, np.arange(target * seconds) / target
    tone = clip_samples((np.sin(2 * np.pi * 440 * times), rate), target)
    assert len(tone) == target * seconds
    assert np.abs(tone - np.sin(2 * np.pi * 440 * wanted))[200:-200].max() < 1e-3
    if rate > 2 * target:
        high = clip_samples((np.sin(2 * np.pi * 12_000 * times), rate), target)
        assert np.abs(high)[200:-200].max() < 1e-2


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (b"", "not a WAV file that can be decoded"),
        (b"OggS and more", "not a WAV file that can be decoded"),
        (wav(recording(1))[:20], "not a WAV file that can be decoded"),
        (wav(recording(1)).replace(b"\x01\x00\x01\x00", b"\x03\x00\x01\x00", 1), "unknown format: 3.*pcm_s16le"),
        (wav(recording(1)[:0]), "has nothing to hear"),
        ((np.array([np.nan]), 16_000), "samples that are not numbers"),
        ((recording(1), 16_001), "16001 samples per second cannot be converted to 16000"),
        ("clip.wav", "an audio clip is the bytes of a WAV file"),
    ],
)  # fmt: skip
def test_other_clips_are_refused_with_the_reason(clip: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip_samples(clip, 16_000)
