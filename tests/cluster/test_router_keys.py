"""Keys of a router's own endpoints: a worker checks the keys of clients, and the router checks its admin key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("zmq")

from aiohttp import web

from kvloom.cli import main
from tests.cluster.fleet import Process, started, until

CLIENT, ADMIN = "key-of-a-client", "key-of-the-admin"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("router")
    flags = ("--no-tokenize", "--admin-key", ADMIN, "--metrics-auth", "key", "--worker-key", CLIENT)
    with started(folder / "log", "route", *flags) as one:
        until(lambda: reachable(one))
        yield one


def reachable(router: Process) -> bool:
    try:
        return router.send("GET", "/version")[0] == 200
    except OSError:
        return False


def test_metrics_need_the_admin_key(router: Process) -> None:
    assert router.send("GET", "/metrics")[0] == 401
    assert router.send("GET", "/metrics", headers=bearer(CLIENT))[0] == 401
    status, text = router.send("GET", "/metrics", headers=bearer(ADMIN))
    assert (status, "kvloom_router_running 0" in text) == (200, True)


def test_models_are_listed_for_keys_that_a_worker_accepts(router: Process) -> None:
    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def listed(request: web.Request) -> web.Response:
        keys = request.headers.get("authorization"), request.headers.get("x-api-key")
        if keys not in ((f"Bearer {CLIENT}", None), (None, CLIENT)):
            return web.json_response({"error": {}}, status=401)
        return web.json_response({"data": [{"id": "m"}]})

    def models(headers: dict[str, str]) -> tuple[int, list[str]]:
        status, found = router.send("GET", "/v1/models", headers=headers)
        return status, [one["id"] for one in found.get("data", ())]

    async def run() -> None:
        assert (await asyncio.to_thread(models, bearer(CLIENT)))[0] == 503, "no worker can check the key"
        application = web.Application()
        application.add_routes([web.get("/health", health), web.get("/v1/models", listed)])
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            await asyncio.to_thread(router.send, "POST", "/register", {"url": url}, bearer(ADMIN))
            accepted = ({"x-api-key": CLIENT}, bearer(CLIENT), bearer(ADMIN))
            await asyncio.to_thread(until, lambda: models(bearer(ADMIN)) == (200, ["m"]))
            for headers in accepted:
                assert await asyncio.to_thread(models, headers) == (200, ["m"])
            refused: tuple[dict[str, str], ...] = ({}, bearer("another key"), {"x-api-key": "another key"})
            for headers in refused:
                assert await asyncio.to_thread(models, headers) == (401, [])
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_a_key_for_metrics_must_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--metrics-auth", "key"]) != 0
    assert "--admin-key" in capsys.readouterr().err
