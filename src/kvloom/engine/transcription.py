"""Transcribes one audio clip with Whisper, by requests that follow each other.

    frames of the clip   |  window  |     |          at most 30 seconds each, the limit of the encoder
    1. language          | 1 token  |                only if the request and the generation config name none
    2. windows           | tokens … | tokens … |     a window begins at the last time stamp of the one before

A `Transcription` decides on the next request and takes its tokens. Its owner runs the requests. Windows and segments are
those of transformers' `generate(return_timestamps=True)`, without its thresholds and without earlier text as a prompt.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .sampling.params import SamplingParams

if TYPE_CHECKING:
    import torch

    from kvloom.models.vision import EncoderDecoder

    from .request import Request

__all__ = ["Segment", "Transcript", "Transcription", "Window"]

STAMP_SECONDS = 0.02
"""Seconds between two time stamps."""
STAMP_FRAMES = 2
"""Frames between two time stamps: the encoder makes one token of two frames."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcript. `start` and `end` are seconds from the begin of the clip, `seek` is the first frame of its
    window. `tokens` includes time stamps. `avg_logprob` is the mean log-probability of the tokens of its window."""

    start: float
    end: float
    text: str
    tokens: list[int]
    seek: int = 0
    avg_logprob: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text, divided by the bytes that a compressor needs. A large value means that the text repeats
        itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a clip. `language` is a code such as "en", or None for a model without languages. Without time stamps
    there is one segment, from the begin to the end of the clip. `finish_reason` is "length" if a window reached its
    limit of tokens."""

    text: str
    language: str | None
    seconds: float
    segments: list[Segment]
    finish_reason: str = "stop"

    @property
    def tokens(self) -> list[int]:
        """The tokens of all segments."""
        return [token for segment in self.segments for token in segment.tokens]


class Window(NamedTuple):
    """The next request of a transcription: the decoder's prompt, the encoder's input, and how tokens are sampled."""

    prompt: list[int]
    clip: Mapping[str, Any]
    params: SamplingParams


class Transcription:
    """The state of one clip's transcription. Not thread-safe."""

    def __init__(
        self,
        model: EncoderDecoder,
        frames: torch.Tensor,
        seconds: float,
        params: SamplingParams,
        limit: int | None = None,
        task: str = "transcribe",
        language: str | None = None,
        timestamps: bool = False,
    ) -> None:
        """`frames` ([mel bins, frames]) are those of the whole clip, which lasts `seconds`. `params` applies to each
        window. With `limit`, a window has at most this many tokens of prompt and output, and `max_tokens` of `params` does
        not count. `task` is "transcribe" or "translate". Without `language`, the language of the generation config
        applies. If there is none, it is detected. A clip of several windows has time stamps in any case. Raises
        ValueError for a model without time stamps, and for an unknown language."""
        self._model, self._frames, self._seconds = model, frames, seconds
        self._params, self._limit, self._task = params, limit, task
        self._stamped = timestamps or frames.shape[1] > model.window_frames
        if self._stamped and model.first_timestamp is None:
            raise ValueError(
                "time stamps, and clips of more than one window, need no_timestamps_token_id in the model's "
                "generation_config.json: add it, or send shorter clips without time stamps"
            )
        self._language = language or model.default_language
        self._prompt: list[int] | None = None
        if self._language is not None or not model.languages:
            self._set_prompt()
        self._seek = 0
        self._is_cut = False
        self._parts: list[Segment] = []  # without text

    def _set_prompt(self) -> None:
        self._prompt = self._model.transcription_prompt(self._language, self._task, self._stamped)

    def next(self) -> Window | None:
        """Return the next request. Return None if the clip is transcribed."""
        if self._seek >= self._frames.shape[1]:
            return None
        if self._prompt is None:
            tokens = tuple(self._model.languages.values())
            params = SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=tokens, ignore_eos=True)
            return Window([self._model.decoder_prompt[0]], self._clip(), params)
        count = self._params.max_tokens if self._limit is None else self._limit - len(self._prompt)
        params = replace(self._params, max_tokens=max(1, count), timestamps=self._stamped)
        return Window(self._prompt, self._clip(), params)

    def take_request(self, request: Request, eos: Collection[int]) -> None:
        """Take the output of the finished request that `next` returned. `eos` are the end-of-sequence tokens. Raises
        ValueError if the request has not run to its end."""
        if request.finish_reason not in ("stop", "length"):
            raise ValueError(f"a window of the clip was not transcribed: {request.finish_reason}")
        tokens = request.output
        if self._prompt is None:
            codes = {token: code for code, token in self._model.languages.items()}
            self._language = codes[tokens[0]]
            self._set_prompt()
            return
        mean = request.cumulative_logprob / max(1, len(tokens))
        if tokens and tokens[-1] in eos:
            tokens = tokens[:-1]
        self._is_cut = self._is_cut or request.finish_reason == "length"
        length = min(self._frames.shape[1] - self._seek, self._model.window_frames)
        offset = self._seek * STAMP_SECONDS / STAMP_FRAMES
        parts, passed = self._divide(tokens, length)
        for start, end, part in parts:
            times = offset + start * STAMP_SECONDS, offset + end * STAMP_SECONDS
            self._parts.append(Segment(*times, "", part, self._seek, mean))
        self._seek += passed

    def _divide(self, tokens: list[int], length: int) -> tuple[list[tuple[int, int, list[int]]], int]:
        """Divide the tokens of a window of `length` frames into segments: (start, end, tokens), in steps of time stamps.
        Also return the number of frames after which the next window begins."""
        first = self._model.first_timestamp
        stamped = [first is not None and token >= first for token in tokens]
        ends = [i + 1 for i in range(len(tokens) - 1) if stamped[i] and stamped[i + 1]]
        if first is None or not ends:  # one segment, up to its last time stamp or the end of the window
            last = next((token for token in reversed(tokens) if first is not None and token > first), None)
            stop = length // STAMP_FRAMES if last is None or first is None else last - first
            return [(0, stop, tokens)], length
        is_whole = stamped[-2:] == [False, True]
        if is_whole:
            ends.append(len(tokens))
        else:  # the last segment also has the time stamp at which the next one would begin
            ends[-1] += 1
        found, begin = [], 0
        for place, end in enumerate(ends):
            part = tokens[begin:end]
            last = part[-1 if is_whole or place < len(ends) - 1 else -2]
            found.append((part[0] - first, last - first, part))
            begin = end
        if is_whole:
            return found, length
        return found, max(STAMP_FRAMES, (tokens[begin - 2] - first) * STAMP_FRAMES)

    def _clip(self) -> Mapping[str, Any]:
        """Return the frames of the next window, padded with zeros."""
        size = self._model.window_frames
        part = self._frames[:, self._seek : self._seek + size]
        padded = part.new_zeros((len(part), size))
        padded[:, : part.shape[1]] = part
        return {"input_features": padded}

    def transcript(self, tokenizer: Any) -> Transcript:
        """Return the segments so far, with their texts. Without a tokenizer, texts are empty."""
        first = self._model.first_timestamp

        def text(tokens: list[int]) -> str:
            words = tokens if first is None else [token for token in tokens if token < first]
            return "" if tokenizer is None else str(tokenizer.decode(words, skip_special_tokens=True))

        segments = [replace(part, text=text(part.tokens)) for part in self._parts]
        if not self._stamped:
            segments = [replace(part, end=self._seconds) for part in segments]
        whole = text([token for part in self._parts for token in part.tokens]).strip()
        reason = "length" if self._is_cut else "stop"
        return Transcript(whole, self._language, self._seconds, segments, reason)
