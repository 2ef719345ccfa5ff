"""Embeddings on a GPU against Hugging Face's hidden states: chunks, several prompts in a step, beside generation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvloom.engine import SamplingParams
from tests.engines import make_engine

from .test_batch_invariance_gpu import made
from .test_embeddings import POOLINGS, _decoder
from .test_offload_gpu import GREEDY, prompts_of


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_embeddings_agree_with_hugging_face(family: str) -> None:
    prompts, model = prompts_of(family, 1, 17, 150, 700), made(family)
    with torch.inference_mode():
        states = [
            _decoder(model)(torch.tensor([one], device="cuda")).last_hidden_state[0].float()
            for one in prompts
        ]
    wanted = {"mean": [one.mean(0) for one in states], "last": [one[-1] for one in states]}
    engine = make_engine(model, 1 << 30, token_budget=256)
    engine.prepare()
    for _ in range(2):  # the second time, pages are cached
        for pooling in POOLINGS:
            params = SamplingParams(max_tokens=1, temperature=0, pooling=pooling)  # type: ignore[arg-type]
            beside = [engine.add(one, GREEDY) for one in prompts]
            embedded = [engine.add(one, params) for one in prompts]
            engine.run()
            assert all(request.output for request in beside)
            for request, expected in zip(embedded, wanted[pooling], strict=True):
                assert request.embedding is not None
                direction = torch.nn.functional.normalize(expected, dim=0).cpu().numpy()
                assert (
                    float(np.dot(request.embedding, direction)) > 0.98
                )  # bfloat16; an expert choice may differ
    engine.close()
