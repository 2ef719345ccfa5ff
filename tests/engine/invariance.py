"""Runs requests alone, together, and with others that join and leave: the cases in which batch invariance is checked."""

from __future__ import annotations

from typing import Any

import torch

from kvloom.engine import Engine, Request, SamplingParams

__all__ = ["apart", "interrupted", "prompts_of", "together", "told"]


def prompts_of(count: int, vocabulary: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of all lengths up to `longest`; some share a prefix."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    made = [torch.randint(3, vocabulary, (size,), generator=generator).tolist() for size in sizes]
    return [
        made[0][: len(one) // 2] + one[len(one) // 2 :] if i % 3 == 1 else one for i, one in enumerate(made)
    ]


def told(request: Request) -> list[tuple[int, list[float]]]:
    """Return a request's tokens with all their log-probabilities, to the last bit."""
    assert request.finish_reason is not None
    return [
        (token, [one.logprob for one in likely.values()])
        for token, likely in zip(request.output, request.logprobs, strict=True)
    ]


def apart(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Run the prompts one after the other; prompts with a common prefix hit the cache."""
    found = []
    for prompt, mine in zip(prompts, params, strict=True):
        found.append(engine.add(prompt, mine))
        engine.run()
    return [told(request) for request in found]


def together(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Run all prompts together, the last first, with others that join later and are cancelled."""
    found = [engine.add(prompt, mine) for prompt, mine in list(zip(prompts, params, strict=True))[::-1]]
    others = []
    for i in range(8):
        engine.step()
        others.append(engine.add(prompts[i % len(prompts)][::-1], SamplingParams(max_tokens=50)))
        if i % 2:
            engine.cancel(others[i - 1])
    engine.run()
    return [told(request) for request in found[::-1]]


def interrupted(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Run all prompts together; the last running request is preempted repeatedly, and recomputes."""
    found = [engine.add(prompt, mine) for prompt, mine in zip(prompts, params, strict=True)]
    run_interrupted(engine, found, every=7)
    return [told(request) for request in found]


def run_interrupted(engine: Engine, requests: list[Request], every: int) -> None:
    """Step until all requests have finished; every `every` steps the last running one is preempted."""
    for step in range(10_000):
        if not engine.busy:
            break
        engine.step()
        if step % every == every - 1 and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[-1])
    assert sum(request.preemptions for request in requests) > 2
