"""A real server process on a tiny model."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from openai import OpenAI
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.made_tokenizers import byte_level

__all__ = ["DEVICE", "LONGEST", "MODEL", "Running", "model_folder", "running", "serve_command"]

MODEL = "tiny"
LONGEST = 4096
DEVICE = os.environ.get("KVLOOM_TEST_DEVICE", "cpu")
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t['function']['name'] }}>{% endfor %}{% for d in documents or [] %}<{{ d['title'] }}>{% endfor %}"
    "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}{% for m in messages %}{% if m['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% for c in m['tool_calls'] or [] %}({{ c['function']['arguments']['city'] }}){% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def model_folder(folder: Path, name: str = MODEL, seed: int = 0) -> Path:
    """A tiny Llama of random weights, every byte a token, with a chat template."""
    path = folder / name
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@dataclass(slots=True)
class Running:
    """A server: its process, its address, and what it has said on stderr and stdout."""

    process: subprocess.Popen[str]
    url: str
    engine: int
    said: list[str] = field(default_factory=list)

    def client(self, key: str = "none", **more: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **more)

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        key: str | None = None,
    ) -> tuple[int, dict[str, str], Any]:
        """One request; status, headers and JSON (or text)."""
        data = body if isinstance(body, bytes | str) or body is None else json.dumps(body)
        told = {"Content-Type": "application/json", **(headers or {})}
        if key is not None:
            told["Authorization"] = f"Bearer {key}"
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            connection.request(method, path, data, told)
            answer = connection.getresponse()
            text = answer.read().decode()
            kind = answer.headers.get("content-type", "")
            found = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, found, json.loads(text) if "json" in kind else text
        finally:
            connection.close()

    def complete(self, key: str | None = None, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        status, _, found = self.send("POST", "/v1/completions", {"model": MODEL, **fields}, key=key)
        assert status == 200, found
        return dict(found)

    def metrics(self, key: str | None = None) -> dict[str, float]:
        _, _, text = self.send("GET", "/metrics", key=key)
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def wait_for(self, what: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"not so within {seconds} s; the server said {self.said}"
            time.sleep(0.05)

    def healthy(self) -> bool:
        return self.send("GET", "/health")[0] == 200

    def idle(self) -> bool:
        found = self.metrics()
        return not any(
            found[f"kvloom_{name}"] for name in ("open_requests", "running", "waiting", "in_use_pages")
        )


def serve_command(folder: Path | str, *arguments: str) -> list[str]:
    """The command line of `kvloom serve` on a free port."""
    command = [sys.executable, "-m", "kvloom.cli", "serve", str(folder)]
    return [*command, "--port", "0", "--device", DEVICE, *arguments]


@contextmanager
def running(folder: Path | str, *arguments: str, seconds: float = 300) -> Iterator[Running]:
    """Start `kvloom serve` and wait until it is ready; at the end it must stop by itself on SIGTERM."""
    process = subprocess.Popen(
        serve_command(folder, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    said: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    engine, url, end = 0, "", time.monotonic() + seconds
    try:
        while not url:
            line = lines.get(timeout=max(0.1, end - time.monotonic()))
            assert line is not None, f"the server did not start: {said}"
            if found := re.search(r"\(process (\d+)\)", line):
                engine = int(found[1])
            if found := re.search(r"serves .+ at (https?://\S+);", line):
                url = found[1]
        yield Running(process, url, engine, said)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, said
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
