"""Serve LoRA adapters over one base model. An activated LoRA uses the base model's pages of the text before its
activation. The adapters have random weights, so their answers are random, too.

python examples/adapters.py [FOLDER]      # writes the adapters to FOLDER, for other commands
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvloom import LLM, SamplingParams

TEXT = "def area(width, height):\n    return width * height\n\n\n" * 6
ACTIVATION = "# check:"
LAYERS, HIDDEN, QUERIES = 6, 320, 256  # of kvloom-llama: decoder layers, inputs and outputs of q_proj


def write_adapter(folder: Path, seed: int, **fields: object) -> None:
    """Write an adapter of rank 8 in PEFT's format."""
    torch.manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, HIDDEN) / 4
        weights[f"{name}.lora_B.weight"] = torch.randn(QUERIES, 8) / 4
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main(folder: Path) -> None:
    llm = LLM("kvloom-llama", pool_bytes=64 << 20, max_loras=2)
    write_adapter(folder / "plain", 1)
    activation = llm.tokenizer.encode(ACTIVATION, add_special_tokens=False)
    write_adapter(folder / "activated", 2, alora_invocation_tokens=activation)
    for name in ("plain", "activated"):
        llm.load_lora(name, str(folder / name))
    params = SamplingParams(temperature=0, max_tokens=8)
    llm.generate(TEXT, params)  # the base model computes the text
    for name in ("plain", "activated"):
        result = llm.generate(TEXT + ACTIVATION, params, lora=name)[0]
        print(
            f"{name}: {result.num_cached_tokens} of {len(result.prompt_token_ids)} tokens from the base model"
        )
    for name, result in zip(
        (None, "plain"), llm.generate([TEXT] * 2, params, lora=[None, "plain"]), strict=True
    ):
        print(f"{name or 'base model'}: {result.outputs[0].text!r}")
    llm.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
