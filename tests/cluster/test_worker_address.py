"""Workers of `kvloom route --worker`: the URL, and for other engines the addresses of their events."""

from __future__ import annotations

import argparse
import asyncio

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web

from kvloom.cluster.router.command import WorkerAddress, arguments, worker_address
from kvloom.cluster.router.fleet import Fleet, Offer

EVENTS, REPLAY = "tcp://127.0.0.1:5557", "ipc:///run/vllm-replay"


def test_a_worker_may_state_the_addresses_of_its_events() -> None:
    assert worker_address("127.0.0.1:8001") == WorkerAddress("http://127.0.0.1:8001")
    found = worker_address(f"http://127.0.0.1:8001/?events={EVENTS}&replay={REPLAY}")
    assert found == WorkerAddress("http://127.0.0.1:8001", EVENTS, REPLAY)
    parser = argparse.ArgumentParser()
    arguments(parser)
    args = parser.parse_args(["--worker", "http://a:1", "--worker", f"http://b:1?events={EVENTS}"])
    assert args.worker == [WorkerAddress("http://a:1"), WorkerAddress("http://b:1", EVENTS)]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("event=tcp://a:1", "'event' .* is unknown; known: events, replay"),
        ("events", "must have the form events=ADDRESS"),
        ("events=http://a:1", "is not a ZMQ address"),
        ("replay=tcp://a:1", "replay without events"),
    ],
)
def test_invalid_addresses_are_refused(query: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        worker_address(f"http://127.0.0.1:8001?{query}")


def test_models_of_another_engine_have_the_stated_addresses() -> None:
    """The addresses count for models without a registration. Adapters have none."""
    models = [{"id": "base", "parent": None}, {"id": "adapter", "parent": "base"}, {"id": "registered"}]

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def listed(_: web.Request) -> web.Response:
        return web.json_response({"data": models})

    async def run() -> dict[str, Offer]:
        application = web.Application()
        application.add_routes([web.get("/health", health), web.get("/v1/models", listed)])
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as session:
                fleet = Fleet(session)
                worker = fleet.add(f"http://127.0.0.1:{port}")
                worker.publishes = Offer(events=EVENTS, replay=REPLAY)
                worker.given["registered"] = Offer(events="tcp://127.0.0.1:1")
                found = await fleet._ask(worker)
                await fleet.close()
                return found
        finally:
            await runner.cleanup()

    found = asyncio.run(run())
    assert (found["base"].events, found["base"].replay) == (EVENTS, REPLAY)
    assert found["adapter"].events is None
    assert found["registered"].events == "tcp://127.0.0.1:1"
