"""`kvloom bench online`: the plans, the clients against a server that answers at known times, and the figures."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from kvloom.bench import online
from kvloom.bench.online_client import Answer, Plan, prompt_ids

GAP = 0.02


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer GET with a model, a prompt that asks for 3 tokens with an error, and other prompts with a stream."""

    def chunk(text: str) -> bytes:
        return b"%x\r\n%b\r\n" % (len(text), text.encode())

    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        if head.startswith(b"GET"):
            body = b'{"data": [{"id": "m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            continue
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        tokens = json.loads(await reader.readexactly(size))["max_tokens"]
        if tokens == 3:
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")
            continue
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(tokens):
            await asyncio.sleep(GAP)
            writer.write(chunk('data: {"choices":[{"text":"a"}]}\n\n'))
        writer.write(chunk(f'data: {{"choices":[],"usage":{{"completion_tokens":{tokens}}}}}\n\n'))
        writer.write(chunk("data: [DONE]\n\n") + b"0\r\n\r\n")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_requests_arrive_at_the_rate_and_are_the_same_for_the_same_seed() -> None:
    plans = online.plan_requests("chat", 50.0, 5000, 1)
    assert plans == online.plan_requests("chat", 50.0, 5000, 1)
    assert 90 < plans[-1].at < 110
    assert all(a.at <= b.at for a, b in pairwise(plans))
    assert 150 < sum(one.prompt for one in plans) / len(plans) < 300
    assert {one.at for one in online.plan_requests("chat", math.inf, 10, 0)} == {0.0}


def test_later_turns_of_a_session_begin_with_the_earlier_prompt() -> None:
    plans = online.plan_requests("sessions", 10.0, 64 * 9, 0)
    first = [one for one in plans if one.conversation == 5]
    assert [one.prompt for one in first] == [2048 + 256 * turn for turn in range(8)]
    ids = [prompt_ids(0, 5, one.prompt, 4096) for one in first]
    assert all(b[: len(a)] == a for a, b in pairwise(ids))
    assert {one.conversation for one in plans[64 * 8 :]} == set(range(64, 128))


def test_figures_are_those_of_the_answers() -> None:
    good = Answer(0.0, 0.1, [0.01, 0.03], 3)
    late = Answer(1.0, 0.9, [0.01, 0.01], 3)
    found = online.summary([good, late, Answer(1.0, error="HTTP/1.1 429")], 500.0, 50.0)
    assert found["requests"] == 2
    assert found["errors"] == {"HTTP/1.1 429": 1}
    assert found["met_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["requests_per_second"] == pytest.approx(2 / 1.92, abs=0.01)
    assert found["ttft_ms"]["p50"] == pytest.approx(500)
    assert found["tbt_ms"]["p50"] == pytest.approx(10)


def test_clients_measure_a_server_with_known_times(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(online, "plan_requests", lambda *_: [Plan(0.05 * i, i, 8, 6) for i in range(4)])
    rate = ["--rates", "inf", "--requests", "4", "--clients", "2", "--json"]
    code = online.main([f"one={url}", *rate])
    (row,) = json.loads(capsys.readouterr().out)
    assert code == 0
    assert row["requests"] == 4
    assert row["tbt_ms"]["p50"] >= 1e3 * GAP * 0.9  # a busy machine may add to it
    assert row["mean_tbt_ms"]["p50"] >= 1e3 * GAP * 0.9


def test_refused_requests_are_counted(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(online, "plan_requests", lambda *_: [Plan(0.0, 0, 4, 3), Plan(0.0, 1, 4, 4)])
    assert online.main([f"one={url}", "--requests", "2", "--clients", "1", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["requests"] == 1
    assert row["errors"] == {"HTTP/1.1 429 Too Many Requests": 1}


@pytest.mark.parametrize(
    "arguments",
    [["127.0.0.1:1"], ["a=127.0.0.1:1", "--rates", "0"], ["a=127.0.0.1:1", "--tokenizer", "none"]],
)
def test_wrong_arguments_end_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = online.main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert "kvloom bench online" in capsys.readouterr().err
