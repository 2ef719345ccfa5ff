"""A server on several ranks: answers, and restarts after a rank or the engine has stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.serve.running import Running, running

pytestmark = pytest.mark.slow
TENSOR, CONTEXT = ("--tensor-parallel", "2"), ("--context-parallel", "2")
POOL = "--pool", "16MiB"


def ranks_of(engine: int) -> list[int]:
    """The processes of the ranks that an engine process has started."""
    found = Path(f"/proc/{engine}/task/{engine}/children").read_text(encoding="ascii").split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
    return [pid for pid, line in lines.items() if b"rank_process" in line]


def is_running(pid: int) -> bool:
    """Whether a process exists. A zombie has ended, and only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answer(server: Running) -> tuple[str, int]:
    """The answer of a server, and the number of cached tokens of the prompt."""
    found = server.complete(prompt="hi " * 40, max_tokens=5, ignore_eos=True, temperature=0)
    return str(found["choices"][0]["text"]), found["usage"]["prompt_tokens_details"]["cached_tokens"]


def pages_on_disk(server: Running) -> float:
    """The number of pages in the disk tier. The prompt of `answer` has seven full blocks, with a page each."""
    found = server.metrics().items()
    return sum(value for name, value in found if name.startswith("kvloom_tier_objects{") and "disk" in name)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> str:
    """The answer of one rank."""
    with running(folder, *POOL) as one:
        return answer(one)[0]


@pytest.mark.parametrize("options", [TENSOR, CONTEXT, (*TENSOR, *CONTEXT)], ids=str)
def test_a_server_on_ranks_gives_the_answer_of_one(
    options: tuple[str, ...], folder: Path, wanted: str
) -> None:
    more = "--tier", "host:16MiB", "--speculate", "suffix"
    with running(folder, *POOL, *options, *more) as server:
        assert answer(server) == (wanted, 0)
        again, cached = answer(server)
        assert again == wanted
        assert cached > 96


@pytest.mark.parametrize(
    ("options", "number", "said"),
    [
        (TENSOR, signal.SIGKILL, "rank 1 has stopped"),
        (CONTEXT, signal.SIGKILL, "rank 1 has stopped"),
        ((*TENSOR, "--rank-seconds", "10"), signal.SIGSTOP, "has not answered for 10 s"),
    ],
    ids=str,
)
def test_an_engine_restarts_and_loads_its_pages_after_a_rank_has_stopped(
    options: tuple[str, ...],
    number: signal.Signals,
    said: str,
    folder: Path,
    wanted: str,
    tmp_path: Path,
) -> None:
    """A rank that hangs is noticed in the next step. No process of the group remains."""
    tiers = "--tier", "host:16MiB", "--tier", f"disk:{tmp_path}:64MiB", "--load", "always"
    with running(folder, *POOL, *options, *tiers) as server:
        assert answer(server) == (wanted, 0)
        server.wait_for(lambda: pages_on_disk(server) >= 7)
        engine, ranks = server.engine, ranks_of(server.engine)
        assert len(ranks) == 1
        os.kill(ranks[0], number)
        if number == signal.SIGSTOP:
            status, _, found = server.send("POST", "/v1/completions", {"model": "tiny", "prompt": "other"})
            assert (status, found["error"]["code"]) == (503, "engine_died")
        server.wait_for(lambda: server.metrics()["kvloom_engine_restarts_total"] == 1, 120)
        server.wait_for(server.healthy, 300)
        again, cached = answer(server)
        assert (again, cached >= 96) == (wanted, True)
        assert any(said in line for line in server.said)
        server.wait_for(lambda: not any(map(is_running, [engine, *ranks])))


def test_ranks_end_with_their_engine(folder: Path, wanted: str) -> None:
    with running(folder, *POOL, *TENSOR) as server:
        ranks = ranks_of(server.engine)
        assert ranks
        os.kill(server.engine, signal.SIGKILL)
        server.wait_for(lambda: not any(map(is_running, ranks)))
        server.wait_for(lambda: server.metrics()["kvloom_engine_restarts_total"] == 1, 120)
        server.wait_for(server.healthy, 300)
        assert answer(server)[0] == wanted
