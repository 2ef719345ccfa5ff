"""Compare `kvloom serve` and `vllm serve` on one GPU, with random weights and the same load: `kvloom bench online`.

    python tools/compare_serving.py --shape llama-3.1-8b --vllm-python /tmp/vllm/python --pool 40GiB --out results.json

Both servers run at the same time, and only one has requests at a time. Their KV caches have the same size. The rates
are shares of the smaller throughput that the servers reach with all requests at once. `tools/vllm_bundle.py` packs vLLM
for a machine without network. The servers' logs are beside the results.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvloom.arguments import size
from kvloom.bench import online
from kvloom.bench.shapes import SHAPES, hf_config
from kvloom.models.specs import embedded

SHARES = (0.25, 0.5, 0.75, 0.9)
START_SECONDS = 420


def write_model(folder: Path, shape: str) -> None:
    """Write a config, and a tokenizer with as many tokens as the config. Prompts use the tokens of the embedded Llama.
    All other tokens are words that only occur in answers."""
    config = hf_config(shape)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=1).save_pretrained(folder)
    source = Path(embedded("llama"))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    used = set(vocabulary.values()) | {one["id"] for one in tokenizer["added_tokens"]}
    vocabulary |= {f"Ġword{i}": i for i in range(config.vocab_size) if i not in used}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def wait(process: subprocess.Popen[bytes], port: int, log: Path) -> float:
    """Wait until the server answers. Return the seconds."""
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return time.monotonic() - began
        except (URLError, OSError):
            if process.poll() is not None:
                break
            time.sleep(1)
    raise SystemExit(
        f"a server did not start; the end of its log:\n{log.read_text(errors='replace')[-6000:]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    add("--vllm-python", metavar="FILE", help="Python that has vLLM; without it, only kvloom runs")
    add("--vllm-args", default="", help="more arguments of `vllm serve`, separated by spaces")
    add("--pool", type=size, default=40 << 30, metavar="SIZE", help="size of each KV cache (default: 40GiB)")
    add("--work", nargs="+", default=["chat", "sessions"])
    add("--requests", type=int, nargs="+", default=[1500, 640], help="requests of rate inf, per work")
    add("--shares", type=float, nargs="+", default=list(SHARES), help="shares of the throughput of rate inf")
    add("--seconds", type=float, default=15.0, help="length of one load")
    add("--clients", type=int, default=6)
    add("--folder", type=Path, default=Path("/tmp/compare-serving"), help="for the model's config and logs")
    add("--out", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args()
    folder = options.folder / options.shape
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, options.shape)
    tokenizer = folder / "tokenizer.json"
    ports = {"kvloom": 18001, "vllm": 18002}
    commands = {
        "kvloom": [
            *(sys.executable, "-m", "kvloom", "serve", str(folder), "--name", "m", "--load-format", "random"),
            *(
                "--port",
                "18001",
                "--pool",
                str(options.pool),
                "--log-level",
                "warning",
                "--max-context",
                "16384",
            ),
        ]
    }
    if options.vllm_python:
        commands["vllm"] = [
            *(options.vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--served-model-name", "m", "--load-format", "dummy", "--port", "18002", "--host", "127.0.0.1"),
            *(
                "--kv-cache-memory-bytes",
                str(options.pool),
                "--disable-uvicorn-access-log",
                "--max-model-len",
                "16384",
            ),
            *options.vllm_args.split(),
        ]
    results: dict[str, Any] = {"shape": options.shape, "pool_bytes": options.pool, "start_s": {}, "rows": []}
    processes = {}
    try:
        for name, command in commands.items():
            log = options.out.with_name(f"{name}.log")
            processes[name] = start(command, log)
            results["start_s"][name] = round(wait(processes[name], ports[name], log), 1)
            print(f"{name} started in {results['start_s'][name]} s", flush=True)
        servers = [(name, f"http://127.0.0.1:{ports[name]}") for name in commands]
        for work, requests in zip(options.work, options.requests, strict=False):
            load = online.OnlineLoad(
                work, options.seconds, requests, options.clients, tokenizer=tokenizer, model="m"
            )
            online.measure(servers, replace(load, requests=max(8, requests // 8)), [math.inf])  # warm-up
            rows = online.measure(servers, load, [math.inf])
            full = min(row["requests_per_second"] for row in rows)
            rows += online.measure(servers, load, [round(share * full, 2) for share in options.shares])
            results["rows"] += [{"work": work, **row} for row in rows]
            options.out.write_text(json.dumps(results, indent=1))
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
    print(json.dumps(results["rows"]))


if __name__ == "__main__":
    main()
