"""Copies of pages inside the pool in plain torch: the oracle of `copy_pages`."""

from __future__ import annotations

import torch

__all__ = ["copy_pages"]


def copy_pages(buffer: torch.Tensor, page_stride: int, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole pages inside the pool. No page may be both a source and a target."""
    pages = buffer[: buffer.numel() // page_stride * page_stride].view(-1, page_stride)
    pages[target.long()] = pages[source.long()]
