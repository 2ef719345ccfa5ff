"""Hot prefixes on two workers: the death of either loses no page that had two copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

from kvloom.cluster.router.fleet import Fleet, Offer, ServedModel, Worker
from kvloom.cluster.router.fleet_index import FleetIndex
from kvloom.cluster.router.replication import ReplicationOptions, Replicator
from kvloom.cluster.router.scoring import Scorer, WorkerLoad
from tests.cluster.fleet import Process, free_port, started, until
from tests.serve.running import MODEL, model_folder

PREFIX = [(7 * i) % 250 + 20 for i in range(320)]


def fleet_of(**offers: Offer) -> Fleet:
    fleet = Fleet(None)  # type: ignore[arg-type]
    served = fleet.models["m"] = ServedModel("m", FleetIndex(), Scorer())
    for name, offer in offers.items():
        fleet.workers[name] = Worker(name, f"http://{name}", is_alive=True, models={"m": offer})
        served.scorer.loads[name] = WorkerLoad()
    return fleet


def asked(replicator: Replicator, cached: int, lengths: dict[str, tuple[int, ...]], **body: Any) -> list[Any]:
    """The copies that one hit starts, as (tokens, source, target)."""
    found: list[Any] = []

    async def copy(_: Any, tokens: int, source: str, target: str) -> None:
        found.append((tokens, source, target))

    replicator._copy = copy  # type: ignore[method-assign]

    async def observe() -> None:
        import asyncio

        call = SimpleNamespace(model="m", adapter=None, body=body)
        replicator.observe(call, cached, list(range(100)), lengths)  # type: ignore[arg-type]
        await asyncio.sleep(0)

    import asyncio

    asyncio.run(observe())
    return found


def test_a_hot_prefix_with_one_copy_is_copied_once() -> None:
    fleet = fleet_of(
        a=Offer(peer="h:1", reads=("h:2",)), b=Offer(peer="h:2", reads=("h:1",)), c=Offer(peer="h:3")
    )
    replicator = Replicator(fleet, ReplicationOptions(2, hits=3))
    one = {"a": (320,) * 4, "b": (16,) * 4, "c": (0,) * 4}
    assert [asked(replicator, 325, one) for _ in range(4)] == [[], [], [(320, "a", "b")], []], (
        "c reads from no peer"
    )
    assert asked(replicator, 200, one) == asked(replicator, 325, one, lossy=True) == []
    two = {**one, "b": (320,) * 4}
    other = Replicator(fleet, ReplicationOptions(2, hits=1))
    assert asked(other, 325, two) == [], "there are two copies"
    assert asked(other, 300, {**one, "b": (300,) * 4}) == []
    fleet.workers["a"].is_alive = False
    assert asked(Replicator(fleet, ReplicationOptions(2, hits=1)), 325, one) == [], (
        "a dead worker is no source"
    )
    assert asked(Replicator(fleet), 325, one) == [], "one copy by default"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Process, list[Process]]]:
    """A router that keeps two copies, and two workers that read each other's pages."""
    folder = model_folder(tmp_path)
    shared = [free_port() for _ in range(2)]
    with ExitStack() as stack:
        workers = []
        for number in range(2):
            events = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            flags = ["--device", "cpu", "--pool", "32MiB", "-q", "--drain-seconds", "0"]
            flags += ["--kv-events", events[0], "--kv-events-replay", events[1]]
            flags += ["--tier", f"host:32MiB?share={shared[number]}"]
            flags += ["--tier", f"peer://127.0.0.1:{shared[1 - number]}?optional=1&write=back"]
            workers.append(
                stack.enter_context(started(tmp_path / f"{number}.log", "serve", str(folder), *flags))
            )
        named = [word for worker in workers for word in ("--worker", worker.url)]
        more = ["--copies", "2", "--hot-hits", "2", "--affinity-seconds", "0"]
        router = stack.enter_context(started(tmp_path / "router.log", "route", *more, *named))
        until(lambda: router.is_healthy() and len(alive(router)) == 2)
        until(lambda: all(has_peer(worker) for worker in workers))
        yield router, workers


def has_peer(worker: Process) -> bool:
    """Whether a worker has found the other one, which may have started later."""
    said = worker.log.read_text()
    return "is left out" not in said or "is available now" in said


def alive(router: Process) -> list[str]:
    return [one["url"] for one in router.send("GET", "/workers")[1]["workers"] if one["alive"]]


def cached(router: Process) -> dict[str, int]:
    _, found = router.send("POST", "/query", {"model_name": MODEL, "token_ids": PREFIX})
    return {name: one["gpu"] for name, one in found["instances"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_any_worker_loses_no_page_with_two_copies(
    fleet: tuple[Process, list[Process]], victim: int
) -> None:
    router, workers = fleet

    def ask(number: int) -> Any:
        body = {"model": MODEL, "prompt": [*PREFIX, 30 + number, 40, 50], "max_tokens": 8, "temperature": 0}
        status, found = router.send("POST", "/v1/completions", body)
        assert status == 200, found
        return found

    first = ask(0)
    until(lambda: max(cached(router).values()) == 320)
    assert sorted(cached(router).values()) == [0, 320]
    for number in (1, 2, 3):
        ask(number)
    until(lambda: set(cached(router).values()) == {320})
    metrics = router.send("GET", "/metrics")[1]
    assert "kvloom_router_copied_prefixes_total 1" in metrics
    assert "kvloom_router_failed_copies_total 0" in metrics
    until(lambda: sum(pulled(worker) for worker in workers) >= 20)  # not computed again
    workers[victim].kill()
    until(lambda: len(alive(router)) == 1)
    found = ask(0)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 320
    assert found["choices"][0]["text"] == first["choices"][0]["text"]


def pulled(worker: Process) -> int:
    lines = worker.send("GET", "/metrics")[1].splitlines()
    return sum(
        int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("kvloom_handed_over_pages")
    )
