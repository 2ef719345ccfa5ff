"""LoRA adapters of a server: by model name, listed, loaded and unloaded while it runs, counted, kept over a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvloom.serve.api.allowed_folders import allowed_folder
from kvloom.serve.errors import ApiError
from tests.models.lora_adapters import greedy, merged, write_adapter
from tests.serve.running import MODEL, Running, running, serve_command

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADMIN, USER = "key-of-admin-1", "key-of-user-1"
NEW = 10


def prompt(seed: int, length: int = 40) -> list[int]:
    return [5 + (seed * 37 + i * (seed + 3)) % 250 for i in range(length)]


@pytest.fixture(scope="module")
def shelf(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three adapters."""
    path = tmp_path_factory.mktemp("adapters")
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for seed, name in enumerate(("sql", "chat", "poems")):
        write_adapter(path / name, base, TARGETS, seed=seed, size=0.3)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path, shelf: Path) -> dict[tuple[str, int], list[int]]:
    """Greedy tokens of the plain models, by adapter and prompt."""
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.generation_config.eos_token_id = None
    models = {MODEL: base, **{name: merged(base, shelf / name) for name in ("sql", "chat", "poems")}}
    return {
        (name, seed): greedy(model, prompt(seed), NEW) for name, model in models.items() for seed in range(3)
    }


