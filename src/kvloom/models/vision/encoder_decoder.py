"""The encoder of an encoder-decoder model (T5, BART, Whisper). Its input is a text or an audio clip.

    encoder input   | token ids, or log-mel frames |    encoded once for each content
    media           | tokens of the encoder        |    K and V of every decoder layer, in separate pages
    sequence        | ▪ | decoder tokens …         |    ▪ the start token of the decoder

For the cache, the encoder's input is an image at the first position of the decoder's sequence. The pages of its K and
V are found by content, shared by requests and evicted like those of other images. Tiers store the output of the
encoder. The modules are those of Hugging Face.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvloom.core import Ids, Media, PoolLayout
from kvloom.kernels.memory import LayerView
from kvloom.models.paged import (
    Batch,
    EncoderDecoderSequenceCache,
    Image,
    ImageGroup,
    ImageInputs,
    VisibleImages,
    Work,
    forward_arguments,
    new_cache,
)

from .cross_vision import CrossVision
from .encoder import DIGEST_BYTES, Vision
from .towers import Tensors, Tower, encoder_input

__all__ = ["EncoderDecoder", "vision_of"]

SAMPLE_TOKENS = 1024
"""Tokens of the text that measures the memory of an encoder without a limit."""


def vision_of(model: Any) -> Vision | None:
    """Return the image and audio part of a model, or the encoder of an encoder-decoder model. Return None if the model
    has neither."""
    if encoder_input(model) is not None:
        return EncoderDecoder(model)
    if Vision.refusal(model) and Vision.refusal(model, "audio"):
        return None
    cross_views = getattr(model.config.get_text_config(), "cross_attention_layers", None)
    return CrossVision(model) if cross_views else Vision(model)


class EncoderDecoder(CrossVision):
    """The encoder of a model, and the K and V that the decoder reads from its output."""

    needs_image = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._width = int(model.config.hidden_size)
        self.reads_text = encoder_input(model) == "text"
        """Whether the prompt of a request is the text of the encoder. Otherwise the encoder's input is an audio clip,
        and the prompt is that of the decoder."""
        self.decoder_prompt = _decoder_prompt(model)
        """The first tokens of the decoder, if a request has none of its own."""
        self._views: Mapping[int, tuple[LayerView, int]] = {}
        settings = model.generation_config
        languages = getattr(settings, "lang_to_id", None) or {}
        self.languages = {name.strip("<|>"): int(token) for name, token in languages.items()}
        """The languages of Whisper, such as "en", and their tokens. Empty for a model without languages."""
        self.default_language: str | None = getattr(settings, "language", None)
        """The language of the generation config. None if it names none."""
        without = getattr(settings, "no_timestamps_token_id", None)
        self.first_timestamp = None if without is None else int(without) + 1
        """The token of 0.00 seconds; larger ids are later time stamps. None for a model without time stamps."""

    @property
    def window_frames(self) -> int:
        """The number of frames that an encoder of audio reads."""
        tower = self._towers[0]
        assert isinstance(tower, _AudioEncoder)
        return tower.frames

    def _make_towers(self, model: Any) -> list[Tower]:
        return [_TextEncoder(model) if encoder_input(model) == "text" else _AudioEncoder(model)]

    def bind_pool(
        self, layout: PoolLayout, buffer: torch.Tensor, cross_views: Mapping[int, tuple[LayerView, int]]
    ) -> None:
        self._block, self._views = layout.block_tokens, cross_views

    def split_prompt(
        self, prompt: Iterable[int], images: Many[Any], decoder_prompt: Many[int] = ()
    ) -> tuple[Iterable[int], Many[Any]]:
        if not self.reads_text:
            if decoder_prompt:
                raise ValueError("the prompt of this model is that of the decoder: leave decoder_prompt out")
            return tuple(prompt) or self.decoder_prompt, images
        if len(images):
            raise ValueError(f"{type(self._model).__name__} takes no images and no audio: send text")
        first = self.decoder_prompt[:1]
        if decoder_prompt and decoder_prompt[0] != first[0]:  # generate() adds it, too
            decoder_prompt = (*first, *decoder_prompt)
        return decoder_prompt or self.decoder_prompt, [{"input_ids": np.fromiter(prompt, np.int64)}]

    def transcription_prompt(
        self, language: str | None = None, task: str | None = None, timestamps: bool = False
    ) -> list[int]:
        """Return the decoder's prompt of Whisper for a task ("transcribe" or "translate"), with or without time stamps.
        The default language is that of the generation config, or English. Raises ValueError for an unknown language."""
        found = _transcription_tokens(self._model, language, task)
        if timestamps and found and found[-1] + 1 == self.first_timestamp:
            found.pop()
        return [self.decoder_prompt[0], *found]

    def read_prompt(
        self, prompt: Many[int], images: Many[Any], tenant: str = "", read: bool = True, store: bool = True
    ) -> ImageInputs:
        if len(images) != 1:
            noun = self._towers[0].noun
            raise ValueError(f"a prompt of {type(self._model).__name__} needs one {noun}, not {len(images)}")
        known = self._read_images(images, tenant, read, store)
        # The digest replaces the first token in block hashes.
        content = known[0].digest + str(int(prompt[0])).encode()
        digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
        media = Media(0, 1, digest, self._count(known[0]))
        places = np.zeros(1, np.int64)
        return ImageInputs(
            known, (media,), places, np.arange(2), cross_attended=True, is_prompt=self.reads_text
        )

    @property
    def max_prompt_tokens(self) -> int | None:
        """The largest number of tokens that an encoder of text reads. None if it has no limit."""
        tower = self._towers[0]
        return tower.limit if isinstance(tower, _TextEncoder) else None

    def add_images(self, batch: Batch, works: Many[Work]) -> Batch:
        """Return `batch` with one group of encoder tokens per sequence. The group of a sequence without an encoder
        input, as in a trial step, is empty."""
        if all(work.images is None for work in works):
            return batch
        parts = []
        for i, work in enumerate(works):
            count = len(work.tokens)
            if work.images is None:
                nothing = torch.zeros(0, dtype=torch.int64, device=self._device)
                parts.append(ImageGroup(count, nothing[None], nothing))
                continue
            self._encode_new_images(work, batch.sizes[i] - count, batch.sizes[i])
            parts.append(self._image_group(work, count, (0,)))
        every = torch.arange(batch.bounds[-1], device=self._device)
        return replace(batch, seen=VisibleImages(every, tuple(parts)))

    def _write_states(self, states: torch.Tensor, rows: Ids) -> None:
        """Let the decoder compute one token. Its layers then project the encoder's output to K and V."""
        cache = new_cache(self._model)
        assert isinstance(cache, EncoderDecoderSequenceCache)
        cache.set_encoder_states(states)
        start = torch.tensor([self.decoder_prompt[:1]], device=self._device)
        self._model(**forward_arguments(self._model, start, 0), **cache.arguments())
        for layer, (key, value) in cache.encoder_tokens().items():
            self._write(*self._views[layer], rows, key.contiguous(), value.contiguous())

    def _count(self, image: Image) -> int:
        tower = self._towers[0]
        assert isinstance(tower, _TextEncoder | _AudioEncoder)
        return tower.count(image.inputs)


