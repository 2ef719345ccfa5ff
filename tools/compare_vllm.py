"""Compare KV connectors in vLLM: time to first token with and without a hit, and throughput of loads.

    build/vllm/bin/python tools/compare_vllm.py --tokens 1024 --folder /nvme/compare

Every system runs in processes of its own, with the same model of random weights and the same prompts. The first
process computes each prompt (cold), empties vLLM's own prefix cache, and answers again (hit in the same process). The
second process answers the same prompts (hit in a new process). All answers must have equal tokens. Times are medians.
Store and load are the KV bytes of a prompt, divided by the time that the engine waits in calls of the connector.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS = 3


def systems(folder: Path) -> dict[str, tuple[dict[str, Any] | None, dict[str, str]]]:
    """The KV transfer config and the environment of each system."""

    def kvloom(*tiers: str) -> dict[str, Any]:
        return {
            "kv_connector": "KvloomConnector",
            "kv_connector_module_path": "kvloom.adapters.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": list(tiers), "load": "always", "load_seconds": 30},
        }

    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
    }
    lmcache = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    lmcache_memory = {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
        "LMCACHE_CHUNK_SIZE": "256",
    }
    lmcache_disk = {
        **lmcache_memory,
        "LMCACHE_LOCAL_DISK": f"file://{folder}/lmcache/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "4",
    }
    return {
        "recompute": (None, {}),
        "kvloom host": (kvloom("host:1GiB"), {}),
        "kvloom disk": (kvloom("host:1GiB", f"disk:{folder}/kvloom:4GiB"), {}),
        "vLLM ExampleConnector": (example, {}),
        "vLLM OffloadingConnector": (offloading, {}),
        "LMCache memory": (lmcache, lmcache_memory),
        "LMCache disk": (lmcache, lmcache_disk),
    }


def make_model(folder: Path) -> str:
    """A model of random weights, whose KV needs 64 KiB per token in float32."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "model")
    return str(folder / "model")


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """One process: cold and hit times of each prompt, or hits only."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    settings = {} if order["config"] is None else {"kv_transfer_config": order["config"]}
    llm = LLM(
        order["model"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=2 * order["tokens"],
        max_num_batched_tokens=2 * order["tokens"],
        block_size=64,
        distributed_executor_backend="uni",
        disable_hybrid_kv_cache_manager=True,
        **settings,
    )

    def answer(seed: int, tokens: int) -> tuple[float, list[int]]:
        prompt = TokensPrompt(prompt_token_ids=[(seed * 31 + j * j + j * seed) % 500 for j in range(tokens)])
        began = time.monotonic()
        (output,) = llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False
        )
        return time.monotonic() - began, list(output.outputs[0].token_ids)

    answer(99, 128)
    blocked = timed_connector()
    found: dict[str, Any] = {"cold": [], "hit": [], "tokens": [], "store": [], "load": []}
    for seed in range(1, PROMPTS + 1):
        if order["cold"]:
            seconds, tokens = answer(seed, order["tokens"])
            found["cold"].append(seconds)
            found["store"].append(blocked())
            found["tokens"].append(tokens)
            llm.reset_prefix_cache()
        seconds, tokens = answer(seed, order["tokens"])
        found["hit"].append(seconds)
        found["load"].append(blocked())
        found["tokens"].append(tokens)
        llm.reset_prefix_cache()
    if order["cold"]:
        time.sleep(2)  # stores in the background
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        get_kv_transfer_group().shutdown()
    return found


def timed_connector() -> Callable[[], float]:
    """Measure the calls of the worker's connector. Returns a function that returns the seconds since its last call."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*arguments, **options)
            finally:
                spent[0] += time.monotonic() - began

        return inner

    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        for name in ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save"):
            setattr(connector, name, timed(getattr(connector, name)))

    def take() -> float:
        seconds, spent[0] = spent[0], 0.0
        return seconds

    return take


def run(order: dict[str, Any], environment: dict[str, str]) -> dict[str, Any] | str:
    """Run `measure` in a process. Returns its result, or the last error."""
    fixed = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--order", json.dumps(order)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **fixed, **environment},
        check=False,
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    lines = [line for line in done.stderr.splitlines() if "Error" in line or "Exception" in line]
    return (lines or done.stderr.splitlines() or ["no output"])[-1].strip()[-160:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=Path("build/compare-vllm"))
    parser.add_argument("--only", nargs="*", help="names of systems")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.order:
        print("RESULT " + json.dumps(measure(json.loads(options.order))), flush=True)
        os._exit(0)
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = make_model(folder)
    size = (options.tokens - 1) // 64 * 64 * 2 * 8 * 8 * 128 * 4 / 1e6
    print(f"{size:.0f} MB of KV for each prompt of {options.tokens} tokens")
    print(
        "| system | cold, s | hit, s | hit in a new process, s | store, MB/s | load, MB/s |\n|---|---|---|---|---|---|",
        flush=True,
    )
    expected: list[Any] | None = None
    for name, (config, environment) in systems(folder).items():
        if options.only and name not in options.only:
            continue
        order = {"model": model, "tokens": options.tokens, "config": config, "cold": True}
        first = run(order, environment)
        if isinstance(first, str):
            print(f"| {name} | does not run: {first} | | | | |", flush=True)
            continue
        second = run({**order, "cold": False}, environment)
        tokens = first["tokens"] if isinstance(second, str) else first["tokens"] + second["tokens"]
        expected = expected or first["tokens"][::2]
        same = all(tokens[i] in expected for i in range(len(tokens)))
        later = second if isinstance(second, str) else f"{statistics.median(second['hit']):.2f}"
        cells = [
            name,
            f"{statistics.median(first['cold']):.2f}",
            f"{statistics.median(first['hit']):.2f}",
            later,
        ]
        if config is not None:
            cells += [f"{size / max(1e-9, statistics.median(first[verb])):.0f}" for verb in ("store", "load")]
        print(f"| {' | '.join(cells)} |{'' if same else ' **other tokens**'}", flush=True)


if __name__ == "__main__":
    main()
