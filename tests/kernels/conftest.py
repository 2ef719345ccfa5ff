"""Kernels run here under the worst conditions of a GPU: unwritten memory is NaN, and compiler hints are enforced.

The interpreter enforces hints: values that are declared contiguous are read from the address of the first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

WILD = 77777
"""The value of unwritten integers (or the largest of their type): neither -1 nor 0, which have a meaning here."""


@pytest.fixture(autouse=True)
def nothing_is_written_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch allocates without writing it, outputs and scratch inside the functions under test among it, is filled
    with NaN, or bytes and integers with what cannot be right: an element that a kernel leaves out shows, and so does one
    that is read too early. (`torch.use_deterministic_algorithms` fills, too, but forbids cuDNN's attention and others.)"""

    def filling(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocated(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            with torch.no_grad():
                if tensor.is_floating_point() or tensor.is_complex():
                    return tensor.fill_(math.nan)
                most = 1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
                return tensor.fill_(min(WILD, most))

        return allocated

    for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
        monkeypatch.setattr(torch, name, filling(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, filling(getattr(torch.Tensor, name)))


@pytest.fixture(autouse=True)
def hints_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.max_contiguous` and `tl.multiple_of` change nothing in Triton's interpreter, whereas a compiled kernel loads a run
    in one piece, by the address of its first element: a hint that does not hold gives wrong numbers there alone."""
    try:
        from triton.runtime import interpreter
    except ImportError:  # tests without kernels run all the same
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        return

    def set_attr(handle, key, values) -> None:  # type: ignore[no-untyped-def]
        handle.attr[key] = values
        if key == "tt.contiguity":
            length, unit = values[-1], handle.attr.get("tt.divisibility", [1])[-1]
            first = handle.data.reshape(-1, length)[:, :1]
            assert not (first % unit).any(), (
                f"a run begins at {first[first % unit != 0][0]}, no multiple of {unit}"
            )
            handle.data = (first + np.arange(length, dtype=first.dtype)).reshape(handle.data.shape)

    monkeypatch.setattr(interpreter.TensorHandle, "set_attr", set_attr)
