"""Gateways of other projects over kvloom's workers: SGLang's smg finds, measures and uses them."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.fleet import Process, free_port, started, until
from tests.serve.running import MODEL, model_folder

ROOT = Path(__file__).parent.parent.parent


def smg_program() -> str | None:
    below = ROOT / "build/smg/bin/smg"
    return os.environ.get("KVLOOM_SMG") or (str(below) if below.exists() else shutil.which("smg"))


@pytest.mark.slow
def test_smg_routes_to_workers(tmp_path: Path) -> None:
    """Two workers behind smg with cache_aware routing: both are healthy, and a repeated prompt is a hit."""
    smg = smg_program()
    if smg is None:
        pytest.skip("smg is not installed: `make test-full` installs it below build/smg, or pip install smg")
    model = str(model_folder(tmp_path))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                started(tmp_path / f"{number}.log", "serve", model, "--name", MODEL, "--pool", "8MiB")
            )
            for number in range(2)
        ]
        for worker in workers:
            until(worker.is_healthy)
        port, metrics = free_port(), free_port()
        command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--worker-urls"]
        with (tmp_path / "smg.log").open("wb") as log:
            process = subprocess.Popen([*command, *(one.url for one in workers)], stdout=log, stderr=log)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        gateway = Process(process, f"http://127.0.0.1:{port}", tmp_path / "smg.log")

        def listed() -> list[dict[str, object]]:
            try:
                return list(gateway.send("GET", "/workers")[1]["workers"])
            except OSError:
                return []

        until(lambda: len([one for one in listed() if one["is_healthy"]]) == 2)
        assert {one["model_id"] for one in listed()} == {MODEL}
        body = {
            "model": MODEL,
            "prompt": "a prompt of forty bytes, each one a token",
            "max_tokens": 4,
            "temperature": 0,
        }
        answers = [gateway.send("POST", "/v1/completions", body) for _ in range(4)]
        assert [status for status, _ in answers] == [200] * 4
        texts = {answer["choices"][0]["text"] for _, answer in answers}
        direct = workers[0].send("POST", "/v1/completions", body)[1]["choices"][0]["text"]
        assert texts == {direct}
        assert answers[-1][1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
