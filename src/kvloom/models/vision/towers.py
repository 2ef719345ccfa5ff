"""The encoders of a model: one tower for images, one for audio clips, or both.

A tower turns the tensors of the model's processor into embeddings, which replace the placeholder tokens of the prompt.
The modules are those of Hugging Face. This module does not use prompts, pages or the batch of a step.

    ImageTower   pixels → embeddings
    AudioTower   log-mel frames → embeddings
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch

from kvloom.models.specs import ENCODER_DECODERS

__all__ = [
    "AUDIO_FAMILIES",
    "GRID",
    "SIZE",
    "VISION_FAMILIES",
    "AudioTower",
    "ImageTower",
    "Tensors",
    "Tower",
    "embedded_text",
    "encoder_input",
    "joined_layers",
    "without_placeholders",
]

Tensors = dict[str, torch.Tensor]

VISION_FAMILIES = (
    "aya_vision",
    "cohere2_vision",
    "exaone4_5",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "internvl",
    "kimi_k25",
    "llama4",
    "llava",
    "mistral3",
    "mllama",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen3_vl_moe",
    "vipllava",
)
"""Families with images, by model type."""

AUDIO_FAMILIES: dict[str, tuple[str, ...]] = {
    "audioflamingo3": ("input_features", "input_features_mask"),
    "gemma3n": ("input_features", "input_features_mask"),
    "gemma4": ("input_features", "input_features_mask"),
    "gemma4_unified": ("input_features", "input_features_mask"),
    "glmasr": ("input_features", "input_features_mask"),
    "granite_speech": ("input_features", "input_features_mask"),
    "qwen2_5_omni_thinker": ("input_features", "feature_attention_mask"),
    "qwen2_audio": ("input_features", "feature_attention_mask"),
    "qwen3_asr": ("input_features", "input_features_mask"),
    "qwen3_omni_moe_thinker": ("input_features", "feature_attention_mask"),
    "voxtral": ("input_features",),
}
"""Families with audio by model type, and the model inputs of a clip."""

GRID, SIZE, PATCHES = "image_grid_thw", "image_sizes", "image_position_ids"
"""Names of model inputs of an image besides its pixels: the number of patches, the size of the image without padding, and
the position of each patch."""
LAYER_OUTPUT = "vision_feature_select_strategy"
"""Argument of image towers: the tokens that they return."""
PIXELS = 48
"""Height and width of a token in the images of Gemma 3n."""
SOFT_TOKENS = (20, 14)
"""Columns and rows of tokens in the largest usual image of Gemma 4."""
FRAMES = 3000
"""Frames of a clip of 30 seconds."""


def joined_layers(config: Any) -> Literal["all", "windowed"] | None:
    """Return the layers in which the tokens of an image see each other in both directions: all layers, or only those with
    windows. Return None if all tokens see only earlier tokens."""
    if config.model_type == "gemma3":
        return "all"
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision":
        return "windowed" if config.model_type == "gemma4" else "all"
    return None


def encoder_input(model: Any) -> Literal["text", "audio"] | None:
    """Return what the encoder of an encoder-decoder model reads, or None if the model has no encoder."""
    config = model.config
    return ENCODER_DECODERS.get(config.model_type) if config.is_encoder_decoder else None


class Tower(Protocol):
    """The interface of an encoder.

    `noun` names what it encodes in error messages. `token` is the id of the placeholder. `inputs` are the names of the
    tensors of one image or clip."""

    noun: str
    token: int
    inputs: tuple[str, ...]

    def shaped(self, given: Tensors) -> Tensors:
        """Return the tensors of one image or clip in the shape that `embed` takes. Raises ValueError for tensors that
        `embed` cannot take."""

    def embed(self, inputs: Tensors) -> torch.Tensor:
        """Run the tower on the tensors of one image or clip. Return its embeddings: [tokens, numbers]."""

    def sample(self) -> Tensors:
        """Return the tensors of an image or clip of zeros, with the largest usual size."""

    def split(self, made: Mapping[str, Any]) -> list[Tensors]:
        """Split the output of a processor into the tensors of each image or clip."""


class ImageTower:
    """The image tower of a model that replaces placeholder tokens by image embeddings."""

    noun = "image"

    def __init__(self, model: Any) -> None:
        self._model, self._features = model, model.get_image_features
        self.inputs: tuple[str, ...] = ("pixel_values",)
        takes = inspect.signature(self._features).parameters
        if GRID in takes or PATCHES in takes:
            self.inputs = ("pixel_values", GRID if GRID in takes else PATCHES)
        elif model.config.vision_config.model_type == "pixtral":
            self.inputs = ("pixel_values", SIZE)
        self.token = int(model.config.image_token_id)
        chosen = takes.get(LAYER_OUTPUT)
        self._more: dict[str, Any] = {}
        if (
            chosen is not None and chosen.default is inspect.Parameter.empty
        ):  # Llama 4 in transformers before 5.22
            self._more = {LAYER_OUTPUT: model.config.vision_config.vision_feature_select_strategy}

    def shaped(self, given: Tensors) -> Tensors:
        if GRID in given:
            return {**given, GRID: given[GRID].reshape(-1, 3)}
        pixels = given["pixel_values"]
        if PATCHES in given:
            patches = given[PATCHES].reshape(1, -1, 2)
            return {"pixel_values": pixels.reshape(1, patches.shape[1], -1), PATCHES: patches}
        shaped = {**given, "pixel_values": pixels[None] if pixels.dim() == 3 else pixels}
        return {**shaped, SIZE: given[SIZE].reshape(-1, 2)} if SIZE in given else shaped

    def embed(self, inputs: Tensors) -> torch.Tensor:
        found = self._features(**inputs, **self._more, return_dict=True)
        pooled = getattr(found, "pooler_output", None)
        if pooled is None:  # the model itself projects the features of its tower (Llama 4)
            pooled = self._model.multi_modal_projector(found.last_hidden_state.flatten(0, 1))
        parts = [pooled, *(getattr(found, "deepstack_features", None) or ())]
        return torch.cat([_joined(part) for part in parts], -1)

    def sample(self) -> Tensors:
        """Return an image of zeros. The image has the size in the config, or 1024 tokens if the model supports any
        size."""
        config = self._model.config.vision_config
        if PATCHES in self.inputs:
            return _sample_patches(config, self._model.config.model_type)
        channels = int(getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3)
        if GRID in self.inputs:
            merge, patch = getattr(config, "merge_kernel_size", None), int(config.patch_size)
            side = 32 * int(config.spatial_merge_size if merge is None else merge[0])
            if merge is None:
                patches: tuple[int, ...] = (channels * int(config.temporal_patch_size) * patch**2,)
            else:  # Kimi
                patches = (channels, patch, patch)
            return {"pixel_values": torch.zeros(side * side, *patches), GRID: torch.tensor([[1, side, side]])}
        size = getattr(config, "image_size", None)
        if size is None:  # Gemma 3n
            size = PIXELS * math.isqrt(self._model.config.vision_soft_tokens_per_image)
        high, wide = (size, size) if isinstance(size, int) else size
        pixels = {"pixel_values": torch.zeros(1, channels, high, wide)}
        return {**pixels, SIZE: torch.tensor([[high, wide]])} if SIZE in self.inputs else pixels

    def split(self, made: Mapping[str, Any]) -> list[Tensors]:
        pixels = torch.as_tensor(made["pixel_values"])
        if GRID in self.inputs:
            grids = torch.as_tensor(made[GRID])
            parts = torch.split(pixels, grids.prod(-1).tolist())
            return [
                {"pixel_values": part, GRID: grid}
                for part, grid in zip(parts, torch.split(grids, 1), strict=True)
            ]
        apart = torch.split(pixels, 1)
        if PATCHES in self.inputs:
            patches = torch.split(torch.as_tensor(made[PATCHES]), 1)
            return [
                {"pixel_values": part, PATCHES: places} for part, places in zip(apart, patches, strict=True)
            ]
        if SIZE not in self.inputs:
            return [{"pixel_values": part} for part in apart]
        sizes = torch.as_tensor(made[SIZE])
        return [  # removes the padding of the batch
            {"pixel_values": part[..., : int(size[0, 0]), : int(size[0, 1])], SIZE: size}
            for part, size in zip(apart, torch.split(sizes, 1), strict=True)
        ]


class AudioTower:
    """The audio tower of a model that replaces placeholder tokens by audio embeddings. A clip is the output of the
    model's processor for this clip alone, so its tensors do not depend on other clips of the prompt."""

    noun = "audio clip"

    def __init__(self, model: Any) -> None:
        config = model.config
        self._base, self._family = model.base_model, config.model_type
        self.inputs = AUDIO_FAMILIES[self._family]
        self.token = int(config.audio_token_id)
        self._config = config.encoder_config if self._family == "granite_speech" else config.audio_config
        _select_logits(model)

    def shaped(self, given: Tensors) -> Tensors:
        features = given["input_features"]
        if features.dim() == 2:
            return {name: part[None] for name, part in given.items()}
        if features.dim() != 3:
            raise ValueError(f"input_features of an audio clip have 3 axes, not {features.dim()}")
        return given

    def embed(self, inputs: Tensors) -> torch.Tensor:
        if self._family == "qwen2_audio":
            return self._embed_padded(inputs)
        if self._family == "granite_speech":
            found = self._base.get_audio_features(inputs["input_features"], return_dict=True)
            return found.pooler_output[inputs["input_features_mask"].bool()]  # type: ignore[no-any-return]
        if self._family == "gemma3n":
            return self._embed_filled(inputs)
        if self._family.startswith("gemma4"):
            heard = inputs["input_features_mask"].bool()
            found = self._base.get_audio_features(inputs["input_features"], heard, return_dict=True)
            return found.pooler_output[found.attention_mask]  # type: ignore[no-any-return]
        return _joined(self._base.get_audio_features(**inputs, return_dict=True).pooler_output)

    def _embed_filled(self, inputs: Tensors) -> torch.Tensor:
        """Encode a clip of Gemma 3n. Each clip has the same number of tokens: the last token of the audio vocabulary fills
        up the rest."""
        base, mask = self._base, inputs["input_features_mask"].bool()
        found = base.get_audio_features(inputs["input_features"], ~mask, return_dict=True)
        last = torch.tensor([[base.vocab_size - 1]], device=mask.device)
        made: torch.Tensor = base.embed_audio(input_ids=last)[0]
        made = made.repeat(base.config.audio_soft_tokens_per_image, 1)
        heard = torch.where(found.audio_mel_mask[0, :, None], made[:1], found.pooler_output[0])
        return torch.cat((heard, made[len(heard) :]))

    def _embed_padded(self, inputs: Tensors) -> torch.Tensor:
        """Encode a clip of Qwen2-Audio, whose model class has no function for this. The tower always gets 30 seconds of
        frames. Frames of padding are masked, and not returned."""
        from transformers.masking_utils import create_bidirectional_mask

        tower, features = self._base.audio_tower, inputs["input_features"]
        counts, tokens = tower._get_feat_extract_output_lengths(inputs["feature_attention_mask"].sum(-1))
        places = torch.arange((features.shape[-1] - 2) // 2 + 1, device=features.device)
        mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=features.new_zeros(len(features), len(places), 1),
            attention_mask=(places < counts[:, None]).long(),
        )
        made = self._base.multi_modal_projector(tower(features, attention_mask=mask).last_hidden_state)
        return torch.cat([part[: int(count)] for part, count in zip(made, tokens, strict=True)])

    def sample(self) -> Tensors:
        if self._family == "granite_speech":
            config = self._base.config
            windows = -(-FRAMES // int(config.window_size))
            tokens = windows * (int(config.window_size) // int(config.downsample_rate))
            features = torch.zeros(1, FRAMES, int(self._config.input_dim))
            return {
                "input_features": features,
                "input_features_mask": torch.ones(1, tokens, dtype=torch.bool),
            }
        if self._family.startswith("gemma"):
            config = self._config
            widths = {"gemma3n": "input_feat_size", "gemma4_unified": "audio_embed_dim"}
            name = widths.get(self._family)
            width = config.subsampling_conv_channels[0] if name is None else getattr(config, name)
            frames = FRAMES // 4 if self._family == "gemma4_unified" else FRAMES
            return {
                "input_features": torch.zeros(1, frames, int(width)),
                "input_features_mask": torch.ones(1, frames, dtype=torch.bool),
            }
        frames = 2 * int(getattr(self._config, "max_source_positions", FRAMES // 2))
        features = torch.zeros(1, int(self._config.num_mel_bins), frames)
        return {"input_features": features} | {
            name: torch.ones(1, frames, dtype=torch.int64) for name in self.inputs[1:]
        }

    def split(self, made: Mapping[str, Any]) -> list[Tensors]:
        """Return the tensors of the only clip in the output of a processor."""
        return [{name: torch.as_tensor(made[name]) for name in self.inputs}]


def without_placeholders(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the token ids as the text model of some families reads them: without the placeholders of images, videos and
    clips."""
    config = model.config
    if config.model_type not in ("gemma4", "gemma4_unified", "kimi_k25"):
        return tokens
    names = ("image_token_id", "video_token_id", "audio_token_id")
    held = [tokens == token for name in names if (token := getattr(config, name, None)) is not None]
    instead = 0 if config.model_type == "kimi_k25" else int(config.get_text_config().pad_token_id)
    return tokens.masked_fill(torch.stack(held).any(0), instead)


def embedded_text(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of token ids: [tokens, hidden]. As in the forward of the model, a placeholder that the model
    has generated gets the embedding of another token in some families."""
    tokens = without_placeholders(model, tokens)
    found: torch.Tensor = model.get_input_embeddings()(tokens)
    if model.config.model_type != "gemma3n":
        return found
    for part in (
        model.base_model.embed_vision,
        model.base_model.embed_audio,
    ):  # these have tokens of their own
        own = (tokens >= part.vocab_offset) & (tokens < part.vocab_offset + part.vocab_size)
        last = part.vocab_offset + part.vocab_size - 1
        made = part(input_ids=torch.where(own, tokens, last)[None])[0]
        found = torch.where(own[:, None], made.to(found.dtype), found)
    return found


def _sample_patches(config: Any, family: str) -> Tensors:
    """Return an image of zeros for Gemma 4, with the largest usual number of tokens."""
    # Gemma 4 pools patches after its tower, and the unified model before it.
    merge = int(config.pooling_kernel_size)
    wide, high = (side * (merge if family == "gemma4" else 1) for side in SOFT_TOKENS)
    width = 3 * (int(config.patch_size) * (1 if family == "gemma4" else merge)) ** 2
    places = torch.cartesian_prod(torch.arange(wide), torch.arange(high))
    return {"pixel_values": torch.zeros(1, len(places), width), PATCHES: places[None]}


def _joined(given: Any) -> torch.Tensor:
    """Return the features of an image or clip as one tensor [tokens, numbers]. `given` is a tower's result: one tensor,
    or several pieces."""
    pieces = given if isinstance(given, list | tuple) else [given]
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])


def _select_logits(model: Any) -> None:
    """Let a model whose forward function lacks `logits_to_keep` compute the logits of these tokens only. Repeated calls
    are allowed."""
    head = model.get_output_embeddings()
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    if takes or head is None or vars(model).get("selects_logits"):
        return
    kept: list[Any] = [0]

    def keep(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        kept[0] = given.pop("logits_to_keep", 0)
        return args, given

    def select(_: Any, args: tuple[Any, ...]) -> Any:
        places = kept[0]
        return args[0][:, places if isinstance(places, torch.Tensor) else slice(-places, None)]

    model.register_forward_pre_hook(keep, with_kwargs=True)
    head.register_forward_pre_hook(select)
    vars(model)["selects_logits"] = True
