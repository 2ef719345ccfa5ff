"""A server on two ranks: a rank that stops restarts the engine with all ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.serve.running import Running, running


def ranks_of(engine: int) -> list[int]:
    """The processes of the ranks that an engine process has started."""
    found = Path(f"/proc/{engine}/task/{engine}/children").read_text(encoding="ascii").split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
    return [pid for pid, line in lines.items() if b"rank_process" in line]


@pytest.mark.slow
def test_a_killed_rank_restarts_the_engine_which_serves_again(folder: Path) -> None:
    def answer(server: Running) -> str:
        found = server.complete(prompt="hi", max_tokens=5, ignore_eos=True, temperature=0)
        return str(found["choices"][0]["text"])

    with running(folder, "--pool", "16MiB") as one:
        wanted = answer(one)
    with running(folder, "--pool", "16MiB", "--tensor-parallel", "2") as server:
        assert answer(server) == wanted
        (rank,) = ranks_of(server.engine)
        os.kill(rank, signal.SIGKILL)
        server.wait_for(lambda: server.metrics()["kvloom_engine_restarts_total"] == 1, 120)
        server.wait_for(server.healthy, 300)
        assert answer(server) == wanted
        assert any("rank 1 has stopped" in line for line in server.said)
