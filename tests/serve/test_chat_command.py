"""`kvloom chat` through pipes: with a server and with a model in the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.running import MODEL, Running

LINES = "hello\n\n/nothing\nand now?\n/reset\nhello\n/quit\nnever sent\n"
GREEDY = ("--max-tokens", "6", "--system", "short")


def chat(*arguments: str, lines: str = LINES) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvloom.cli", "chat", *arguments],
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_chats_with_a_server_and_a_local_model_are_equal(server: Running, folder: Path) -> None:
    remote = chat("--server", server.url, *GREEDY)
    assert remote.returncode == 0, remote.stderr
    assert remote.stderr.startswith("unknown command '/nothing'; /reset starts a new conversation")
    told = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    _, _, first = server.send("POST", "/v1/chat/completions", {**asked, "messages": told})
    answer = first["choices"][0]["message"]
    told += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "and now?"}]
    _, _, second = server.send("POST", "/v1/chat/completions", {**asked, "messages": told})
    after = second["choices"][0]["message"]["content"]
    assert remote.stdout == f"{answer['content']}\n{after}\n{answer['content']}\n"
    local = chat(str(folder), "--device", "cpu", *GREEDY)
    assert local.returncode == 0, local.stderr
    assert local.stdout == remote.stdout


def test_errors_of_a_chat_are_reported_in_one_line(server: Running) -> None:
    refused = chat("other", "--server", server.url, lines="hi\n")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "model 'other' is not served here" in refused.stderr
    nobody = chat("--server", "127.0.0.1:1", lines="hi\n")
    assert nobody.returncode == 2
    assert "no server at http://127.0.0.1:1" in nobody.stderr
    assert len(nobody.stderr.splitlines()) == 1
