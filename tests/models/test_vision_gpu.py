"""Images on a GPU, in bf16: every token that the engine chooses is, for Hugging Face's model on the same device with the same
images, the likeliest or within rounding of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from kvloom.engine import SamplingParams
from tests.engines import make_engine

from .image_prompts import BEGIN, IMAGE, TINY, image_of, inputs_of, prompt_of, vision_model, words
from .test_zoo_gpu import TOLERANCE

DEVICE = "cuda"
TEXT = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}
TURNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
WIDER: dict[str, dict[str, Any]] = {
    "llava": {"text_config": TEXT},
    "qwen2_vl": {"text_config": {**TEXT, **TURNS}, "vision_config": {"hidden_size": 256}},
    "qwen2_5_vl": {"text_config": {**TEXT, **TURNS}, "vision_config": {"out_hidden_size": 256}},
    "gemma3": {"text_config": {**TEXT, "query_pre_attn_scalar": 64}},
}


@pytest.mark.parametrize("family", WIDER)
def test_tokens_are_hugging_faces_within_rounding(family: str) -> None:
    changes = {part: {**TINY[family][part], **more} for part, more in WIDER[family].items()}
    own = vision_model(family, **changes).to(DEVICE, torch.bfloat16)
    model = copy.deepcopy(own)
    engine = make_engine(model, 1 << 26, token_budget=40, max_running=4)
    engine.buffer.view(torch.bfloat16).fill_(torch.nan)
    one, other = image_of(family, 0), image_of(family, 1)
    asked = [
        ([words(1, 9), one, words(2, 5)], [one]),
        ([words(1, 9), other, words(2, 5)], [other]),
        ([words(3, 30), one, words(4, 3), other, words(5, 6)], [one, other]),
        ([words(1, 9), one, words(2, 5), words(6, 7)], [one]),
        ([words(7, 12)], []),
    ]
    prompts = [prompt_of(family, *parts) for parts, _ in asked]
    params = SamplingParams(max_tokens=12, temperature=0, logit_bias={IMAGE: -100.0, BEGIN: -100.0})
    requests = [
        engine.add(prompt, params, images=images) for prompt, (_, images) in zip(prompts, asked, strict=True)
    ]
    engine.run()
    for request, (_, images) in zip(requests, asked, strict=True):
        ids = torch.tensor([request.tokens], device=DEVICE)
        inputs = {name: part.to(DEVICE) for name, part in inputs_of(family, ids.cpu(), images).items()}
        with torch.inference_mode():
            logits = (
                own(ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0].float()
            )
        rows = logits[len(request.prompt) - 1 : -1].clone()
        picked = rows.gather(1, torch.tensor(request.output, device=DEVICE)[:, None])[:, 0]
        rows[:, [IMAGE, BEGIN]] = -torch.inf
        top = rows.amax(1)
        rows[:, [IMAGE, BEGIN]] = 0.0
        gap = (top - picked) / rows.std(1)
        assert gap.isfinite().all()
        assert gap.max() < TOLERANCE, f"{family}: {gap.tolist()}"
    engine.cache.check()


@pytest.mark.alone
def test_an_automatic_pool_leaves_memory_for_the_tower() -> None:
    changes = {part: {**TINY["qwen2_vl"][part], **more} for part, more in WIDER["qwen2_vl"].items()}
    engine = make_engine(
        vision_model("qwen2_vl", **changes).to(DEVICE, torch.bfloat16),
        memory_fraction=0.5,
        token_budget=256,
        max_running=8,
    )
    assert engine.memory_budget is not None
    image = image_of("qwen2_vl", 0)
    engine.add(prompt_of("qwen2_vl", words(1, 5), image, words(2, 3)), images=[image])
    engine.run()
    free, total = torch.cuda.mem_get_info()
    assert free >= 0.48 * total
