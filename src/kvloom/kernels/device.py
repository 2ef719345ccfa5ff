"""What every kernel asks of its device: uploads that do not wait, and launches that overlap. Knows no operation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy.typing as npt
import torch

__all__ = ["pdl_options", "supports_pdl", "upload"]


def upload(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Small arrays on their way to the device, in the order of the current stream; the host does not wait. (A copy from
    memory that is not pinned waits for all that its stream has still to do.)"""
    sent = torch.from_numpy(numbers)
    return sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent.to(device)


@lru_cache(maxsize=16)
def supports_pdl(device: torch.device) -> bool:
    """Whether a launch can start before the one ahead of it has ended, and wait for it in place: from sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """The launch option for that."""
    return {"launch_pdl": True} if supports_pdl(device) else {}
