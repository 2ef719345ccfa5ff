"""One vLLM engine in a process of its own. Reads an order (JSON) and prints the answer.

An order has `model`, a folder; `extra`, the settings of the connector or None; `engine`, more settings of vLLM; and
`rounds`, lists of prompts. A prompt has `seed`, `tokens` and `salt`. Between rounds vLLM's own prefix cache is emptied. `faults` sets the faults of
tiers `faulty:URL` before each round, and `damage` names the folder of a disk tier to damage then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)

from kvloom.tiers import Tier, open_tier, registry
from kvloom.tiers.testing import Faults, FaultyTier

FAULTS = Faults()
MAX_TOKENS = 24


def parse_url(url: str) -> Callable[[], Tier]:
    """A tier `faulty:URL`: the tier of the URL with the faults of FAULTS."""
    inner = url.removeprefix("faulty:")
    return lambda: FaultyTier(open_tier(inner), FAULTS)


def damage(folder: str) -> None:
    """Change bytes in every page of a disk tier."""
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and path.stat().st_size > 1 << 16:
            with path.open("r+b") as file:
                data = bytearray(file.read())
                for at in range(5000, len(data), 1500):
                    data[at] ^= 0x55
                file.seek(0)
                file.write(data)


def tokens_of(prompt: dict[str, Any]) -> list[int]:
    return [(prompt["seed"] * 7 + j * j + j * prompt["seed"]) % 500 for j in range(prompt["tokens"])]


def main(order: dict[str, Any]) -> dict[str, Any]:
    registry.SCHEMES["faulty"] = "tests.adapters.vllm_run:parse_url"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    this: Any = import_module("tests.adapters.vllm_run")  # the module of the parser, not __main__

    settings: dict[str, Any] = order.get("engine", {})
    if order["extra"] is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "KvloomConnector",
            "kv_connector_module_path": "kvloom.adapters.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": order["extra"],
        }
    llm = LLM(
        order["model"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        block_size=32,
        disable_log_stats=False,
        distributed_executor_backend="uni",
        **settings,
    )
    answers: dict[str, Any] = {"rounds": []}
    for number, prompts in enumerate(order["rounds"]):
        faults = order.get("faults", {}).get(str(number), {})
        this.FAULTS._released.clear()  # the last round released what hung
        for name, value in faults.items():
            setattr(this.FAULTS, name, value)
        if str(number) in order.get("damage", {}):
            damage(order["damage"][str(number)])
        began, before = time.monotonic(), hits(llm)
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=tokens_of(p), cache_salt=p.get("salt")) for p in prompts],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False, ignore_eos=True),
            use_tqdm=False,
        )
        this.FAULTS.release()
        for name in faults:
            setattr(this.FAULTS, name, getattr(Faults(), name))
        answers["rounds"].append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "external": hits(llm) - before,
                "seconds": time.monotonic() - began,
            }
        )
        llm.reset_prefix_cache()
        close_breakers(order)
    if order["extra"] is not None:
        connector = worker_connector()
        counts = connector.worker.faults
        answers["faults"] = {" ".join(key): count for key, count in counts.items()}
        connector.shutdown()
    return answers


def worker_connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def close_breakers(order: dict[str, Any]) -> None:
    """Let the next round use tiers that failed in this one."""
    if order.get("faults"):
        for queue in worker_connector().worker._tiers.manager.queues:
            queue.breaker.record_success()


def hits(llm: Any) -> int:
    """Tokens that came from the connector so far."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")


if __name__ == "__main__":
    print("ANSWER " + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # vLLM's threads may delay the exit