@pytest.fixture(scope="module")
def server(folder: Path, shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{ADMIN} ops admin\n{USER} users\n")
    keys.chmod(0o600)
    more = ("--lora", f"sql={shelf / 'sql'}", "--max-loras", "2", "--lora-dir", str(shelf))
    with running(folder, "--pool", "16MiB", "--api-keys", str(keys), *more) as found:
        yield found


def answer(server: Running, model: str, seed: int, **more: Any) -> dict[str, Any]:
    fields = {"prompt": prompt(seed), "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    found = server.complete(USER, model=model, **fields, return_token_ids=True, **more)
    assert found["model"] == model
    return found


def tokens(server: Running, model: str, seed: int) -> list[int]:
    return list(answer(server, model, seed)["choices"][0]["token_ids"])


def change(server: Running, verb: str, key: str = ADMIN, **fields: Any) -> tuple[int, Any]:
    status, _, found = server.send("POST", f"/v1/{verb}_lora_adapter", fields, key=key)
    return status, found


def names(server: Running) -> dict[str, Any]:
    _, _, found = server.send("GET", "/v1/models", key=USER)
    return {one["id"]: one["parent"] for one in found["data"]}


def test_requests_name_an_adapter_as_their_model(
    server: Running, expected: dict[tuple[str, int], list[int]], shelf: Path
) -> None:
    with ThreadPoolExecutor(6) as threads:
        asked = [(name, seed) for name in (MODEL, "sql") for seed in range(3)]
        found = list(threads.map(lambda one: tokens(server, *one), asked))
    assert found == [expected[one] for one in asked]
    assert names(server) == {MODEL: None, "sql": MODEL}
    _, _, one = server.send("GET", "/v1/models/sql", key=USER)
    assert (one["id"], one["parent"], one["root"]) == ("sql", MODEL, str(shelf / "sql"))
    _, _, latest = server.send("GET", "/kvloom/requests?limit=6", key=USER)
    assert sorted(one["adapter"] or "" for one in latest["requests"]) == [""] * 3 + ["sql"] * 3
    chat = server.client(USER).chat.completions.create(
        model="sql", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert chat.model == "sql"
    status, _, refusal = server.send("POST", "/v1/completions", {"model": "nobody", "prompt": "x"}, key=USER)
    assert (status, refusal["error"]["code"]) == (404, "model_not_found")


def test_adapters_are_loaded_and_unloaded_by_the_api(
    server: Running, expected: dict[tuple[str, int], list[int]], shelf: Path
) -> None:
    status, text = change(server, "load", lora_name="talk", lora_path=str(shelf / "chat"))
    assert (status, text) == (200, "Success: LoRA adapter 'talk' added successfully.")
    assert names(server) == {MODEL: None, "sql": MODEL, "talk": MODEL}
    assert tokens(server, "talk", 0) == expected["chat", 0]
    assert answer(server, "talk", 0)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    status, refusal = change(server, "load", lora_name="talk", lora_path="poems")
    assert status == 400
    assert "another version of adapter 'talk' is already loaded" in refusal["error"]["message"]
    status, _ = change(server, "load", lora_name="talk", lora_path="poems", load_inplace=True)
    assert status == 200
    again = answer(server, "talk", 0)
    assert again["choices"][0]["token_ids"] == expected["poems", 0]  # no pages of the old version
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert tokens(server, "sql", 1) == expected["sql", 1]

    found = server.metrics(ADMIN)
    assert found["kvloom_adapters"] == 2
    assert found['kvloom_adapter_requests_total{adapter="talk"}'] >= 1

    status, text = change(server, "unload", lora_name="talk")
    assert (status, text) == (200, "Success: LoRA adapter 'talk' removed successfully.")
    assert names(server) == {MODEL: None, "sql": MODEL}
    status, _, refusal = server.send("POST", "/v1/completions", {"model": "talk", "prompt": "x"}, key=USER)
    assert status == 404
    assert refusal["error"]["message"] == f"model 'talk' is not served here; use '{MODEL}' or 'sql'"
    assert change(server, "unload", lora_name="talk")[0] == 404


def test_links_that_form_a_loop_are_no_allowed_folder(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for asked in ("a", "a/x", str(tmp_path / "b")):
        with pytest.raises(ApiError, match="is not a folder below"):
            allowed_folder(asked, [tmp_path.resolve()], "lora_path", "--lora-dir")


def test_loading_needs_an_admin_key_and_an_allowed_folder(server: Running, shelf: Path, folder: Path) -> None:
    assert change(server, "load", USER, lora_name="x", lora_path="chat")[0] == 403
    assert change(server, "unload", USER, lora_name="sql")[0] == 403
    for path in (str(folder), "..", "missing", str(shelf)):
        status, refusal = change(server, "load", lora_name="x", lora_path=path)
        assert status == 400
        assert "is not a folder below those of --lora-dir" in refusal["error"]["message"]
    status, refusal = change(server, "load", lora_name=MODEL, lora_path="chat")
    assert status == 400
    assert "is empty or the name of a model" in refusal["error"]["message"]
    (shelf / "empty").mkdir(exist_ok=True)
    status, refusal = change(server, "load", lora_name="x", lora_path="empty")
    assert status == 400
    assert "there is no adapter_config.json" in refusal["error"]["message"]


@pytest.mark.slow
def test_a_restarted_engine_has_the_same_adapters(
    server: Running, expected: dict[tuple[str, int], list[int]]
) -> None:
    assert change(server, "load", lora_name="late", lora_path="chat")[0] == 200
    os.kill(server.engine, signal.SIGKILL)
    server.wait_for(lambda: not server.healthy())
    server.wait_for(server.healthy)
    assert names(server) == {MODEL: None, "sql": MODEL, "late": MODEL}
    assert tokens(server, "late", 2) == expected["chat", 2]
    assert tokens(server, "sql", 2) == expected["sql", 2]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lora", "x"], "is not NAME=FOLDER"),
        (["--lora", "x=/nowhere"], "lora x=/nowhere: there is no such folder"),
        (["--lora", "x=/"], "the folder has no adapter_config.json"),
        (["--lora", f"{MODEL}=SHELF/sql"], "is the name of a model already"),
        (["--lora-dir", "SHELF"], "--lora-dir needs slots for adapters: add --max-loras N"),
    ],
)
@pytest.mark.few(1)
def test_options_that_cannot_work_are_refused(
    folder: Path, shelf: Path, arguments: list[str], reason: str
) -> None:
    import subprocess

    given = [one.replace("SHELF", str(shelf)) for one in arguments]
    done = subprocess.run(
        serve_command(folder, *given), check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert reason in done.stderr
