"""Draft trees: every branch is computed as if it were alone, and the tokens are those of plain decoding."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.models.paged import Work
from tests.engines import make_engine
from tests.models.zoo import tiny

FAMILIES = ["llama", "gemma3_text", "llama4_text", "deepseek_v3"]


def random_parents(count: int, rng: random.Random) -> tuple[int, ...]:
    """A random tree: each node follows an earlier one, or the token before the tree."""
    return tuple(rng.randrange(-1, node) for node in range(count))


def path(parents: tuple[int, ...], node: int) -> list[int]:
    """The nodes from the root of the tree to `node`."""
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(4)
def test_logits_of_a_tree_equal_those_of_each_branch(family: str, kv_dtype: Any) -> None:
    rng = random.Random(family)
    model = tiny(family)
    engine = make_engine(model, 1 << 23, kv_dtype, token_budget=64, max_running=4)
    cache, runner = engine.cache, engine.runner
    prompts = [[rng.randrange(3, 64) for _ in range(length)] for length in (5, 15, 37)]
    parents = [random_parents(count, rng) for count in (12, 20, 5)]
    nodes = [[rng.randrange(3, 64) for _ in part] for part in parents]
    sequences = []
    for prompt in prompts:
        sequence = cache.open(cache.match(np.array(prompt, np.int32)))
        assert not sequence.extend(len(prompt))
        runner.run([Work(sequence, np.array(prompt))])
        sequence.commit(np.array(prompt, np.int32))
        sequences.append(sequence)
    last = [rng.randrange(3, 64) for _ in prompts]

    def alone(i: int, tokens: list[int]) -> torch.Tensor:
        assert not sequences[i].extend(1 + len(tokens))
        return runner.run([Work(sequences[i], np.array([last[i], *tokens]), drafts=len(tokens))])

    wanted = [
        torch.stack(
            [alone(i, [])[-1]]
            + [
                alone(i, [nodes[i][at] for at in path(parents[i], node)])[-1]
                for node in range(len(parents[i]))
            ]
        )
        for i in range(3)
    ]
    works = []
    for i, sequence in enumerate(sequences):
        assert not sequence.extend(1 + len(nodes[i]))
        tokens = np.array([last[i], *nodes[i]])
        works.append(Work(sequence, tokens, drafts=len(nodes[i]), parents=parents[i]))
    found = runner.run(works)
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=1e-4)
