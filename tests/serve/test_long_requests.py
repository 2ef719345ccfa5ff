"""Requests longer than the pool, through a real server, `LLM` and the command line."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvloom import LLM, SamplingParams
from kvloom.cli import main
from tests.models.zoo import expected

from .running import running

POOL = 40 << 10
"""Four blocks: 64 tokens."""
LONG = [5 + i * 7 % 300 for i in range(400)]
SHORT = [[9, 8, 7, 6 + i] for i in range(4)]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    """The tokens of `generate()` that follow the prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        tokens[len(prompt) :]
        for prompt, tokens in zip([LONG, *SHORT], expected(model, [LONG, *SHORT], 8), strict=True)
    ]


@pytest.mark.slow
def test_server_runs_long_and_short_requests_together(folder: Path, wanted: list[list[int]]) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running(folder, "--pool", str(POOL), "--tier", "host:8MiB") as server:
        assert any("at most 4,096 tokens per request" in line for line in server.said)

        def complete(prompt: list[int]) -> Any:
            return server.complete(prompt=prompt, **asked)["choices"][0]["token_ids"]

        prompts = [LONG, *SHORT, LONG[::-1], LONG]
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(complete, prompts))
        assert [*found[:5], found[6]] == [*wanted, wanted[0]]
        again = server.complete(prompt=LONG, **asked)
        assert again["choices"][0]["token_ids"] == wanted[0]
        assert (
            again["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
        )  # of the cold pages in host memory
        assert server.metrics()["kvloom_cold_pages_total"] > 0
        server.wait_for(server.idle)


@pytest.mark.slow
def test_server_without_host_memory_states_the_flag(folder: Path) -> None:
    with running(folder, "--pool", str(POOL)) as server:
        assert any("--tier host:SIZE" in line for line in server.said)
        body = {"model": "tiny", "prompt": LONG, "max_tokens": 8}
        status, _, error = server.send("POST", "/v1/completions", body)
        assert status == 400
        assert "--tier host:SIZE" in error["error"]["message"]


def test_library_and_command_line_run_long_requests(
    folder: Path, wanted: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(str(folder), device="cpu", dtype="float32", pool_bytes=POOL, tiers=["host:8MiB"])
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    results = llm.generate([LONG, *SHORT], params)
    assert [result.outputs[0].token_ids for result in results] == wanted
    llm.close()
    text = " ".join(map(str, LONG))
    arguments = ["--pool", str(POOL), "--device", "cpu", "--dtype", "float32", "--max-tokens", "8", "--json"]
    main(["generate", str(folder), "--tokens", text, *arguments, "--tier", "host:8MiB"])
    found = json.loads(capsys.readouterr().out)
    tokens = (found[0] if isinstance(found, list) else found)["outputs"][0]["token_ids"]
    assert tokens
    assert tokens == wanted[0][: len(tokens)]  # it may have stopped
