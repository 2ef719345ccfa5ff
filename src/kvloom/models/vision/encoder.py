"""Images and audio clips in prompts: embeddings that replace placeholder tokens, rotary positions, and masks between
image tokens.

    prompt   | text | image tokens … | text |          found by `Vision.read_prompt`, cached by image content
    a step          | a chunk of it  |                 `Vision.add_images` puts that chunk's embeddings into the batch

An audio clip is processed like an image, by a tower of its own (`towers`). In this folder "image" means both.

A tower of Hugging Face runs once for each image content. Its embeddings stay in pages of the pool (`embeddings`) until
they are evicted. A family is supported only if images enter the model through embeddings alone. Other families are
refused by name.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from kvloom.core import LayerSpec, Media, PoolLayout
from kvloom.kernels.device import upload
from kvloom.kernels.memory import LayerView
from kvloom.models.paged import Batch, Image, ImageInputs, Pages, Work

from .embeddings import Embeddings, with_embeddings
from .towers import (
    AUDIO_FAMILIES,
    GRID,
    VISION_FAMILIES,
    AudioTower,
    ImageTower,
    Tensors,
    Tower,
    embedded_text,
    encoder_input,
    joined_layers,
    without_placeholders,
)

__all__ = ["EmbeddingStore", "Vision"]

Ints = npt.NDArray[np.int64]

DIGEST_BYTES = 32
MASK = "feature_attention_mask"
"""Name of the mask of audio frames in models with M-RoPE."""


class EmbeddingStore(Protocol):
    """The interface of a store for image embeddings outside the pool. `load` returns None if the store does not have
    the image."""

    def has(self, image: Image) -> bool: ...

    def load(self, image: Image) -> torch.Tensor | None: ...

    def save(self, image: Image, made: torch.Tensor) -> None: ...


class Vision:
    """The image part of one model. If the pool has no pages for embeddings, the vision tower runs whenever an
    embedding is needed."""

    embeddings: Embeddings | None = None
    store: EmbeddingStore | None = None
    """Store of embeddings in tiers. None if the engine has no tiers."""
    needs_image = False
    """Whether every request needs an image, as the input of an encoder."""
    _last_encoded: tuple[bytes, torch.Tensor] | None = None

    def __init__(self, model: Any) -> None:
        reasons = self.refusal(model), self.refusal(model, "audio")
        if all(reasons):
            raise ValueError(reasons[0])
        config = model.config
        self._model, self._base = model, model.base_model
        towers: list[Tower] = [] if reasons[0] else [ImageTower(model)]
        self._towers = towers if reasons[1] else [*towers, AudioTower(model)]
        self.joined = joined_layers(config)
        """The layers in which the tokens of an image see each other, or None."""
        self.uses_mrope = hasattr(self._base, "get_rope_index")
        """Whether rotary positions have three axes (M-RoPE)."""
        weight = model.get_input_embeddings().weight
        self._device, self._dtype = weight.device, weight.dtype
        eyes = getattr(config, "vision_config", None)
        added = getattr(eyes, "deepstack_visual_indexes", None) or ()
        self._width = weight.shape[1] * (1 + len(added))
        """Numbers of an embedding. In Qwen3-VL an image token has further parts, which are added to the results of the
        first layers (DeepStack)."""
        if added:
            _split_embeddings(self._base.language_model)
        if getattr(config.get_text_config(), "hidden_size_per_layer_input", None):
            _add_layer_inputs(model)
        text = config.get_text_config()
        slides = "sliding_attention" in (getattr(text, "layer_types", None) or ())
        self._window = int(text.sliding_window) if self.joined and slides else None
        self.encoder_runs = 0
        """Number of times that a tower ran."""
        self._counts: dict[object, int] = {}

    @staticmethod
    def refusal(model: Any, kind: str = "images") -> str | None:
        """Return the reason why a model does not support `kind`, "images" or "audio", or None if it does."""
        family = model.config.model_type
        if kind == "audio":
            families, part, is_found = set(AUDIO_FAMILIES), "audio_config", True
            if encoder_input(model) == "audio":
                return None
        else:
            families, part = set(VISION_FAMILIES), "vision_config"
            is_found = hasattr(model, "get_image_features") or hasattr(model.base_model, "vision_model")
        if family in families and is_found:
            if getattr(model.config, part, True) is not None:
                return None
            return f"{type(model).__name__} takes no {kind} here: its config has no {part}"
        return (
            f"{type(model).__name__} ({family}) takes no {kind} here; the families that do: "
            f"{', '.join(sorted(families))}"
        )

    def extend_layout(
        self, layers: Mapping[str, LayerSpec], layout: PoolLayout, granularity: int = 16
    ) -> PoolLayout:
        """Return `layout` with additional pages for image embeddings. The slab size is a multiple of `granularity`."""
        return with_embeddings(layers, layout, granularity)

    @property
    def embedding_shape(self) -> tuple[int, torch.dtype]:
        """The length and dtype of one embedding."""
        return int(self._width), self._dtype

    def bind_pool(
        self, layout: PoolLayout, buffer: torch.Tensor, cross_views: Mapping[int, tuple[LayerView, int]]
    ) -> None:
        """Store image embeddings in this pool from now on. `cross_views` has, for each cross-attention layer, its view
        and its column in the page ids of an image."""
        self.embeddings = Embeddings(layout, buffer, self._width, self._dtype)

    def read_prompt(
        self, prompt: Many[int], images: Many[Any], tenant: str = "", read: bool = True, store: bool = True
    ) -> ImageInputs:
        """Assign `images` to the image placeholders of a prompt, in prompt order, and return them with their
        positions. Each image is pixels, the output of the model's processor, or a result of `read_image`. Raises
        ValueError if prompt and images do not match.

        For the first image of each shape, this call loads or computes the embeddings, because their number is the token
        count of this shape. Embeddings are stored per `tenant`, so that no tenant can find out whether another tenant
        used an image. `read` allows loading embeddings from tiers, and `store` allows writing them to tiers.
        """
        ids = np.fromiter(prompt, np.int64)
        known, places, bounds = self._assign(ids, self._read_images(images, tenant, read, store))
        media = []
        for image, (begin, end) in zip(known, pairwise(bounds.tolist()), strict=True):
            start, stop = int(places[begin]), int(places[end - 1]) + 1
            kept = 0 if self.embeddings is None else self.embeddings.tokens(end - begin)
            token = self._tower_of(image.inputs).token
            media.append(Media(start, stop, _digest_of_run(image, ids[start:stop], token), kept))
        joined = [self._is_joined(image) for image in known]
        if any(joined) or self.uses_mrope:
            self._check_runs(media, bounds, joined)
        axes, shift = self._rope_index(ids, known, media) if self.uses_mrope else (None, 0)
        return ImageInputs(known, tuple(media), places, bounds, axes, shift, any(joined))

    def split_prompt(
        self, prompt: Iterable[int], images: Many[Any], decoder_prompt: Many[int] = ()
    ) -> tuple[Iterable[int], Many[Any]]:
        """Return the token ids of a request's sequence, and its images. In an encoder-decoder model, the sequence is
        that of the decoder, and one of the images is the input of the encoder. This image may be made from the prompt.
        Raises ValueError for a `decoder_prompt` in other models.
        """
        if decoder_prompt:
            raise ValueError(f"{type(self._model).__name__} has no encoder: leave decoder_prompt out")
        return prompt, images

    def _assign(self, ids: Ints, images: tuple[Image, ...]) -> tuple[tuple[Image, ...], Ints, Ints]:
        """Return the images in prompt order, the positions of their tokens, and the bounds of each image in these
        positions. Images and clips may be given in any order. Raises ValueError if the token counts do not match."""
        found: list[tuple[Ints, Image]] = []
        for tower in self._towers:
            own = [image for image in images if self._tower_of(image.inputs) is tower]
            bounds = np.cumsum([0, *(self._count(image) for image in own)])
            places = np.flatnonzero(ids == tower.token)
            if len(places) != bounds[-1]:
                raise ValueError(
                    f"the prompt has {len(places)} {tower.noun} tokens (id {tower.token}), but its {len(own)} "
                    f"{tower.noun}s need {bounds[-1]}: expand the placeholders with the model's processor"
                )
            found += [(places[i:j], image) for image, (i, j) in zip(own, pairwise(bounds), strict=True)]
        found.sort(key=lambda item: int(item[0][0]))
        runs = [places for places, _ in found]
        bounds = np.cumsum([0, *map(len, runs)])
        return tuple(image for _, image in found), np.concatenate(runs), bounds

    def _tower_of(self, inputs: Mapping[str, Any]) -> Tower:
        """Return the tower that takes these tensors. Raises ValueError if there is none."""
        for tower in self._towers:
            if set(inputs) == set(tower.inputs):
                return tower
        model = type(self._model).__name__
        wanted = "; ".join(
            f"an {one.noun} of {model} consists of {' and '.join(one.inputs)}" for one in self._towers
        )
        raise ValueError(f"{wanted}, not of {', '.join(map(str, inputs)) or 'nothing'}")

    def read_image(self, given: Any, tenant: str = "", read: bool = True, store: bool = True) -> Image:
        """Return an image with the digest of its content. Uses no state of the engine, so any thread may call this
        method. Raises ValueError if the model cannot take the image.
        """
        if isinstance(given, Image):
            return given
        return replace(self._image(given, tenant), read=read, store=store)

    def _read_images(self, images: Many[Any], tenant: str, read: bool, store: bool) -> tuple[Image, ...]:
        """Return the images of a prompt. Embeddings of an encode worker are dropped if their number differs from the
        token count of the image in this model."""
        known = []
        for image in (self.read_image(given, tenant, read, store) for given in images):
            made = image.embeddings
            is_wrong = made is not None and len(made) != self._count(image)
            known.append(replace(image, embeddings=None) if is_wrong else image)
        return tuple(known)

    def has_count(self, image: Image) -> bool:
        """Return whether the token count is already known for the shape of this image. Otherwise its embeddings must
        first be loaded or computed."""
        return self._shape_key(image) in self._counts

    def add_images(self, batch: Batch, works: Many[Work]) -> Batch:
        """Return `batch` with the embeddings, positions and image ids (`spans`) of the images in `works`. If there are
        no images, return the batch unchanged."""
        concerned = [
            i
            for i, work in enumerate(works)
            if work.images is not None and work.images.affects_step(batch.sizes[i] - len(work.tokens))
        ]
        if not concerned:
            return batch
        at: list[Ints] = []
        parts: list[torch.Tensor] = []
        spans = np.full(batch.bounds[-1], -1, dtype=np.int32)
        for i in concerned:
            work, image_inputs = works[i], works[i].images
            assert image_inputs is not None
            start = batch.sizes[i] - len(work.tokens)
            first, last = np.searchsorted(image_inputs.places, (start, batch.sizes[i])).tolist()
            for place, (base, end) in enumerate(pairwise(image_inputs.bounds.tolist())):
                here, until = max(base, first), min(end, last)
                if here < until:
                    at.append(image_inputs.places[here:until] - start + batch.bounds[i])
                    if self._is_joined(image_inputs.images[place]):
                        spans[at[-1]] = len(parts)
                    parts.append(self._part(work, place, here - base, until - base))
        if self.uses_mrope:
            batch = replace(batch, rotary=upload(self._rope_positions(batch, works), self._device))
        if not parts:
            return batch
        with torch.inference_mode():
            embeds = embedded_text(self._model, batch.tokens)
            embeds = nn.functional.pad(embeds, (0, self._width - embeds.shape[1]))
            embeds[upload(np.concatenate(at), self._device)] = torch.cat(parts)
        joined = upload(spans, self._device) if self.joined else None
        return replace(batch, embeds=embeds, spans=joined, windows_join=self.joined == "windowed")

    def find_embeddings(self, image: Image) -> torch.Tensor:
        """Return the embeddings of an image ([tokens, hidden]), from an encode worker or from a tier. If neither
        has them, runs the vision tower and stores the result."""
        if image.embeddings is not None:
            return image.embeddings.to(self._device)
        if self._last_encoded is not None and self._last_encoded[0] == image.digest:
            made, self._last_encoded = self._last_encoded[1], None
            return made
        if self.store is None:
            return self.embed(image)
        found = self.store.load(image)
        if found is not None:
            return found.to(self._device)
        made = self.embed(image)
        self.store.save(image, made)
        return made

    def embed(self, image: Image) -> torch.Tensor:
        """Run the vision tower. Return the embeddings of an image ([tokens, hidden])."""
        inputs = {
            name: part.to(self._device, self._dtype if part.is_floating_point() else None)
            for name, part in image.inputs.items()
        }
        self.encoder_runs += 1
        with torch.inference_mode():
            made = self._tower_of(inputs).embed(inputs).to(self._dtype)
            return nn.functional.pad(made, (0, self._width - made.shape[1]))

    def _part(self, work: Work, place: int, begin: int, end: int) -> torch.Tensor:
        """Return the embeddings [begin, end) of image number `place`. If the pool has pages for embeddings, the
        embeddings are read from the image's pages. Before the first read, the image is encoded and its pages are
        filled."""
        image_inputs, sequence = work.images, work.sequence
        assert image_inputs is not None
        image, item = image_inputs.images[place], image_inputs.media[place]
        if self.embeddings is None or not item.tokens:
            return self.find_embeddings(image)[begin:end]
        rows = sequence.media_rows(item.digest)
        # The first step of an image fills all its pages. After a cache hit, the pages are already filled.
        if not sequence.media_is_cached(item.digest) and sequence.length <= max(item.start, sequence.resumed):
            self.embeddings.write(rows, self.find_embeddings(image))
        return self.embeddings.read(rows, begin, end)

    def samples(self) -> list[Image]:
        """Return an image of zeros for each tower, with the largest usual size."""
        return [self._image(tower.sample()) for tower in self._towers]

    def split(self, made: Mapping[str, Any]) -> list[Tensors]:
        """Split the output of a processor into one dictionary per image. Audio tensors must belong to one clip."""
        return [each for tower in self._towers if tower.inputs[0] in made for each in tower.split(made)]

    def _image(self, given: Any, tenant: str = "") -> Image:
        found = given if isinstance(given, Mapping) else {self._towers[0].inputs[0]: given}
        tower = self._tower_of(found)
        try:
            inputs = tower.shaped({name: torch.as_tensor(found[name]) for name in tower.inputs})
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"an {tower.noun} must be the tensors of the model's processor, not {type(given).__name__}: {error}"
            ) from error
        digest = hashlib.blake2b(f"{tenant!r} ".encode(), digest_size=DIGEST_BYTES)
        for name, part in inputs.items():
            host = part.detach().cpu().contiguous()
            digest.update(f"{name} {host.dtype} {tuple(host.shape)} ".encode())
            digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
        return Image(inputs, digest.digest(), tenant)

    def _count(self, image: Image) -> int:
        """Return the token count of an image. The count depends only on the shapes and grids of the inputs, so it is
        computed once for each combination."""
        key = self._shape_key(image)
        if key not in self._counts:
            noun = self._tower_of(image.inputs).noun
            shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in image.inputs.items())
            try:
                made = self.find_embeddings(image)
                # Kept, because the next `embed` may need this result.
                count, self._last_encoded = (
                    len(made),
                    (image.digest, made),
                )
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise ValueError(
                    f"{type(self._model).__name__} cannot take an {noun} of {shapes}: {error}"
                ) from error
            if not count:
                raise ValueError(f"an {noun} of {shapes} has no tokens: use a larger one")
            self._counts[key] = count
        return self._counts[key]

    @staticmethod
    def _shape_key(image: Image) -> tuple[object, ...]:
        """Return a key of the shapes, and of the values of grids, sizes and masks."""
        return tuple(
            (name, *part.shape) if part.is_floating_point() else (name, *part.shape, _digest_of_values(part))
            for name, part in image.inputs.items()
        )

    def _is_joined(self, image: Image) -> bool:
        """Return whether the tokens of an image see each other in both directions. Those of a clip do not."""
        return self.joined is not None and isinstance(self._tower_of(image.inputs), ImageTower)

    def _check_runs(self, media: list[Media], bounds: Ints, joined: list[bool]) -> None:
        """Raise ValueError unless the tokens of each image are contiguous, and at least one other token separates two
        images. `joined` are the images whose tokens see each other. They must also fit into the model's window."""
        for item, count, is_joined in zip(media, np.diff(bounds).tolist(), joined, strict=True):
            if item.stop - item.start != count:
                raise ValueError(f"the {count} tokens of the image at {item.start} must follow each other")
            if is_joined and self._window is not None and count > self._window:
                raise ValueError(
                    f"an image of {count} tokens that see each other is larger than the model's window of "
                    f"{self._window}"
                )
        for one, other in pairwise(media):
            if one.stop == other.start:
                raise ValueError(f"two images are adjacent at token {one.stop}: put a token between them")

    def _rope_index(self, ids: Ints, images: tuple[Image, ...], media: list[Media]) -> tuple[Ints, int]:
        """Return rotary positions on three axes up to the end of the last image, and the shift of later positions.
        Calls the model's own code."""
        grids = [image.inputs[GRID].cpu() for image in images if GRID in image.inputs]
        tokens, stop = torch.from_numpy(ids)[None], media[-1].stop
        given: dict[str, Any] = {"image_grid_thw": torch.cat(grids) if grids else None}
        if "audio_seqlens" in inspect.signature(self._base.get_rope_index).parameters:
            masks = [image.inputs[MASK].cpu().sum(-1) for image in images if MASK in image.inputs]
            given |= {
                "audio_seqlens": torch.cat(masks) if masks else None,
                "attention_mask": torch.ones_like(tokens),
            }
        else:
            tokens = tokens[:, :stop]
            given["mm_token_type_ids"] = (tokens == self._towers[0].token).int()
        try:
            found, shift = self._base.get_rope_index(tokens, **given)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"{type(self._model).__name__} has no positions for this prompt: put its tokens for begin and end "
                f"around each image and audio clip ({error})"
            ) from error
        return found[:, 0, :stop].long().numpy(), int(shift)

    @staticmethod
    def _rope_positions(batch: Batch, works: Many[Work]) -> Ints:
        """Return the positions of all tokens of a step on three axes: [3, tokens]."""
        parts = []
        for work, size in zip(works, batch.sizes, strict=True):
            start, image_inputs = size - len(work.tokens), work.images
            shift = 0 if image_inputs is None else image_inputs.shift
            row = np.broadcast_to(np.arange(start, size) + shift, (3, len(work.tokens)))
            if (
                image_inputs is not None
                and image_inputs.axes is not None
                and start < image_inputs.axes.shape[1]
            ):
                row = np.concatenate(
                    (image_inputs.axes[:, start:size], row[:, image_inputs.axes.shape[1] - start :]), 1
                )
            parts.append(row)
        return np.concatenate(parts, 1)


