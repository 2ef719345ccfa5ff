"""Encode workers in processes: same tokens as without them, also when one is killed, and no needless requests."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("PIL")

from kvloom.cluster.router.encoders import MAX_IMAGES, EncoderChooser, image_hashes
from kvloom.cluster.router.fleet import Fleet
from kvloom.cluster.router.prompt_keys import PromptKeys, PromptReader
from tests.models.image_folder import encoded, image_folder, picture
from tests.serve.browser import AUDIT, Seen, missing, open_url
from tests.serve.running import Running, running

from .fleet import Process, free_port, started, until

WHY = missing()
PATH = "/v1/chat/completions"


def chat(*seeds: int, words: str = "Compare ", wide: int = 10, **fields: Any) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": words}]
    for seed in seeds:
        data = base64.b64encode(encoded(picture(seed, wide))).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "return_token_ids": True, "max_tokens": 6, **fields}


def answered(server: Running | Process, *seeds: int, **fields: Any) -> list[list[int]]:
    found = server.send("POST", PATH, chat(*seeds, **fields))
    assert found[0] == 200, found
    return [choice["token_ids"] for choice in found[-1]["choices"]]


def test_the_router_names_the_encode_worker_that_has_the_images() -> None:
    chooser = EncoderChooser()
    one, two, three = (image_hashes(chat(seed), "tenant")[0] for seed in (1, 2, 3))
    assert one == image_hashes(chat(1, words="Other"), "tenant")[0]
    assert one != image_hashes(chat(1), "other tenant")[0]
    assert image_hashes({"messages": [{"content": [{"image_url": "a"}, {"image_url": {}}, 3]}, "x"]}, "")
    assert chooser.choose([], ["a", "b"]) is None
    assert chooser.choose([one], []) is None
    assert chooser.choose([one], ["a", "b"]) == "a"
    assert chooser.choose([two], ["a", "b"]) == "b", "it has fewer open images"
    assert chooser.choose([one, three], ["a", "b"]) == "a"
    assert chooser.choose([one], ["b"]) == "b", "the other one is dead"
    for name in ("a", "b"):
        chooser.ended(name, 2)
    chooser.ended("a", 1)
    assert not chooser.open_images
    for number in range(MAX_IMAGES):
        chooser.choose([number.to_bytes(4, "little")], ["a"])
    assert chooser.choose([one, two], ["b", "a"]) == "b", (
        "forgotten: the number of remembered images is bounded"
    )


def test_the_router_counts_tokens_of_images_and_not_their_bytes() -> None:
    reader = PromptReader(Fleet(None), image_tokens=100)  # type: ignore[arg-type]

    def read(*seeds: int, wide: int = 10, **body: Any) -> PromptKeys:
        return asyncio.run(reader.read(body or chat(*seeds, wide=wide), {}))

    without, small, large = read(), read(1), read(1, wide=400)
    assert without.length < 30
    assert 100 < small.length - without.length < 110, "with a little JSON around the image"
    assert large.length == small.length, "its base64 has far more characters"
    assert 200 < read(1, 2).length - without.length < 210
    assert read(1).text == small.text
    for tenant, salt in (("other", ""), ("", "salt")):
        found = asyncio.run(reader.read({**chat(1, wide=10), "cache_salt": salt}, {}, tenant))
        assert not set(found.text) & set(small.text), "tenants and salts do not share routes"
    assert large.text != small.text
    both, other = read(1, 2).text, read(1, 3).text
    shared = next(at for at, (one, two) in enumerate(zip(both, other, strict=True)) if one != two)
    assert shared * 16 >= 100, "the first image is the same"
    data = base64.b64encode(encoded(picture(1, 400))).decode()
    for part in (
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    ):
        assert 100 < read(input=[{"role": "user", "content": [part]}]).length < 120
    for strange in ("text", [3, {"content": 3}, {"content": [3, None, {"type": 3}]}], None):
        read(input=strange)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("models"))[0]


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A router with two encode workers and two others, and a worker that does everything alone."""
    logs, ports = tmp_path_factory.mktemp("logs"), [free_port(), free_port()]
    peers = [word for port in ports for word in ("--encoder", f"peer://127.0.0.1:{port}?timeout=2")]
    small = ("--name", "tiny", "--pool", "4MiB")
    with ExitStack() as stack:
        encoders = [
            stack.enter_context(
                running(folder, "--name", "tiny", "--role", "encode", "--tier", f"host:8MiB?share={port}")
            )
            for port in ports
        ]
        workers = [stack.enter_context(running(folder, *small, *peers)) for _ in range(2)]
        alone = stack.enter_context(running(folder, *small))
        urls = [word for one in (*encoders, *workers) for word in ("--worker", one.url)]
        router = stack.enter_context(started(logs / "router", "route", *urls))
        until(router.is_healthy)
        until(lambda: all(one["alive"] for one in router.send("GET", "/workers")[1]["workers"]))
        yield encoders, workers, alone, router


def counted(servers: list[Running], name: str) -> float:
    return sum(server.metrics()[f"kvloom_{name}_total"] for server in servers)


