"""The encoders of a model: one tower for images, one for audio clips, or both.

A tower turns the tensors of the model's processor into embeddings, which replace the placeholder tokens of the prompt.
The modules are those of Hugging Face. This module does not use prompts, pages or the batch of a step.

    ImageTower   pixels → embeddings
    AudioTower   log-mel frames → embeddings
"""

from __future__ import annotations

import inspect
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
    "encoder_input",
]

Tensors = dict[str, torch.Tensor]

VISION_FAMILIES: dict[str, bool] = {
    "aya_vision": False,
    "cohere2_vision": False,
    "gemma3": True,
    "glm4v": False,
    "glm4v_moe": False,
    "internvl": False,
    "llama4": False,
    "llava": False,
    "mistral3": False,
    "mllama": False,
    "qwen2_5_omni_thinker": False,
    "qwen2_5_vl": False,
    "qwen2_vl": False,
    "qwen3_omni_moe_thinker": False,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
    "vipllava": False,
}
"""Families with images by model type, and whether the tokens of an image see each other in both directions."""

AUDIO_FAMILIES: dict[str, tuple[str, ...]] = {
    "audioflamingo3": ("input_features", "input_features_mask"),
    "glmasr": ("input_features", "input_features_mask"),
    "granite_speech": ("input_features", "input_features_mask"),
    "qwen2_5_omni_thinker": ("input_features", "feature_attention_mask"),
    "qwen2_audio": ("input_features", "feature_attention_mask"),
    "qwen3_asr": ("input_features", "input_features_mask"),
    "qwen3_omni_moe_thinker": ("input_features", "feature_attention_mask"),
    "voxtral": ("input_features",),
}
"""Families with audio by model type, and the model inputs of a clip."""

GRID, SIZE = "image_grid_thw", "image_sizes"
"""Names of model inputs of an image besides its pixels: the number of patches, and the size of the image without
padding."""
FRAMES = 3000
"""Frames of a clip of 30 seconds."""


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
        if GRID in inspect.signature(self._features).parameters:
            self.inputs = ("pixel_values", GRID)
        elif model.config.vision_config.model_type == "pixtral":
            self.inputs = ("pixel_values", SIZE)
        self.token = int(model.config.image_token_id)

    def shaped(self, given: Tensors) -> Tensors:
        if GRID in given:
            return {**given, GRID: given[GRID].reshape(-1, 3)}
        pixels = given["pixel_values"]
        shaped = {**given, "pixel_values": pixels[None] if pixels.dim() == 3 else pixels}
        return {**shaped, SIZE: given[SIZE].reshape(-1, 2)} if SIZE in given else shaped

    def embed(self, inputs: Tensors) -> torch.Tensor:
        found = self._features(**inputs, return_dict=True)
        pooled = getattr(found, "pooler_output", None)
        if pooled is None:  # the model itself projects the features of its tower (Llama 4)
            pooled = self._model.multi_modal_projector(found.last_hidden_state.flatten(0, 1))
        parts = [pooled, *(getattr(found, "deepstack_features", None) or ())]
        return torch.cat([_joined(part) for part in parts], -1)

    def sample(self) -> Tensors:
        """Return an image of zeros. The image has the size in the config, or 1024 tokens if the model supports any
        size."""
        config = self._model.config.vision_config
        channels = int(getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3)
        if GRID in self.inputs:
            side = 32 * int(config.spatial_merge_size)
            width = channels * int(config.temporal_patch_size) * int(config.patch_size) ** 2
            return {"pixel_values": torch.zeros(side * side, width), GRID: torch.tensor([[1, side, side]])}
        size = config.image_size
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
        return _joined(self._base.get_audio_features(**inputs, return_dict=True).pooler_output)

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
        frames = 2 * int(getattr(self._config, "max_source_positions", FRAMES // 2))
        features = torch.zeros(1, int(self._config.num_mel_bins), frames)
        return {"input_features": features} | {
            name: torch.ones(1, frames, dtype=torch.int64) for name in self.inputs[1:]
        }

    def split(self, made: Mapping[str, Any]) -> list[Tensors]:
        """Return the tensors of the only clip in the output of a processor."""
        return [{name: torch.as_tensor(made[name]) for name in self.inputs}]


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