class _TextEncoder:
    """The encoder of a model whose encoder reads text."""

    noun = "text"
    inputs: tuple[str, ...] = ("input_ids",)
    token = -1

    def __init__(self, model: Any) -> None:
        self._encoder = model.get_encoder()
        self._vocabulary = len(model.get_input_embeddings().weight)
        positions = getattr(self._encoder, "embed_positions", None)  # T5 has none, and no limit
        names = ("max_encoder_position_embeddings", "max_position_embeddings")
        limit = next((found for name in names if (found := getattr(model.config, name, None))), None)
        self.limit = None if positions is None or limit is None else int(limit)

    def shaped(self, given: Tensors) -> Tensors:
        ids = given["input_ids"].reshape(-1).long()
        if not len(ids):
            raise ValueError("the prompt is empty: give at least one token")
        if self.limit is not None and len(ids) > self.limit:
            raise ValueError(
                f"{len(ids)} prompt tokens exceed the encoder's limit of {self.limit}: shorten the prompt"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise ValueError(
                f"a prompt token is outside the vocabulary: give ids from 0 to {self._vocabulary - 1}"
            )
        return {"input_ids": ids}

    def count(self, inputs: Mapping[str, torch.Tensor]) -> int:
        return len(inputs["input_ids"])

    def embed(self, inputs: Tensors) -> torch.Tensor:
        """Run the encoder. Return its output: [tokens, hidden]."""
        ids = inputs["input_ids"][None]
        if hasattr(self._encoder, "set_attention_type"):  # a short text would change it for all later texts
            self._encoder.set_attention_type(self._encoder.config.attention_type)
        found: torch.Tensor = self._encoder(input_ids=ids, attention_mask=torch.ones_like(ids))[0][0]
        return found

    def sample(self) -> Tensors:
        return {"input_ids": torch.zeros(self.limit or SAMPLE_TOKENS, dtype=torch.int64)}

    def split(self, made: Mapping[str, Any]) -> list[Tensors]:
        return [{"input_ids": torch.as_tensor(made["input_ids"])}]


class _AudioEncoder:
    """The encoder of Whisper. All clips have the same number of frames: the feature extractor pads them."""

    noun = "audio clip"
    inputs: tuple[str, ...] = ("input_features",)
    token = -1

    def __init__(self, model: Any) -> None:
        config, self._encoder = model.config, model.get_encoder()
        self._tokens = int(config.max_source_positions)
        self.frames = 2 * self._tokens
        self._shape = int(config.num_mel_bins), self.frames

    def shaped(self, given: Tensors) -> Tensors:
        features = given["input_features"]
        features = features[0] if features.dim() == 3 and len(features) == 1 else features
        if tuple(features.shape) != self._shape:
            raise ValueError(
                f"input_features of an audio clip are {list(self._shape)}, not {list(features.shape)}"
            )
        return {"input_features": features}

    def count(self, inputs: Mapping[str, torch.Tensor]) -> int:
        return self._tokens

    def embed(self, inputs: Tensors) -> torch.Tensor:
        """Run the encoder. Return its output: [tokens, hidden]."""
        found: torch.Tensor = self._encoder(inputs["input_features"][None])[0][0]
        return found

    def sample(self) -> Tensors:
        return {"input_features": torch.zeros(self._shape)}

    def split(self, made: Mapping[str, Any]) -> list[Tensors]:
        return [{"input_features": torch.as_tensor(made["input_features"])}]


def _transcription_tokens(model: Any, language: str | None = None, task: str | None = None) -> list[int]:
    """Return the tokens of Whisper after the start token, for a transcription without time stamps. The default
    language is that of the generation config, or English. An English model has neither language nor task."""
    settings, found = model.generation_config, []
    languages, tasks = (getattr(settings, name, None) or {} for name in ("lang_to_id", "task_to_id"))
    chosen = language or getattr(settings, "language", None) or "en"
    if languages:
        if f"<|{chosen}|>" not in languages:
            known = ", ".join(sorted(name.strip("<|>") for name in languages))
            raise ValueError(f"language {chosen!r} is not known; known: {known}")
        found.append(int(languages[f"<|{chosen}|>"]))
    wanted = task or getattr(settings, "task", None) or "transcribe"
    if tasks and languages:
        found.append(int(tasks[wanted]))
    without = getattr(settings, "no_timestamps_token_id", None)
    return found if without is None else [*found, int(without)]


def _decoder_prompt(model: Any) -> tuple[int, ...]:
    """Return the first tokens of the decoder: the start token, then the token that the generation config forces. For
    Whisper, these are the tokens of language (English by default), task and "no timestamps"."""
    settings = model.generation_config
    places = [(settings, "decoder_start_token_id"), (model.config, "decoder_start_token_id")]
    places += [(settings, "bos_token_id"), (model.config, "bos_token_id")]  # as generate() does
    start = next((found for one, name in places if (found := getattr(one, name, None)) is not None), None)
    if start is None:
        raise ValueError(
            f"{type(model).__name__} has no decoder_start_token_id: add it to its generation_config.json"
        )
    if encoder_input(model) == "audio":
        return (int(start), *_transcription_tokens(model))
    forced = getattr(settings, "forced_bos_token_id", None)
    return (int(start),) if forced is None else (int(start), int(forced))