@pytest.mark.slow
def test_image_prompts_with_and_without_encode_workers(fleet: Any) -> None:
    encoders, workers, alone, router = fleet
    first, second = workers
    assert encoders[0].send("GET", "/health")[2]["role"] == "encode"
    assert encoders[0].metrics()['kvloom_role{role="encode"}'] == 1
    assert encoders[0].send("POST", "/v1/completions", {"prompt": "a"})[0] == 503
    assert encoders[0].send("POST", "/admin/role", {"role": "both"})[0] == 400
    assert first.send("POST", "/admin/role", {"role": "encode"})[0] == 400
    # without a router: streams, several answers, several images, tenants
    assert answered(first, 1) == answered(alone, 1)
    first.wait_for(lambda: counted([first], "handed_over_images") == 1)
    assert counted([first], "handed_over_image_hits") == 0
    assert answered(first, 1) == answered(alone, 1), "a cached prefix covers the image"
    assert answered(first, 1, words="Otherwise, compare ") == answered(alone, 1, words="Otherwise, compare ")
    assert answered(first, 2, 3, n=2, seed=1, temperature=1) == answered(
        alone, 2, 3, n=2, seed=1, temperature=1
    )
    first.wait_for(lambda: counted([first], "handed_over_images") == 3)
    assert counted([first], "image_fallbacks") == 0
    # another worker: the encode workers have the images
    sent = counted([second], "sent_image_bytes")
    assert answered(second, 2, 3) == answered(alone, 2, 3)
    second.wait_for(lambda: counted([second], "handed_over_images") == 2)
    assert counted([second], "handed_over_image_hits") == 2
    assert counted([second], "sent_image_bytes") == sent == 0
    assert answered(second, 2, tenant="other") == answered(alone, 2, tenant="other")
    second.wait_for(lambda: counted([second], "handed_over_images") == 3)
    assert counted([second], "handed_over_image_hits") == 2, "tenants share no embeddings"
    # through the router, which names the encode worker and sends it no request
    for seed in (11, 12, 13, 11):
        assert answered(router, seed) == answered(alone, seed)
    words: list[int] = []
    with router_stream(router, 14) as events:
        for event in events:
            words += event["choices"][0].get("token_ids") or []
    assert [words] == answered(alone, 14)
    assert router.send("POST", "/v1/completions", {"prompt": "text alone", "max_tokens": 2})[0] == 200
    state = router.send("GET", "/kvloom/state")[1]
    roles = {worker["name"]: worker for worker in state["workers"]}
    for encoder in encoders:
        assert roles[encoder.url]["role"] == "encode"
        assert roles[encoder.url]["requests"] == 0
    assert state["totals"]["named_encoders"] == 5
    assert sum(sum(roles[one.url]["hand_overs"].values()) for one in encoders) == 5
    assert router.send("GET", "/v1/models")[1]["data"][0]["workers"] == 2
    until(lambda: counted(encoders, "encoder_images") == 8, 60)  # 1, 2, 3, 2 of a tenant, 11 to 14
    assert counted(encoders, "encoder_refused_images") == 0


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_the_fleet_page_shows_encode_workers(fleet: Any) -> None:
    encoders, workers, _, router = fleet
    assert encoders[0].send("GET", "/kvloom/state")[0] == 200, "the page of an encode worker, without a pool"
    with open_url() as browser:
        one = Seen(browser)
        one.page.goto(f"{router.url}/dashboard")
        one.page.wait_for_selector("#status[data-state=live]")
        rows = one.page.locator("#workers-table tbody tr")
        rows.nth(3).wait_for()
        assert sorted(row.split("\t")[1] for row in rows.all_inner_texts()) == [
            "both",
            "both",
            "encode",
            "encode",
        ]
        assert one.page.locator("#flows-body svg .box").count() == 5
        assert "images encoded" in one.page.locator("#flows-body").inner_text()
        keys = one.page.eval_on_selector_all("path.flow-line", "all => all.map(e => e.dataset.key)")
        assert {key for key in keys if key.startswith("r ")} == {f"r {worker.url}" for worker in workers}
        assert any(key.startswith(f"h {encoders[0].url} ") for key in keys)
        assert one.page.evaluate(AUDIT) == []
        assert one.complaints == []


def router_stream(router: Process, *seeds: int) -> Any:
    return closing(router.stream(PATH, chat(*seeds)))


@pytest.mark.slow
def test_killed_encode_workers_lose_no_request(fleet: Any) -> None:
    encoders, workers, alone, router = fleet
    wanted = {seed: answered(alone, seed) for seed in range(100, 140)}
    found: dict[int, list[list[int]]] = {}
    errors: list[BaseException] = []
    pending = iter(list(wanted))
    lock = threading.Lock()

    def load() -> None:
        while True:
            with lock:
                seed = next(pending, None)
            if seed is None:
                return
            try:
                answer = answered(router, seed)
            except BaseException as error:  # noqa: BLE001  shown below
                errors.append(error)
                return
            with lock:
                found[seed] = answer

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(found) > 5 or bool(errors), 120)
    for encoder in encoders:  # their servers start them again
        os.kill(encoder.engine, signal.SIGKILL)
    for thread in threads:
        thread.join(240)
    assert errors == []
    assert found == wanted
    workers[0].wait_for(lambda: counted(workers, "image_fallbacks") > 0)
    for encoder in encoders:
        encoder.wait_for(encoder.healthy, 120)
    before = counted(workers, "handed_over_images")
    seeds = iter(range(200, 400))

    def is_used_again() -> bool:
        seed = next(seeds)
        assert answered(router, seed) == answered(alone, seed)
        return counted(workers, "handed_over_images") > before

    until(is_used_again, 120)
