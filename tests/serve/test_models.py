"""Several models in one server: own tokens, one memory for all pools, loading and unloading, faults of one engine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import LlamaForCausalLM

from tests.serve.running import DEVICE, MODEL, Running, model_folder, running

pytestmark = pytest.mark.slow

OTHER, THIRD = "other", "third"
ON_GPU = DEVICE != "cpu"
MEMORY = (32 if ON_GPU else 2) << 20  # a slab is 2 MiB on a GPU
FILL_TOKENS = 3200 if ON_GPU else 400
MODELS = (MODEL, OTHER)
Expected = dict[tuple[str, int], list[int]]


def prompt(seed: int, length: int = 40) -> list[int]:
    return [5 + (seed * 37 + i * (seed + 3)) % 250 for i in range(length)]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two more models."""
    path = tmp_path_factory.mktemp("shelf")
    model_folder(path, OTHER, seed=1)
    model_folder(path, THIRD, seed=2)
    return path


@pytest.fixture(scope="module")
def both(folder: Path, shelf: Path) -> Iterator[Running]:
    more = ("--memory", str(MEMORY), "--model-dir", str(shelf), "--max-running", "16")
    with running(folder, str(shelf / OTHER), *more) as found:
        yield found


@pytest.fixture(scope="module")
def expected(folder: Path, shelf: Path) -> Expected:
    """The greedy tokens that Hugging Face generates, by model and seed of the prompt."""
    found: Expected = {}
    for name, path in ((MODEL, folder), (OTHER, shelf / OTHER), (THIRD, shelf / THIRD)):
        model = LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
        for seed in range(6):
            given = torch.tensor([prompt(seed)])
            with torch.no_grad():
                tokens = model.generate(given, max_new_tokens=12, do_sample=False, eos_token_id=None)
            found[name, seed] = tokens[0, given.shape[1] :].tolist()
    return found


