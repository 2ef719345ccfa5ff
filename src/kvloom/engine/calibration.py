"""Calibration: runs prompts, measures keys and values, and computes static scales.

    calibrate(model, prompts, dtype="fp8") → Calibration      .save("scales.safetensors")
    Engine(model, EngineConfig(kv_dtype="fp8", kv_scales="scales.safetensors"))

The model runs without quantisation. A recorder measures the keys and values that the model writes to pages. Prompts
are token ids. `texts_of` reads prompts from files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvloom.core import QUANTISED, PoolLayout
from kvloom.kernels.dtypes import TORCH_DTYPES, quantised_max
from kvloom.models.paged import Pages, Scales, write_scales

from .config import EngineConfig
from .engine import Engine
from .sampling import SamplingParams

__all__ = ["Calibration", "calibrate", "texts_of"]

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Scales for storing K and V as `dtype` (int8 or fp8), measured on `tokens` tokens of `prompts` prompts.

    `sizes` has one measured absolute value per layer, field and head: the maximum, or the `percentile`. `scales` are
    computed from these values.
    """

    model: str
    dtype: str
    percentile: float
    prompts: int
    tokens: int
    sizes: Scales

    @property
    def scales(self) -> Scales:
        """The scales by layer and field. A head whose values are all zero gets a scale that covers values up to 1."""
        most = quantised_max(TORCH_DTYPES[self.dtype])
        assert most is not None
        return {
            layer: {name: torch.where(x > 0, x, 1.0) / most for name, x in fields.items()}
            for layer, fields in self.sizes.items()
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the scales to a safetensors file, with this object's fields as metadata."""
        about = {
            "format": "kvloom scales",
            "model": self.model,
            "dtype": self.dtype,
            "percentile": f"{self.percentile:g}",
            "prompts": str(self.prompts),
            "tokens": str(self.tokens),
        }
        write_scales(path, self.scales, about)


class _Recorder(Pages):
    """Pages that also measure the K and V that a model writes: the largest absolute value of each token and
    head.

    With `every`, all measured values are stored, because a percentile needs them. This takes 4 bytes for K
    and 4 bytes for V, per token, head and layer. Without `every`, only the maximum per head is stored.
    """

    def __init__(self, layout: PoolLayout, buffer: torch.Tensor, every: bool) -> None:
        super().__init__(layout, buffer)
        self._every = every
        self._names = {int(name.split(".")[1]): name for group in layout.of("token") for name in group.layers}
        self._latents = {
            name
            for group in layout.of("token")
            if group.spec.fields[0].name == "latent"
            for name in group.layers
        }
        self._seen: dict[str, dict[str, list[torch.Tensor]]] = {}
        self._counted: dict[str, int] = {}

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *how: Any,
        **named: Any,
    ) -> torch.Tensor:
        layer = self._names[layer_idx]
        k, v = (x[0].float().abs().amax(-1) for x in (key, value))  # [heads, tokens]
        fields = (
            {"latent_scale": torch.maximum(k, v)} if layer in self._latents else {"k_scale": k, "v_scale": v}
        )
        self._counted[layer] = self._counted.get(layer, 0) + k.shape[1]
        for name, sizes in fields.items():
            seen = self._seen.setdefault(layer, {}).setdefault(name, [])
            if self._every:
                seen.append(sizes.cpu())
            else:
                top = sizes.amax(1)
                seen[:] = [torch.maximum(seen[0], top) if seen else top]
        return super().attend(layer_idx, query, key, value, *how, **named)

    @property
    def tokens(self) -> int:
        """Number of tokens whose K and V the layers have written."""
        return max(self._counted.values(), default=0)

    def sizes(self, percentile: float) -> Scales:
        """Return one absolute value per head, by layer and field: the maximum, or the percentile over all tokens."""
        return {
            layer: {name: self._size(f"{layer}: {name}", seen, percentile) for name, seen in fields.items()}
            for layer, fields in self._seen.items()
        }

    def _size(self, what: str, seen: list[torch.Tensor], percentile: float) -> torch.Tensor:
        if self._every:
            found = torch.from_numpy(np.percentile(torch.cat(seen, 1).numpy(), percentile, axis=1)).float()
        else:
            found = seen[0].cpu()
        if not bool(found.isfinite().all()):
            raise ValueError(
                f"{what}: the model computes values that are not finite, which no scale can cover"
            )
        return found


