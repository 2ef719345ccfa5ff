"""Measures the cost of cold pages: pages of a running request that stay in host memory, because the request is longer
than the pool. The same request runs in a pool that is large enough for it, and in a pool of a quarter of this size.
Both engines have a host tier.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from kvloom.engine import Engine, EngineConfig, SamplingParams

from .shapes import SHAPES, build, hf_config

__all__ = ["SHARE", "measure_long_request"]

SHARE = 4
"""The size of the large pool divided by the size of the small pool."""
OUTPUT = 32


def measure_long_request(shape: str, device: str, host: int, prompt: int, rounds: int) -> dict[str, Any]:
    """Return, for both pools, the median seconds to the first token and per further token. Also return whether the
    outputs in both pools have the same tokens.
    """
    model = build(hf_config(shape), SHAPES[shape].dtype, device)
    vocabulary = hf_config(shape).vocab_size
    layout = Engine(model, EngineConfig(pool_bytes=64 << 20)).layout
    need = layout.slab_bytes_for(prompt + OUTPUT)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocabulary, prompt).tolist() for _ in range(rounds + 1)]
    found: dict[str, Any] = {"prompt": prompt, "output": OUTPUT, "bytes": need}
    outputs = []
    for name, pool in (("whole", need), ("quarter", need // SHARE)):
        config = EngineConfig(pool_bytes=pool + 2 * layout.slab_bytes, tiers=(f"host:{host}",))
        engine = Engine(model, config)
        engine.prepare()
        timed = [_run(engine, tokens) for tokens in prompts][1:]  # the first prompt warms up
        engine.close()
        found[name] = {
            "first_s": statistics.median(first for first, _, _ in timed),
            "token_s": statistics.median(each for _, each, _ in timed),
        }
        outputs.append([output for _, _, output in timed])
    found["ratio"] = {part: found["quarter"][part] / found["whole"][part] for part in ("first_s", "token_s")}
    found["same_tokens"] = outputs[0] == outputs[1]
    return found


def _run(engine: Engine, tokens: list[int]) -> tuple[float, float, list[int]]:
    """Return the seconds to the first token, the seconds per further token, and the output."""
    began = time.perf_counter()
    request = engine.add(tokens, SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True))
    while not request.output_count and engine.busy:
        engine.step()
    first = time.perf_counter()
    engine.run()
    if len(request.output) < OUTPUT:
        raise ValueError(f"the request finished with {request.finish_reason}: raise --host")
    return first - began, (time.perf_counter() - first) / (OUTPUT - 1), request.output
