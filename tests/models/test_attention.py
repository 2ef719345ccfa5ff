"""What the seams take and refuse. That their tokens are generate()'s is in `test_zoo`."""

from __future__ import annotations

import pytest

from kvloom.core import PoolLayout
from kvloom.kernels.views import allocate
from kvloom.models.attention import Pages
from kvloom.models.reading import ModelError
from kvloom.models.specs import model_spec

from .tiny import SIZES, TINY
from .zoo import expected, tiny

__all__ = ["expected", "tiny"]


def test_what_reads_images_is_refused_by_name() -> None:
    config = {**SIZES, **TINY["mllama_text_model"]}
    layout = PoolLayout.build(model_spec(config, kv_dtype="fp32").layers)
    with pytest.raises(ModelError, match=r"layers\.1\.cross.* is not supported yet"):
        Pages(layout, allocate(layout, 3))


def test_pages_want_a_step_first() -> None:
    layout = PoolLayout.build(model_spec(tiny("llama").config.to_dict(), kv_dtype="fp32").layers)
    with pytest.raises(RuntimeError, match="call begin"):
        Pages(layout, allocate(layout, 20)).batch  # noqa: B018
