"""What the seams take and refuse. That their tokens are generate()'s is in `test_zoo`."""

from __future__ import annotations

import numpy as np
import pytest

from kvloom.core import KVCache, PoolLayout
from kvloom.kernels.views import allocate
from kvloom.models.attention import Pages
from kvloom.models.batch import Stage, Work
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


def test_a_batch_needs_pages_and_tokens() -> None:
    layout = PoolLayout.build(model_spec(tiny("llama").config.to_dict(), kv_dtype="fp32").layers)
    cache = KVCache(layout, slabs=20)
    sequence = cache.open(cache.match(np.arange(3, 9, dtype=np.int32)))
    stage = Stage(cache, "cpu", tokens=16, rows=2)
    with pytest.raises(ValueError, match="at least one sequence"):
        stage.lay_out([])
    with pytest.raises(ValueError, match="has no tokens"):
        stage.lay_out([Work(sequence, np.array([], dtype=np.int64))])
    with pytest.raises(ValueError, match="extend the sequence first"):
        stage.lay_out([Work(sequence, np.arange(3, 9))])
    pages = Pages(layout, allocate(layout, 20))
    with pytest.raises(RuntimeError, match="call begin"):
        pages.batch  # noqa: B018
