"""Cross attention to images on a GPU, in bf16: every token that the engine chooses is, for Hugging Face's model on the same device
with the same images, the likeliest or within rounding of it. Requests of text alone run beside, from graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from kvloom.engine import SamplingParams
from tests.engines import make_engine

from .image_prompts import words
from .test_cross_attention import IMAGE, Picture, causal, crossing, inputs_of, picture
from .test_zoo_gpu import TOLERANCE

DEVICE = "cuda"
WIDER: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05}


def test_tokens_are_hugging_faces_within_rounding() -> None:
    own = causal(crossing(**WIDER).to(DEVICE, torch.bfloat16))
    engine = make_engine(copy.deepcopy(own), 1 << 26, token_budget=40, max_running=4)
    engine.buffer.view(torch.bfloat16).fill_(torch.nan)
    asked: list[tuple[list[int], list[Picture]]] = [
        ([*words(1, 9), IMAGE, *words(2, 5)], [picture(1)]),
        ([*words(1, 9), IMAGE, *words(2, 5)], [picture(2)]),
        ([IMAGE, *words(3, 30), IMAGE, IMAGE, *words(5, 6)], [picture(3), picture(1), picture(4)]),
        (words(7, 12), []),
        ([*words(1, 9), IMAGE, *words(2, 5), *words(6, 7)], [picture(1)]),
    ]
    params = SamplingParams(max_tokens=12, temperature=0)
    requests = [engine.add(prompt, params, images=pictures) for prompt, pictures in asked]
    engine.run()
    for request, (_, pictures) in zip(requests, asked, strict=True):
        ids = torch.tensor([request.tokens], device=DEVICE)
        inputs = {name: part.to(DEVICE) for name, part in inputs_of(request.tokens, pictures).items()}
        with torch.inference_mode():
            logits = (
                own(ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0].float()
            )
        rows = logits[len(request.prompt) - 1 : -1]
        picked = rows.gather(1, torch.tensor(request.output, device=DEVICE)[:, None])[:, 0]
        gap = (rows.amax(1) - picked) / rows.std(1)
        assert gap.isfinite().all()
        assert gap.max() < TOLERANCE, gap.tolist()
    engine.cache.check()


@pytest.mark.alone
def test_an_automatic_pool_leaves_memory_for_the_tower() -> None:
    engine = make_engine(
        crossing(**WIDER).to(DEVICE, torch.bfloat16), memory_fraction=0.5, token_budget=256, max_running=8
    )
    assert engine.memory_budget is not None
    engine.add([IMAGE, *words(2, 3)], images=[picture(3)])
    engine.run()
    free, total = torch.cuda.mem_get_info()
    assert free >= 0.48 * total
