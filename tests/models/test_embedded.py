"""The models that ship with kvloom: their folders are whole, and on our pages they say what `generate()` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvloom
from kvloom.engine import SamplingParams

FOLDER = Path(kvloom.__file__).parent / "models" / "embedded"
TEXTS = [
    "import os\n\ndef read(path):\n    with open(path) as file:\n" * 20,
    "class Tree:\n",
    "# " + "a b c " * 60,
]


@pytest.mark.parametrize("name", ["llama", "hybrid", "draft"])
@pytest.mark.few(1)
def test_tokens_are_those_of_generate_whole_and_in_chunks(name: str) -> None:
    folder = FOLDER / name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    prompts.append(prompts[0] + prompts[1])  # goes on where another ended
    wanted = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    llm = kvloom.LLM(str(folder), pool_bytes=1 << 26, device="cpu", dtype="float32", token_budget=100)
    params = SamplingParams(max_tokens=12, temperature=0)
    results = [*llm.generate(prompts[:3], params), *llm.generate(prompts[3:], params)]
    for result, tokens in zip(results, wanted, strict=True):
        assert result.outputs[0].token_ids == tokens[: len(result.outputs[0].token_ids)]
        assert len(result.outputs[0].token_ids) == len(tokens)
    assert results[3].num_cached_tokens >= len(prompts[0]) // 16 * 16


def test_embedded_models_are_small_and_described() -> None:
    weights = {
        name: (FOLDER / name / "model.safetensors").stat().st_size for name in ("llama", "hybrid", "draft")
    }
    assert weights["llama"] < 20e6
    assert sum(weights.values()) < 40e6
    for name in weights:
        card = (FOLDER / name / "README.md").read_text()
        measured = "## Acceptance" if name == "draft" else "## Held-out loss"
        assert all(part in card for part in ("## Data", "## Training", measured, "PSF-2.0"))
        assert json.loads((FOLDER / name / "config.json").read_text())["dtype"] == "bfloat16"
