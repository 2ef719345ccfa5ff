"""One stream across workers, and the queue in which tenants take turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from kvloom.cluster.router.answer_stream import AnswerStream, DivergedError, WorkerFailedError
from kvloom.cluster.router.fair_queue import FairQueue, QueueFullError


def event(text: str, tokens: list[int], id_: str = "a", finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "token_ids": tokens, "finish_reason": finish}
    return b"data: " + json.dumps({"id": id_, "created": 1, "choices": [choice]}).encode() + b"\n\n"


def texts(data: bytes) -> list[str]:
    found = [json.loads(one[6:]) for one in data.split(b"\n\n") if one.startswith(b"data: {")]
    return [choice["text"] for one in found for choice in one["choices"]]


def test_a_continued_stream_repeats_nothing_and_keeps_its_id() -> None:
    stream = AnswerStream(hides_tokens=True)
    first = event("Hel", [1]) + event("lo", [2])
    out, count = stream.feed(first[:50])
    more, rest = stream.feed(first[50:])
    assert texts(out + more) == ["Hel", "lo"]
    assert count + rest == 2
    assert b"token_ids" not in out + more
    assert stream.tokens == [1, 2]
    stream.restart()
    assert stream.tokens == [1, 2], "until the next worker got farther"
    out, _ = stream.feed(event("Hello, w", [1, 2, 3], id_="b"))
    assert texts(out) == [", w"]
    out, _ = stream.feed(event("orld", [4], id_="b", finish="stop") + b"data: [DONE]\n\n")
    assert texts(out) == ["orld"]
    assert json.loads(out.split(b"\n\n")[0][6:])["id"] == "a"
    assert stream.is_done
    assert stream.tokens == [1, 2, 3, 4]


def test_a_different_answer_is_refused() -> None:
    stream = AnswerStream(hides_tokens=True)
    stream.feed(event("Hello", [1]))
    stream.restart()
    with pytest.raises(DivergedError, match="differs at character 0"):
        stream.feed(event("Help", [1]))


def test_text_before_an_error_reaches_the_client() -> None:
    stream = AnswerStream(hides_tokens=True)
    failed = b'data: {"error": {"message": "the engine died", "type": "server_error"}}\n\n'
    out, _ = stream.feed(event("Hel", [1]) + failed)
    assert texts(out) == ["Hel"]
    with pytest.raises(WorkerFailedError, match="died"):
        stream.check()
    stream.restart()
    stream.check()
    out, _ = stream.feed(event("Hello", [1, 2]))
    assert texts(out) == ["lo"]


def test_a_request_cancelled_while_a_place_becomes_free_does_not_block_the_queue() -> None:
    async def run() -> None:
        queue = FairQueue(1)
        await queue.enter("a", 1)
        tasks = [asyncio.create_task(queue.enter("b", 1)) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        queue.leave("a")  # before the cancelled task runs
        await asyncio.wait(tasks, timeout=60)
        assert tasks[0].cancelled()
        assert tasks[1].done()
        assert (queue.running, queue.waiting) == (1, 0)

    asyncio.run(run())


def test_errors_of_a_worker_fail_over_and_errors_of_the_request_do_not() -> None:
    stream = AnswerStream(hides_tokens=True)
    with pytest.raises(WorkerFailedError, match="died"):
        stream.feed(b'data: {"error": {"message": "the engine died", "type": "server_error"}}\n\n')
    out, _ = stream.feed(b'data: {"error": {"message": "bad", "type": "invalid_request_error"}}\n\n')
    assert b"bad" in out
    assert stream.is_done


def test_chats_with_reasoning_and_calls_continue_by_field() -> None:
    def delta(**fields: Any) -> bytes:
        body = {"id": "a", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]}
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    def call(arguments: str) -> list[dict[str, Any]]:
        return [{"index": 0, "function": {"arguments": arguments}}]

    stream = AnswerStream(hides_tokens=True)
    stream.feed(delta(role="assistant", content=""))
    stream.feed(delta(reasoning_content="because ") + delta(tool_calls=call('{"a"')))
    stream.restart()
    out, _ = stream.feed(
        delta(role="assistant", reasoning_content="because ") + delta(tool_calls=call('{"a": 1}'))
    )
    (left,) = [json.loads(one[6:]) for one in out.split(b"\n\n") if one]
    assert left["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] == ": 1}"


def test_the_tenant_with_the_least_service_goes_first() -> None:
    async def run() -> list[str]:
        queue, order = FairQueue(1), []
        await queue.enter("other", 1)

        async def request(tenant: str) -> None:
            await queue.enter(tenant, 100)
            order.append(tenant)
            queue.leave(tenant)

        tasks = [asyncio.create_task(request(t)) for t in ("big", "big", "big", "big", "small")]
        await asyncio.sleep(0)
        assert queue.waiting == 5
        queue.leave("other")
        await asyncio.gather(*tasks)
        assert (queue.running, queue.waiting) == (0, 0)
        return order

    order = asyncio.run(run())
    assert order.index("small") <= 1
    assert len(order) == 5


def test_a_full_queue_refuses_and_a_cancelled_request_leaves() -> None:
    async def run() -> None:
        queue = FairQueue(1, limit=1)
        await queue.enter("a", 1)
        waiting = asyncio.create_task(queue.enter("b", 1))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await queue.enter("c", 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert queue.waiting == 0
        queue.leave("a")
        await queue.enter("c", 1)
        assert queue.running == 1

    asyncio.run(run())


def test_cancelled_requests_give_no_earlier_turn_and_use_no_memory() -> None:
    async def run() -> None:
        queue, order = FairQueue(1), []
        await queue.enter("greedy", 1000)

        async def request(tenant: str) -> None:
            await queue.enter(tenant, 100)
            order.append(tenant)
            queue.leave(tenant)

        async def cancelled(tenant: str) -> None:
            task = asyncio.create_task(queue.enter(tenant, 1))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for _ in range(500):
            await cancelled("greedy")
        for number in range(5_000):
            await cancelled(f"made up {number}")
        assert len(queue._order) < 1000
        assert len(queue._queues) == 0
        assert len(queue._service) <= 4097
        tasks = [asyncio.create_task(request(tenant)) for tenant in ["greedy"] * 5 + ["modest"] * 3]
        await asyncio.sleep(0)
        queue.leave("greedy")
        await asyncio.gather(*tasks)
        assert order[:4].count("modest") >= 2, order

    asyncio.run(run())


def test_long_answers_of_one_tenant_do_not_delay_another() -> None:
    """All places have requests of one tenant that do not end. Another tenant gets its share at once, and then waits."""

    async def run() -> None:
        queue = FairQueue(8)
        flood = [asyncio.create_task(queue.enter("flood", 1)) for _ in range(50)]
        await asyncio.sleep(0)
        assert (queue.running, queue.waiting) == (8, 42)
        for _ in range(4):
            await asyncio.wait_for(queue.enter("other", 1), 1)
        fifth = asyncio.create_task(queue.enter("other", 1))
        await asyncio.sleep(0)
        assert (queue.running, queue.waiting) == (12, 43)
        for _ in range(4):
            queue.leave("flood")
        await asyncio.sleep(0)
        assert not fifth.done(), "eight requests still run"
        queue.leave("other")
        await asyncio.wait_for(fifth, 1)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(run())


def test_no_tenant_fills_the_queue() -> None:
    async def run() -> None:
        queue = FairQueue(1, limit=10)
        await queue.enter("flood", 1)
        flood = [asyncio.create_task(queue.enter("flood", 1)) for _ in range(20)]
        await asyncio.sleep(0)
        assert queue.waiting == 8
        others = [asyncio.create_task(queue.enter(name, 1)) for name in ("b", "c", "d")]
        await asyncio.sleep(0)
        assert queue.waiting == 10
        for task in (*flood, *others):
            task.cancel()
        refused = [
            error
            for error in await asyncio.gather(*flood, *others, return_exceptions=True)
            if isinstance(error, QueueFullError)
        ]
        assert len(refused) == 12 + 1

    asyncio.run(run())


def test_idle_time_and_generated_tokens_count() -> None:
    """A tenant that sent one small request long ago has no advantage, and generated tokens count like prompt tokens."""

    async def run() -> list[str]:
        queue, order = FairQueue(1), []
        await queue.enter("early", 1)
        queue.leave("early")
        await queue.enter("a", 100)

        async def request(tenant: str, tokens: int) -> None:
            await queue.enter(tenant, tokens)
            order.append(tenant)
            queue.leave(tenant)

        sent = [("early", 60), ("b", 60), ("early", 60), ("a", 1)]
        tasks = [asyncio.create_task(request(*one)) for one in sent]
        await asyncio.sleep(0)
        queue.served("a", 50)
        queue.leave("a")
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["early", "b", "a", "early"]