def _digest_of_run(image: Image, ids: Ints, token: int) -> bytes:
    """Return the digest of an image in its prompt. If the token range of the image also contains separator tokens,
    they are part of the digest."""
    if (ids == token).all():
        return image.digest
    return hashlib.blake2b(image.digest + ids.tobytes(), digest_size=DIGEST_BYTES).digest()


def _digest_of_values(part: torch.Tensor) -> bytes:
    values = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(values.data, digest_size=16).digest()


def _split_embeddings(text: Any) -> None:
    """Let a text model with DeepStack take embeddings [1, tokens, (1 + layers) * hidden]. The first part is the input of
    the first layer, and each other part is added to the result of one layer. Repeated calls are allowed."""
    if vars(text).get("splits_embeddings"):
        return

    def split(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        embeds, hidden = given.get("inputs_embeds"), module.config.hidden_size
        if embeds is None or embeds.shape[-1] == hidden:
            return None
        first, *added = (part.contiguous() for part in embeds.split(hidden, -1))
        given["inputs_embeds"] = first
        given["visual_pos_masks"] = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device)
        given["deepstack_visual_embeds"] = [part[0] for part in added]
        return args, given

    text.register_forward_pre_hook(split, with_kwargs=True)
    vars(text)["splits_embeddings"] = True


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _add_layer_inputs(model: Any) -> None:
    """In steps with images, pass the ids of tokens to a model whose layers also read them (Gemma 3n and 4). The model
    cannot derive ids from embeddings. Repeated calls are allowed."""
    if vars(model).get("adds_layer_inputs"):
        return
    text = model.base_model.language_model
    # Some versions of transformers need the argument, and others do not have it.
    more = {"inputs_embeds": None} if "inputs_embeds" in _parameters(text.get_per_layer_inputs) else {}

    def add(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        pages = given.get("past_key_values")
        if given.get("inputs_embeds") is None or not isinstance(pages, Pages):
            return None
        ids = without_placeholders(model, pages.batch.tokens)
        given["per_layer_inputs"] = text.get_per_layer_inputs(ids[None], **more)
        return args, given

    model.register_forward_pre_hook(add, with_kwargs=True)
    vars(model)["adds_layer_inputs"] = True
