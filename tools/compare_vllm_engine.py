"""One vLLM engine that follows commands, for tools/compare_vllm.py, which runs `serve` in a process.

{"ask": 3, "tokens": 1025, "answer": 8}    answers prompt number 3 of 1025 tokens with 8 tokens
{"reset": true}                            empties vLLM's own prefix cache
{"faults": {"slow": 2.0}}                  sets the faults of kvloom's tiers with a URL `faulty:URL`
{"close": true}                            writes pending pages, and ends the process
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvloom.tiers import Tier, open_tier, registry
from kvloom.tiers.testing import Faults, FaultyTier

FAULTS = Faults()
BLOCK_TOKENS = 64
KV_BYTES_PER_TOKEN = 2 * 8 * 8 * 128 * 4


def parse_url(url: str) -> Callable[[], Tier]:
    """A tier `faulty:URL`: the tier of the URL with the faults of FAULTS."""
    inner = url.removeprefix("faulty:")
    return lambda: FaultyTier(open_tier(inner), FAULTS)


def make_model(folder: Path) -> None:
    """Write a model of random weights, whose KV needs 64 KiB per token in float32."""
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
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


class Engine:
    """vLLM in this process, with the KV transfer config of one system."""

    def __init__(self, order: dict[str, Any]) -> None:
        from vllm import LLM

        settings = {} if order["config"] is None else {"kv_transfer_config": order["config"]}
        self.llm = LLM(
            order["model"],
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=2 * order["tokens"],
            max_num_batched_tokens=2 * order["tokens"],
            block_size=BLOCK_TOKENS,
            distributed_executor_backend="uni",
            disable_hybrid_kv_cache_manager=True,
            disable_log_stats=False,
            **settings,
        )
        self._waited = timed_connector()

    def ask(self, number: int, tokens: int, answer: int) -> dict[str, Any]:
        """Answer one prompt. `waited` is the time that the engine waited in calls of the connector."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(
            prompt_token_ids=[(number * 31 + j * j + j * number) % 500 for j in range(tokens)]
        )
        sampling = SamplingParams(temperature=0, max_tokens=answer, detokenize=False, ignore_eos=True)
        before = self._external_hits()
        self._waited()
        (output,) = self.llm.generate([prompt], sampling, use_tqdm=False)
        assert output.metrics is not None
        return {
            "ttft": output.metrics.first_token_latency,
            "tokens": list(output.outputs[0].token_ids),
            "finished": output.outputs[0].finish_reason,
            "loaded": self._external_hits() - before,
            "waited": self._waited(),
        }

    def _external_hits(self) -> int:
        metrics = self.llm.get_metrics()
        return sum(int(m.value) for m in metrics if m.name == "vllm:external_prefix_cache_hits")

    def reset(self) -> None:
        """Empty vLLM's own prefix cache. A connector may keep the blocks of a request until a later step."""
        for _ in range(600):
            if self.llm.reset_prefix_cache():
                return
            self.llm.llm_engine.engine_core.get_output()  # a step without requests
            time.sleep(0.05)
        raise RuntimeError("vLLM's prefix cache cannot be emptied: blocks are still in use")

    def close_breakers(self) -> None:
        """Let kvloom use a tier that failed under an earlier fault."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for queue in get_kv_transfer_group().worker._tiers.manager.queues:
            queue.breaker.record_success()

    def close(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():
            get_kv_transfer_group().shutdown()


def timed_connector() -> Callable[[], float]:
    """Measure the calls of the worker's connector. Return a function that returns the seconds since its last call."""
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


def serve(order: dict[str, Any], log: str, connection: Connection) -> None:
    """Start an engine, and answer commands (JSON) until the connection ends. `log` is the file for its output."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    registry.SCHEMES["faulty"] = "compare_vllm_engine:parse_url"
    engine = Engine(order)
    engine.ask(999, 128, 1)
    connection.send_bytes(b"{}")
    while True:
        command = json.loads(connection.recv_bytes())
        result: dict[str, Any] = {}
        if "ask" in command:
            result = engine.ask(command["ask"], command["tokens"], command["answer"])
        elif "reset" in command:
            engine.reset()
        elif "faults" in command:
            for name, value in command["faults"].items():
                setattr(FAULTS, name, value)
            engine.close_breakers()
        else:
            engine.close()
        connection.send_bytes(json.dumps(result).encode())
        if "close" in command:
            os._exit(0)  # threads of vLLM may delay the exit
