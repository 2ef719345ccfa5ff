"""Workers of a router that leave, or restart, while the router runs. No process is started."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("zmq")

import zmq.asyncio
from tools.simulation.stand_in_worker import MODEL, EventContext, Faults, Session, StandInWorker

from kvloom.cluster.router.fleet import Fleet, Offer
from kvloom.events_wire import BlockStored, EventBatch, raw_tokens

HASHES = list(range(1, 25_001))


def stored(hashes: list[int]) -> EventBatch:
    return EventBatch(1.0, [BlockStored(hashes, None, raw_tokens(b""), 16, medium="GPU", group_idx=0)])


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_cancelled_removal_leaves_no_blocks_and_frees_the_number(turns: int) -> None:
    async def run() -> None:
        fleet = Fleet(None)  # type: ignore[arg-type]
        for model in ("a", "b"):
            fleet.register("first", "", model, Offer("m"))
        for served in fleet.models.values():
            served.index.apply("first", stored(HASHES))
        removal = asyncio.create_task(fleet.remove("first"))
        await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        removal.cancel()
        await asyncio.gather(removal, return_exceptions=True)
        assert removal.cancelled()
        for model in ("a", "b"):
            fleet.register("second", "", model, Offer("m"))
        for served in fleet.models.values():
            assert len(served.index) == 0
            assert served.index.lengths([1]) == {"second": (0, 0, 0, 0)}
            assert len(served.index._names) == 1, "the number of the removed worker is used again"
        await fleet.close()

    asyncio.run(run())


def test_a_worker_may_be_added_again_during_its_removal() -> None:
    async def run() -> None:
        fleet = Fleet(None)  # type: ignore[arg-type]
        fleet.register("first", "", "a", Offer("m"))
        served = fleet.models["a"]
        served.index.apply("first", stored(HASHES))
        removal = asyncio.create_task(fleet.remove("first"))
        await asyncio.sleep(0)
        fleet.register("first", "", "a", Offer("m"))
        served.index.apply("first", stored(HASHES[:2]))
        served.texts.expect("first", [7])
        await removal
        assert served.index.lengths([1]) == {"first": (16, 16, 16, 16)}
        assert served.texts.lengths([7]) == {"first": (16, 16, 16, 16)}
        assert len(served.index) == 2
        await fleet.close()

    asyncio.run(run())


def test_a_restart_between_two_checks_is_noticed() -> None:
    """The restarted worker publishes as many batches as the old one had, and the first of them are lost."""
    faults = Faults("none")
    worker = StandInWorker(0, faults, 60, False)
    hosts = {worker.host: worker}

    async def run() -> None:
        fleet = Fleet(Session(hosts, faults))  # type: ignore[arg-type]
        known = fleet.add(worker.url)
        assert known.check is not None
        known.check.cancel()
        await fleet.check(known)

        async def until_equal() -> None:
            async with asyncio.timeout(20):
                while fleet.models[MODEL].index.counts(worker.url)["GPU"] != len(worker.cache):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        worker.store(list(range(1, 65)), "")
        await until_equal()
        worker.kill()
        worker.start()
        faults.rates = {"lost_batch": 1.0}
        worker.store(list(range(100, 116)), "")
        faults.rates = {}
        worker.store(list(range(200, 216)), "")  # its number follows that of the batch before the restart
        await asyncio.sleep(0.1)
        await fleet.check(known)
        await until_equal()
        await fleet.close()
        await asyncio.sleep(0)

    context: Any = lambda: EventContext(hosts, faults)  # noqa: E731
    with patch.object(zmq.asyncio, "Context", context):
        asyncio.run(run())
