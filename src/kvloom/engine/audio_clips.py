"""Reads audio clips: WAV files with integer samples, and arrays of samples. No torch is needed to check a header.

bytes of a WAV file ─┐
                     ├─▶ one channel, at the sampling rate of the model ─▶ the model's processor
(samples, rate) ─────┘
"""

from __future__ import annotations

import math
import wave
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["clip_samples", "wav_seconds"]

Samples = npt.NDArray[np.float32]
HINT = "send a WAV file with 8, 16, 24 or 32-bit integer samples (ffmpeg -i FILE -c:a pcm_s16le clip.wav)"
LOBES = 16
"""Half the length of the low-pass filter, in zero crossings. More lobes keep more of the highest frequencies."""
PASSED = 0.95
"""Share of the frequencies below half the smaller sampling rate that the filter keeps."""
MAX_PHASES = 1000
"""Largest length of the repeating pattern of two sampling rates. This limit bounds the size of the filter."""


def wav_seconds(data: bytes) -> float:
    """Return the duration of a WAV file in seconds. Reads only the header. Raises ValueError if it is not a WAV file
    that can be decoded."""
    with _opened(data) as file:
        return _frames(file, data) / file.getframerate()


def clip_samples(clip: Any, rate: int) -> Samples:
    """Return the samples of a clip, between -1 and 1, as one channel with `rate` samples per second. `clip` is the
    bytes of a WAV file, or a pair (samples, rate). The samples of a pair are one channel, or an array [channels,
    samples]. Raises ValueError for anything else.
    """
    if isinstance(clip, bytes | bytearray | memoryview):
        samples, own = _decoded(bytes(clip))
    elif isinstance(clip, Sequence) and len(clip) == 2 and isinstance(clip[1], int) and clip[1] > 0:
        samples, own = np.asarray(clip[0], dtype=np.float32), clip[1]
    else:
        raise ValueError(
            f"an audio clip is the bytes of a WAV file, (samples, rate), or the tensors of the model's processor, "
            f"not {type(clip).__name__}"
        )
    if samples.ndim == 2:
        samples = samples.mean(0, dtype=np.float32)
    if samples.ndim != 1 or not len(samples):
        raise ValueError(f"an audio clip with samples of shape {list(samples.shape)} has nothing to hear")
    if not np.isfinite(samples).all():
        raise ValueError("an audio clip has samples that are not numbers")
    return samples if own == rate else _resampled(samples, own, rate)


def _opened(data: bytes) -> wave.Wave_read:
    try:
        file = wave.open(BytesIO(data), "rb")  # noqa: SIM115  the callers close it
    except (wave.Error, EOFError, ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"not a WAV file that can be decoded ({str(error) or 'it is too short'}): {HINT}"
        ) from None
    if file.getsampwidth() > 4 or not file.getframerate() or not file.getnchannels():
        raise ValueError(
            f"a WAV file of {file.getnchannels()} channels, {8 * file.getsampwidth()} bits and "
            f"{file.getframerate()} samples per second cannot be decoded: {HINT}"
        )
    return file


def _frames(file: wave.Wave_read, data: bytes) -> int:
    """Return how many frames a file really contains. The header of a recorded stream may state a larger number."""
    return min(file.getnframes(), len(data) // (file.getsampwidth() * file.getnchannels()))


def _decoded(data: bytes) -> tuple[Samples, int]:
    """Return the samples ([channels, samples]) and the sampling rate of a WAV file."""
    with _opened(data) as file:
        width, channels = file.getsampwidth(), file.getnchannels()
        raw = np.frombuffer(file.readframes(_frames(file, data)), dtype=np.uint8)
        rate = file.getframerate()
    raw = raw[: len(raw) // (width * channels) * width * channels].reshape(-1, width)
    if width == 1:
        values = raw[:, 0].astype(np.int32) - 128
    else:
        whole = np.zeros((len(raw), 4), dtype=np.uint8)
        whole[:, 4 - width :] = raw  # the sign is in the last byte
        values = whole.view("<i4")[:, 0] >> (32 - 8 * width)
    samples = values.astype(np.float32) / np.float32(1 << (8 * width - 1))
    return np.ascontiguousarray(samples.reshape(-1, channels).T), rate


def _resampled(samples: Samples, rate: int, target: int) -> Samples:
    """Convert samples from the sampling rate `rate` to the rate `target` (in Hz), by a windowed sinc filter. Raises
    ValueError if the ratio of the rates is not a fraction of small integers.
    """
    import torch

    shared = math.gcd(rate, target)
    step, phases = rate // shared, target // shared
    if max(step, phases) > MAX_PHASES:
        raise ValueError(
            f"a clip of {rate} samples per second cannot be converted to {target}: use a usual rate, such as {target}"
        )
    cutoff = PASSED * min(1.0, target / rate)
    half = math.ceil(LOBES / cutoff)
    # Output `phases * q + p` lies `p * step / phases` samples after input `q * step`.
    apart = np.arange(-half, half + step)[None] - np.arange(phases)[:, None] * (step / phases)
    window = np.where(np.abs(apart) < half, np.cos(np.pi * apart / (2 * half)) ** 2, 0.0)
    taps = np.sinc(cutoff * apart) * window
    taps /= taps.sum(1, keepdims=True)
    padded = torch.from_numpy(np.pad(samples, (half, half + step)))
    found = torch.nn.functional.conv1d(
        padded[None, None], torch.from_numpy(taps.astype(np.float32))[:, None], stride=step
    )
    count = -(-len(samples) * phases // step)
    made: Samples = found[0].T.reshape(-1)[:count].numpy()
    return made
