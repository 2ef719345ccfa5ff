"""Helpers for all kernels: uploads without waiting, and launches that overlap."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy.typing as npt
import torch

__all__ = ["pdl_options", "supports_pdl", "upload"]


def upload(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a small array to the device on the current stream. The host does not wait.

    The array is first copied to pinned memory, because a copy from pageable memory would wait for all earlier work
    of the stream.
    """
    sent = torch.from_numpy(numbers)
    return sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent.to(device)


@lru_cache(maxsize=16)
def supports_pdl(device: torch.device) -> bool:
    """Return whether a launch can start before the previous launch ends. CUDA calls this programmatic dependent
    launch, and it needs sm_90 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options for programmatic dependent launch, or no options if the device lacks it."""
    return {"launch_pdl": True} if supports_pdl(device) else {}
