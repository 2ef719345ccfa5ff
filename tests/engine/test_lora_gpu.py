"""LoRA adapters on a GPU: grouped products, CUDA graphs that stay valid when adapters change, batch invariance."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from kvloom.engine import Engine, Request, SamplingParams
from tests.engine.test_lora import TARGETS
from tests.engine.test_speculation_gpu import made
from tests.engines import make_engine
from tests.models.lora_adapters import merged, write_adapter
from tests.models.zoo import prompts_of

POOL = 1 << 26
SIZES = (5, 17, 29, 8, 40, 3, 21, 33, 60, 12, 7, 25)
NAMES = (None, "a0", "a1", "a2") * 3


class Adapters:
    """A base model on the GPU, three adapters, and the merged models."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        self.base = made(family, dtype, **changes)
        self.paths: dict[str, str] = {}
        self.models: dict[str | None, Any] = {None: self.base}
        for place in range(3):
            name, rank = f"a{place}", (4, 16, 24)[place]
            path = write_adapter(folder / name, self.base, TARGETS[family], seed=place, rank=rank)
            self.paths[name], self.models[name] = str(path), merged(self.base, path)

    def engine(self, **settings: Any) -> Engine:
        settings.setdefault("lora", self.paths)
        return make_engine(copy.deepcopy(self.base), POOL, max_running=16, **settings)

    def wanted(self, prompts: list[list[int]]) -> list[list[int]]:
        """Tokens of engines with the merged models."""
        found: dict[int, list[int]] = {}
        for name, model in self.models.items():
            engine = make_engine(copy.deepcopy(model), POOL, max_running=16)
            mine = [place for place, one in enumerate(NAMES) if one == name]
            for place, request in zip(mine, ran(engine, [prompts[i] for i in mine]), strict=True):
                found[place] = request.output
            engine.close()
        return [found[place] for place in range(len(prompts))]


def ran(engine: Engine, prompts: list[list[int]], names: tuple[str | None, ...] = ()) -> list[Request]:
    asked = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    given = names or (None,) * len(prompts)
    requests = [engine.add(p, asked, lora=name) for p, name in zip(prompts, given, strict=True)]
    engine.run()
    engine.cache.check()
    return requests


def same(requests: list[Request], wanted: list[list[int]]) -> int:
    return sum(one.output == other for one, other in zip(requests, wanted, strict=True))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "qwen3_next", "bamba", "deepseek_v3", "qwen3_moe"]
)
def test_a_batch_of_base_and_adapters(family: str, graphs: bool, tmp_path: Path) -> None:
    own, prompts = Adapters(tmp_path, family), prompts_of(1, SIZES)
    wanted = own.wanted(prompts)
    engine = own.engine(cuda_graphs=graphs)
    engine.prepare()
    for _ in range(2):  # the second round hits cached pages
        assert (
            same(ran(engine, prompts, NAMES), wanted) >= len(prompts) - 1
        )  # a tie may be decided by rounding
    base = ran(engine, prompts)
    assert same(base, wanted) < len(prompts)
    engine.close()


def test_graphs_stay_valid_when_adapters_are_loaded(tmp_path: Path) -> None:
    own, prompts = Adapters(tmp_path, "llama"), prompts_of(1, SIZES)
    wanted = own.wanted(prompts)
    engine = own.engine(lora={}, max_loras=1, max_lora_rank=32)
    engine.prepare()
    for _ in range(2):
        for name, path in own.paths.items():
            engine.load_lora("name", path, replace=True)
            mine = [place for place, one in enumerate(NAMES) if one == name]
            found = ran(engine, [prompts[i] for i in mine], ("name",) * len(mine))
            assert same(found, [wanted[i] for i in mine]) >= len(mine) - 1
    engine.close()


@pytest.mark.parametrize("how", ["ngram", "suffix"])
def test_speculation(how: str, tmp_path: Path) -> None:
    own, prompts = Adapters(tmp_path, "llama"), prompts_of(1, SIZES)
    wanted = own.wanted(prompts)
    engine = own.engine(speculate=how, draft_tokens=4)
    assert engine.speculation is not None
    engine.speculation.controller = None
    engine.prepare()
    for _ in range(2):
        assert same(ran(engine, prompts, NAMES), wanted) >= len(prompts) - 1
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, tmp_path: Path) -> None:
    own, prompts = Adapters(tmp_path, "llama", dtype, hidden_size=256, head_dim=64), prompts_of(1, SIZES)
    engine = own.engine(batch_invariant=True)
    asked = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    together = [engine.add(p, asked, lora=name) for p, name in zip(prompts, NAMES, strict=True)]
    engine.run()
    for request in together:
        name = None if request.adapter is None else request.adapter.name
        alone = own.engine(batch_invariant=True)
        again = alone.add(list(request.prompt), asked, lora=name)
        alone.run()
        assert again.output == request.output
        assert again.logprobs == request.logprobs
        alone.close()
    engine.close()