def answer(server: Running, model: str | None, seed: int) -> list[int]:
    named = {} if model is None else {"model": model}
    fields = {"prompt": prompt(seed), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, _, found = server.send("POST", "/v1/completions", {**named, **fields, "return_token_ids": True})
    assert status == 200, found
    assert found["model"] == (model or MODEL)
    return list(found["choices"][0]["token_ids"])


def pools(server: Running) -> dict[str, float]:
    found = server.metrics()
    return {
        m[1]: value
        for name, value in found.items()
        if (m := re.match(r'kvloom_pool_bytes{model="(.+)"}', name))
    }


def fill(server: Running, model: str, seed: int, tokens: int = FILL_TOKENS) -> None:
    """A request that leaves about `tokens` cached tokens behind."""
    fields = {"prompt": prompt(seed, tokens), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, _, found = server.send("POST", "/v1/completions", {"model": model, **fields})
    assert status == 200, found


def test_requests_choose_a_model_by_name(both: Running, expected: Expected) -> None:
    for model in MODELS:
        for seed in range(3):
            assert answer(both, model, seed) == expected[model, seed]
    assert answer(both, None, 0) == expected[MODEL, 0]
    assert expected[MODEL, 0] != expected[OTHER, 0]


def test_an_unknown_model_is_refused_with_the_served_names(both: Running) -> None:
    status, _, found = both.send("POST", "/v1/completions", {"model": "none", "prompt": "a"})
    assert status == 404
    assert "'tiny' or 'other'" in found["error"]["message"]
    assert both.send("GET", "/v1/models/none")[0] == 404
    assert both.send("GET", "/admin/pool?model=none")[0] == 404
    assert both.send("POST", "/tokenize", {"model": "none", "prompt": "a"})[0] == 404


def test_endpoints_name_every_model(both: Running) -> None:
    assert [one["id"] for one in both.send("GET", "/v1/models")[2]["data"]] == list(MODELS)
    assert both.send("GET", f"/v1/models/{OTHER}")[2]["status"] == "ok"
    status, _, found = both.send("GET", "/health")
    assert (status, found) == (200, {"status": "ok", "role": "both", "models": dict.fromkeys(MODELS, "ok")})
    assert both.send("POST", "/tokenize", {"model": OTHER, "prompt": "abc"})[0] == 200
    assert both.send("POST", f"/v1/sessions/s?model={OTHER}")[0] == 202
    assert both.send("GET", f"/kvloom/state?model={OTHER}")[2]["server"]["model"] == OTHER
    state = both.send("GET", "/kvloom/state")[2]["server"]
    assert (state["model"], state["models"]) == (MODEL, list(MODELS))
    chat = {"model": OTHER, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert both.send("POST", "/v1/chat/completions", chat)[2]["model"] == OTHER
    assert both.send("POST", "/v1/messages", chat)[2]["model"] == OTHER
    records = both.send("GET", f"/kvloom/requests?model={OTHER}")[2]["requests"]
    assert records
    assert {record["model"] for record in records} == {OTHER}


def test_each_family_appears_once_with_the_samples_of_all_models(both: Running) -> None:
    text = both.send("GET", "/metrics")[2]
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, label in (("kvloom_running", "model"), ("vllm:num_requests_running", "model_name")):
        assert {sample.labels[label] for sample in families[name].samples} == set(MODELS)
    assert [sample.labels for sample in families["kvloom_open_requests"].samples] == [{}]


def test_an_idle_models_memory_serves_the_busy_one(both: Running) -> None:
    """The larger part of the idle model's pool moves, and moves back when the load does."""
    for busy, idle in ((MODEL, OTHER), (OTHER, MODEL)):
        stop = threading.Event()
        seen: list[dict[str, float]] = []

        def load(model: str = busy, stop: threading.Event = stop) -> None:
            for seed in range(2000):
                if stop.is_set():
                    return
                fill(both, model, seed)

        began = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            work = [pool.submit(load) for _ in range(2)]
            try:
                while not seen or seen[-1][busy] < 0.75 * MEMORY:
                    assert time.monotonic() - began < 60, seen[-1]
                    seen.append(pools(both))
                    assert sum(seen[-1].values()) <= MEMORY
                    time.sleep(0.02)
            finally:
                stop.set()
            for one in work:
                one.result()
        assert seen[-1][idle] < 0.25 * MEMORY + 1


def test_concurrent_load_on_both_gives_each_models_tokens(both: Running, expected: Expected) -> None:
    """Pools change hands meanwhile; their sum stays within the memory."""
    stop, sums = threading.Event(), []

    def watch() -> None:
        while not stop.wait(0.05):
            sums.append(sum(pools(both).values()))

    def burst(number: int) -> None:
        model = MODELS[number % 2]
        if number % 5 == 0:
            fill(both, model, number)
        assert answer(both, model, number % 6) == expected[model, number % 6]

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(burst, range(120)))
    finally:
        stop.set()
        watcher.join()
    assert sums
    assert max(sums) <= MEMORY


@pytest.mark.skipif(ON_GPU, reason="the longest request is smaller than a slab of a GPU's pool")
def test_a_long_request_waits_for_its_models_share(both: Running) -> None:
    """A pool that gave its memory away gets it back for a request that needs it."""
    for seed in range(200):
        fill(both, MODEL, seed + 5000)
        if pools(both)[OTHER] < 0.3 * MEMORY:
            break
    longest = both.send("GET", f"/v1/models/{OTHER}")[2]["max_model_len"]
    small = both.send("GET", f"/admin/pool?model={OTHER}")[2]
    assert small["bytes"] < 0.3 * MEMORY
    assert longest * 256 > small["bytes"]
    fill(both, OTHER, 1, longest - 8)
    assert both.send("GET", f"/admin/pool?model={OTHER}")[2]["bytes"] > small["bytes"]


def test_the_size_of_one_pool_cannot_be_set(both: Running) -> None:
    status, _, found = both.send("POST", "/admin/pool", {"bytes": "1MiB"})
    assert status == 400
    assert "--memory" in found["error"]["message"]


@pytest.mark.slow
def test_a_model_is_loaded_and_unloaded(both: Running, expected: Expected) -> None:
    status, _, found = both.send("POST", "/admin/models", {"model": THIRD})
    assert status == 202, found
    assert (found["id"], found["status"]) == (THIRD, "loading")
    assert answer(both, OTHER, 0) == expected[OTHER, 0]
    assert both.send("POST", "/admin/models", {"model": THIRD})[0] == 409
    both.wait_for(lambda: both.send("GET", f"/v1/models/{THIRD}")[2]["status"] == "ok", 90)
    for model in (*MODELS, THIRD):
        assert answer(both, model, 3) == expected[model, 3]
    assert sum(pools(both).values()) <= MEMORY
    assert both.send("DELETE", f"/admin/models/{THIRD}")[0] == 202
    both.wait_for(lambda: both.send("GET", f"/v1/models/{THIRD}")[0] == 404)
    assert both.send("POST", "/v1/completions", {"model": THIRD, "prompt": "a"})[0] == 404
    assert set(pools(both)) == set(MODELS)
    assert answer(both, MODEL, 4) == expected[MODEL, 4]


@pytest.mark.slow
def test_a_model_that_fails_to_load_is_listed_with_the_reason(both: Running, shelf: Path) -> None:
    shutil.copytree(shelf / THIRD, shelf / "broken")
    weights = shelf / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert both.send("POST", "/admin/models", {"model": "broken"})[0] == 202
    both.wait_for(lambda: both.send("GET", "/v1/models/broken")[2]["status"] == "failed", 90)
    assert both.send("GET", "/v1/models/broken")[2]["error"]
    assert both.healthy()
    status, _, found = both.send("POST", "/v1/completions", {"model": "broken", "prompt": "a"})
    assert (status, found["error"]["code"]) == (503, "load_failed")
    assert both.send("DELETE", "/admin/models/broken")[0] == 202
    both.wait_for(lambda: both.send("GET", "/v1/models/broken")[0] == 404)


def test_only_models_of_the_given_folders_are_loaded(both: Running, folder: Path) -> None:
    for asked in (str(folder), "../" + folder.name, "/", ".", "", "none", "a\0b"):
        status, _, found = both.send("POST", "/admin/models", {"model": asked, "name": "new"})
        assert status == 400, (asked, found)
    assert [one["id"] for one in both.send("GET", "/v1/models")[2]["data"]] == list(MODELS)


@pytest.mark.slow  # test_server_lifecycle.py restarts the engine of one model
def test_the_death_of_one_engine_leaves_the_other_serving(both: Running, expected: Expected) -> None:
    pids = [int(pid) for line in both.said for pid in re.findall(r"\(process (\d+)\)", line)]
    os.kill(pids[1], signal.SIGKILL)
    both.wait_for(lambda: both.send("GET", "/health")[2]["models"][OTHER] == "loading")
    assert both.send("GET", "/health")[0] == 503
    for seed in range(6):
        assert answer(both, MODEL, seed) == expected[MODEL, seed]
    assert both.send("POST", "/v1/completions", {"model": OTHER, "prompt": "a"})[0] in (200, 503)
    both.wait_for(both.healthy, 90)
    assert answer(both, OTHER, 2) == expected[OTHER, 2]
    assert sum(pools(both).values()) <= MEMORY


@pytest.mark.slow
def test_the_last_model_stays(folder: Path, shelf: Path) -> None:
    """Without --model-dir nothing is loaded; without --memory each pool keeps its size."""
    names = ("--name", "a", "--name", "b", "--alias", "x", "--alias", "y=b")
    with running(folder, str(shelf / OTHER), "--pool", "8MiB" if ON_GPU else "1MiB", *names) as server:
        assert [one["id"] for one in server.send("GET", "/v1/models")[2]["data"]] == ["a", "b", "x", "y"]
        for alias, name in (("x", "a"), ("y", "b")):
            asked = {"model": alias, "prompt": "abc", "max_tokens": 2}
            assert server.send("POST", "/v1/completions", asked)[2]["model"] == name
        status, _, found = server.send("POST", "/admin/models", {"model": THIRD})
        assert (status, "--model-dir" in found["error"]["message"]) == (403, True)
        assert server.send("DELETE", "/admin/models/a")[0] == 202
        server.wait_for(lambda: len(server.send("GET", "/v1/models")[2]["data"]) == 2)
        assert server.send("POST", "/v1/completions", {"model": "x", "prompt": "a"})[0] == 404
        assert server.send("DELETE", "/admin/models/b")[0] == 409
        fields: dict[str, Any] = {"prompt": "abc", "max_tokens": 2}
        assert server.send("POST", "/v1/completions", fields)[2]["model"] == "b"
