"""A server whose context is divided between two ranks, with a tier and draft tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.running import Running, running


@pytest.mark.slow
def test_a_server_on_two_ranks_gives_the_answer_of_one(folder: Path) -> None:
    def answer(server: Running) -> str:
        found = server.complete(prompt="hi " * 40, max_tokens=5, ignore_eos=True, temperature=0)
        return str(found["choices"][0]["text"])

    with running(folder, "--pool", "16MiB") as one:
        wanted = answer(one)
    options = "--context-parallel", "2", "--tier", "host:16MiB", "--speculate", "suffix"
    with running(folder, "--pool", "16MiB", *options) as server:
        assert answer(server) == wanted
        assert answer(server) == wanted  # a prefix hit