def calibrate(
    model: Any,
    prompts: Iterable[Sequence[int]],
    dtype: str = "fp8",
    percentile: float = 100.0,
    context: int = 2048,
    pool_bytes: int = 1 << 30,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Run `prompts` and compute scales for `dtype` that cover the largest value of each layer and head.

    With a `percentile` below 100, the scales cover only values up to this percentile, and larger values will be
    clamped. Long prompts run in pieces of `context` tokens. Calls `progress(done, total)`. The model is not changed, so
    an engine can use it afterwards. Raises ValueError for invalid arguments before anything runs.
    """
    if dtype not in QUANTISED:
        raise ValueError(f"scales need dtype int8 or fp8, not {dtype!r}")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile {percentile} must be above 0 and at most 100")
    if context < 1:
        raise ValueError(f"context {context} must be at least 1 token")
    engine = Engine(model, EngineConfig(pool_bytes=pool_bytes, cuda_graphs=False))
    if not engine.layout.of("token"):
        raise ValueError(f"{type(model).__name__} has no keys and values to scale, only states")
    most = context if engine.limit is None else min(context, engine.limit - 1)
    given = [list(prompt) for prompt in prompts]
    pieces = [piece for prompt in given for piece in _pieces(prompt, most)]
    if not pieces:
        raise ValueError("there are no prompts to calibrate on: give at least one")
    recorder = _Recorder(engine.layout, engine.buffer, every=percentile < 100)
    engine.runner.observe(recorder)
    params = SamplingParams(max_tokens=1, temperature=0)
    requests = [engine.add(piece, params) for piece in pieces]
    while engine.busy:
        engine.step()
        if progress is not None:
            progress(sum(request.finish_reason is not None for request in requests), len(requests))
    short = [len(request.prompt) for request in requests if request.finish_reason == "no_room"]
    if short:
        raise ValueError(
            f"a pool of {pool_bytes:,} bytes is too small for a prompt of {max(short)} tokens: enlarge the pool"
        )
    name = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
    return Calibration(name, dtype, percentile, len(given), recorder.tokens, recorder.sizes(percentile))


def texts_of(arguments: Iterable[str]) -> Iterator[Prompt]:
    """Yield prompts from command-line arguments. A .jsonl file yields one prompt per line: a text, token ids, or an
    object with "prompt" or "text". Any other file yields its whole text as one prompt. An argument that is not a
    file is itself a prompt.
    """
    for argument in arguments:
        path = Path(argument)
        named = len(argument) < 4096 and "\n" not in argument
        if named and path.is_file():
            text = path.read_text(encoding="utf-8")
            yield from _lines(text, argument) if path.suffix == ".jsonl" else [text]
        elif named and path.suffix in (".txt", ".jsonl", ".md", ".py"):
            raise ValueError(f"there is no prompt file {argument!r}")
        else:
            yield argument


def _pieces(tokens: list[int], most: int) -> list[list[int]]:
    return [tokens[at : at + most] for at in range(0, len(tokens), most)]


def _lines(text: str, source: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from error
        if isinstance(found, dict):
            found = found.get("prompt", found.get("text"))
        if isinstance(found, str) or (
            isinstance(found, list) and found and all(type(token) is int for token in found)
        ):
            yield found
        else:
            raise ValueError(
                f"{source}, line {number}: expected a text or a list of token ids, got {line[:60]!r}"
            )
