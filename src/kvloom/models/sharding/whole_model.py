"""The data of the whole model that a rank keeps: the config, and some values of each whole weight. A fingerprint of
these values does not depend on the number of ranks. Engines with different numbers of ranks therefore find the same
pages in tiers.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["WholeModel", "sample_weight", "set_whole", "whole_of"]

SAMPLES = 64


def sample_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return up to 64 values of a weight, at equal distances."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous()


class WholeModel:
    """The whole model, of which a rank has a part. `config` is the config of the whole model."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.weights: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
        """Shapes and samples of whole weights, by name."""

    def record(self, name: str, weight: torch.Tensor) -> None:
        """Record a whole weight, before it is cut."""
        self.weights[name] = tuple(weight.shape), sample_weight(weight)

    def record_part(self, name: str, part: torch.Tensor, index: int, count: int) -> None:
        """Record one of `count` equal parts [1, ...] of the first axis of a weight. The result is that of `record`, if
        the parts are recorded in order."""
        if index == 0:
            self.weights[name] = (count, *part.shape[1:]), part.new_empty(0)
        shape, sample = self.weights[name]
        step, begin = max(1, count * part.numel() // SAMPLES), index * part.numel()
        found = part.detach().reshape(-1)[-begin % step :: step]
        self.weights[name] = shape, torch.cat([sample, found])[:SAMPLES]


def whole_of(model: Any) -> WholeModel | None:
    """Return the data of the whole model, if `model` is the part of a rank. None for a model that is not divided."""
    found: WholeModel | None = vars(model).get("whole")
    return found


def set_whole(model: Any, whole: WholeModel) -> None:
    """Store in `model`, which is the part of a rank, the data of the whole model (`whole_of` returns it)."""
    vars(model)["whole"] = whole
