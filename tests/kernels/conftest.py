"""The interpreter takes hints at their word, as a GPU does: what is told to be side by side is read from where the first is."""

from __future__ import annotations

import os

import numpy as np
import pytest


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
