"""Heads: their drafts are those of a straightforward computation, and their pages depend on the tokens alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.core import CacheControl
from kvloom.engine import LLM, Engine, SamplingParams
from kvloom.engine.speculation import DraftedRequest
from kvloom.engine.speculation.controller import _TurnedOff
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.memory import layer_views
from kvloom.models.specs import model_spec, with_head
from kvloom.plan import Load, make_plan
from tests.engine.test_speculation import ALL_KINDS, fixed, hits, results
from tests.engines import PATIENT, make_engine
from tests.models.heads import MTP_FAMILIES, EagleReference, Reference, save_eagle, save_mtp
from tests.models.zoo import expected, tiny

Recorded = list[tuple[list[int], list[int]]]
GREEDY: dict[str, Any] = {"temperature": 0}


def save(path: Path, family: str) -> tuple[Any, str]:
    """Save and load a target with a head. Return it and the setting that uses the head."""
    if family == "llama":
        return save_eagle(path), f"eagle={path / 'eagle'}"
    return save_mtp(path, family), "mtp"


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_next"])
def test_a_plan_has_the_pages_of_the_engine(family: str, tmp_path: Path) -> None:
    model, how = save(tmp_path, family)
    config = {**model.config.to_dict(), "dtype": "float32"}
    spec = with_head(model_spec(config), config, how)
    planned = make_plan(spec, Load(64)).to_dict()["groups"]
    groups = make_engine(model, 1 << 24, speculate=how).layout.groups
    assert [row["page_bytes"] for row in planned] == [group.page_bytes for group in groups]
    assert sum(row["group"].startswith("draft") for row in planned) == 1


def recorded(engine: Engine) -> Recorded:
    """Record every draft of the engine's head, with the tokens before it."""
    assert engine.speculation is not None
    proposer, found = engine.speculation.proposers[-1], Recorded()
    propose = proposer.propose

    def recording(requests: Sequence[DraftedRequest], counts: Sequence[int]) -> list[list[int]]:
        drafts = propose(requests, counts)
        found.extend((list(one.tokens), draft) for one, draft in zip(requests, drafts, strict=True) if draft)
        return drafts

    proposer.propose = recording  # type: ignore[method-assign]
    return found


def head_pages(engine: Engine, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Return the fields of the head's layer for the cached tokens of a prompt that begins with `tokens`."""
    sequence = engine.cache.open(engine.cache.match(np.array([*tokens, 3, 3], np.int32), CacheControl()))
    for batch in engine.cache.take_copies():
        copy_pages(engine.buffer, batch.page_stride, batch.source, batch.target)
    name, view = next(
        one for one in layer_views(engine.buffer, engine.layout).items() if one[0].startswith("draft.")
    )
    assert name.startswith("draft.layers.0.")
    column = engine.layout.groups[view.group].columns.start + view.run
    pages = torch.from_numpy(engine.cache.page_tables[column, sequence.row].astype(np.int64)).to(
        engine.device
    )
    found = {field: x[pages].flatten(0, 1)[: sequence.length].clone() for field, x in view.fields.items()}
    sequence.close()
    return found


def assert_same_pages(
    engine: Engine, other: Engine, tokens: list[int], count: int, near: float = 1e-4
) -> None:
    """Check that the head's pages of the first `count` tokens are the same up to rounding."""
    ours, theirs = head_pages(engine, tokens), head_pages(other, tokens)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert min(len(x), len(theirs[name])) >= count
        torch.testing.assert_close(x[:count], theirs[name][:count], rtol=near, atol=near)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("family", MTP_FAMILIES)
@pytest.mark.few(1)
def test_tokens_match_generate_and_drafts_the_reference(family: str, alike: bool, tmp_path: Path) -> None:
    """Prompts in chunks, shared prefixes, and own drafts that are accepted if the head is like its target."""
    check_drafts(save_mtp(tmp_path, family, alike), Reference(tmp_path, family, alike), "mtp", alike)


LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("family", "alike", "fields", "after"),
    [
        ("llama", True, {}, (2, 3, 3)),
        ("llama", False, {"eagle_config": {LAYERS: [0, 2, 4]}}, (1, 3, 5)),
        ("gemma3_text", False, {LAYERS: [1, 2, 4], "norm_before_residual": True}, (1, 2, 4)),
        ("qwen3_next", False, {}, (2, 3, 3)),
    ],
)
@pytest.mark.few(1)
def test_eagle_drafts_are_those_of_the_reference(
    family: str, alike: bool, fields: dict[str, Any], after: tuple[int, ...], tmp_path: Path
) -> None:
    model = save_eagle(tmp_path, family, alike, **fields)
    reference = EagleReference(tmp_path, after, "norm_before_residual" in fields)
    check_drafts(model, reference, f"eagle={tmp_path / 'eagle'}", alike)


def check_drafts(model: Any, reference: Reference | EagleReference, how: str, alike: bool) -> None:
    """Compare tokens with `generate()` and drafts with the reference. If `alike`, some drafts must be right."""
    rng = random.Random(how[:3])
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    prompts.append(prompts[0][:20] + prompts[1])
    wanted = expected(reference.target, prompts, 20)
    engine = fixed(make_engine(model, 1 << 23, speculate=how, token_budget=16, max_running=6))
    drafts = recorded(engine)
    requests = []
    for prompt in prompts:
        requests.append(engine.add(prompt, SamplingParams(max_tokens=20, **GREEDY)))
        engine.step()
        engine.cache.check()
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert not alike or sum(request.accepted_tokens for request in requests) > 15
    for tokens, draft in drafts[::6]:
        assert draft == reference.drafts(tokens, len(draft))
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tier", [None, "host", "disk"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "llama"])
@pytest.mark.few(2)
def test_pages_of_a_head_depend_on_the_tokens_alone(
    family: str, tier: str | None, ahead: bool, tmp_path: Path
) -> None:
    """Whether tokens were computed as prompt, as output, as accepted drafts, or loaded from a tier."""
    model, how = save(tmp_path / "model", family)
    settings: dict[str, Any] = {"speculate": how, "ahead": ahead}
    urls = {"host": "host:16MiB", "disk": f"disk:{tmp_path / 'disk'}:64MiB"}
    if tier is not None:
        settings |= {"tiers": [urls[tier]], "offload": PATIENT}
    layout = make_engine(model, 1 << 23, speculate=how).layout
    room = max(2 * layout.slab_bytes_for(128), 6 * layout.slab_bytes)
    engine = fixed(make_engine(model, room, **settings))
    prompt = list(range(3, 40))
    first = engine.add(prompt, SamplingParams(max_tokens=40, **GREEDY))
    engine.run()
    assert first.accepted_tokens > 2
    if tier == "disk":
        engine.close()
        engine = fixed(make_engine(model, room, **settings))
    elif tier == "host":
        for i in range(8):  # other prompts evict its pages
            engine.add([10 + i, *range(3, 60), *range(3, 50)], SamplingParams(max_tokens=1))
            engine.run()
    again = engine.add([*first.tokens, 5], SamplingParams(max_tokens=20, **GREEDY))
    engine.run()
    assert tier is None or again.hits.get(tier, 0) >= 64
    plain = make_engine(model, 1 << 23, speculate=how, token_budget=19)  # computes all of it as a prompt
    plain.add([*again.tokens, 3], SamplingParams(max_tokens=1))
    plain.run()
    assert_same_pages(engine, plain, again.tokens, 64 if tier is None else 80)
    engine.close()


@pytest.mark.parametrize("how", ["mtp", "draft"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.few(1)
def test_pages_are_complete_while_the_controller_is_off(how: str, ahead: bool, tmp_path: Path) -> None:
    """With tiers, output tokens of steps that run ahead are computed, too."""
    model = save_mtp(tmp_path, "deepseek_v3")
    speculate = how if how == "mtp" else f"draft={tmp_path}"
    engine = make_engine(model, 1 << 23, speculate=speculate, ahead=ahead, tiers=["host:16MiB"])
    assert engine.speculation is not None
    assert engine.speculation.controller is not None
    engine.speculation.controller.reasons[how] = "off"
    engine.speculation.controller._off[how] = _TurnedOff(requests=1, value=1.0, wait=100, steps=-1000)
    request = engine.add(list(range(3, 40)), SamplingParams(max_tokens=40, **GREEDY))
    engine.run()
    assert not request.draft_tokens
    plain = make_engine(model, 1 << 23, speculate=speculate)
    plain.add([*request.tokens, 3], SamplingParams(max_tokens=1))
    plain.run()
    assert_same_pages(engine, plain, request.tokens, 75)
    engine.close()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "llama"])
@pytest.mark.few(1)
def test_hits_are_the_same_without_speculation(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    model, head = save(tmp_path, family)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    seen = []
    for how in ("off", head):
        engine = make_engine(model, 1 << 24, speculate=how, token_budget=24, max_running=8)
        if how == head:
            fixed(engine)
        requests = [
            engine.add(prompt, SamplingParams(max_tokens=20, temperature=i % 2, seed=i))
            for i, prompt in enumerate(prompts)
        ]
        engine.run()
        seen.append([[one.tokens for one in requests], hits(engine, requests)])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "llama"])
@pytest.mark.few(1)
def test_all_sampling_parameters_with_preemption(family: str, ahead: bool, tmp_path: Path) -> None:
    """Results are those without speculation, in a pool that preempts requests, with the controller and lookup."""
    rng = random.Random(family)
    model, how = save(tmp_path, family)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 40))] for _ in ALL_KINDS]
    every = [
        SamplingParams(max_tokens=24, seed=10 * i, **{"min_tokens": 0, **kind})
        for i, kind in enumerate(ALL_KINDS)
    ]
    settings: dict[str, Any] = {"token_budget": 24, "max_running": 8, "ahead": ahead}
    plain = make_engine(model, 1 << 24, **settings)
    wanted = [plain.add(prompt, params) for prompt, params in zip(prompts, every, strict=True)]
    plain.run()
    layout = make_engine(model, 1 << 24, speculate=how).layout
    slabs = 6 if family == "qwen3_next" else 4 * layout.slab_bytes_for(64) // layout.slab_bytes
    for speculate, is_fixed in ((how, True), (f"suffix,{how}", False)):
        engine = make_engine(model, slabs * layout.slab_bytes, speculate=speculate, **settings)
        engine.scheduler.admission = None
        if is_fixed:
            fixed(engine)
        requests = [engine.add(prompt, params) for prompt, params in zip(prompts, every, strict=True)]
        while engine.busy:
            engine.step()
            engine.cache.check()
        assert results(requests) == results(wanted)
        assert family == "qwen3_next" or sum(
            one.preemptions for one in requests
        )  # its states fill the pool first
        assert sum(one.draft_tokens for request in requests for one in request.family)
        engine.cache.take_copies()
        assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.few(1)
def test_quantised_pages(kv_dtype: str, tmp_path: Path) -> None:
    model, how = save(tmp_path, "llama")
    prompt = list(range(3, 40))
    tokens = []
    for speculate in ("off", how):
        engine = make_engine(model, 1 << 23, kv_dtype, speculate=speculate)
        if speculate == how:
            fixed(engine)
        request = engine.add(prompt, SamplingParams(max_tokens=30, **GREEDY))
        engine.run()
        tokens.append(request.tokens)
    assert tokens[0] == tokens[1]
    assert request.draft_tokens


def test_llm_has_the_option(tmp_path: Path) -> None:
    model = save_mtp(tmp_path, "deepseek_v3")
    prompt = list(range(3, 30))
    (wanted,) = LLM(model, pool_bytes=1 << 22).generate([prompt], SamplingParams(max_tokens=9, **GREEDY))
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", pool_bytes=1 << 22, speculate="suffix,mtp")
    (found,) = llm.generate([prompt], SamplingParams(max_tokens=9, **GREEDY))
    assert found.outputs == wanted.outputs
    assert llm.engine.speculation is not None
    assert [proposer.name for proposer in llm.engine.speculation.proposers] == ["suffix", "mtp"]


def test_a_checkpoint_without_heads_is_refused(tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    with pytest.raises(ValueError, match="was not loaded from one"):
        make_engine(model, 1 << 22, speculate="mtp")
    model.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    with pytest.raises(ValueError, match="has no multi-token-prediction heads"):
        make_engine(model, 1 << 22, speculate="mtp")
    with pytest.raises(ValueError, match="speculate has draft and mtp"):
        make_engine(model, 1 << 22, speculate=f"mtp,draft={tmp_path}")


def test_eagle_heads_that_cannot_work_are_refused(tmp_path: Path) -> None:
    model, head = save_eagle(tmp_path), tmp_path / "eagle"
    with pytest.raises(ValueError, match=r"not a folder with a config.json"):
        make_engine(model, 1 << 22, speculate=f"eagle={tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match="has no EAGLE-3 weights"):
        make_engine(model, 1 << 22, speculate=f"eagle={tmp_path}")
    with pytest.raises(ValueError, match=r"61 tokens .* are not tokens of the target, which has 62"):
        make_engine(tiny("llama", num_hidden_layers=6, vocab_size=62), 1 << 22, speculate=f"eagle={head}")
    with pytest.raises(ValueError, match=r"after .* layers, and the target has 3"):
        make_engine(tiny("llama", num_hidden_layers=3), 1 << 22, speculate=f"eagle={head}")
    wide = tiny("llama", num_hidden_layers=6, hidden_size=64)
    with pytest.raises(ValueError, match="does not fit"):
        make_engine(wide, 1 << 22, speculate=f"eagle={head}")
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "other.weight": torch.zeros(1)}, head / "model.safetensors")
    with pytest.raises(ValueError, match=r"has an unknown weight other.weight"):
        make_engine(model, 1 << 22, speculate=f"eagle={head}")
    del tensors["midlayer.mlp.up_proj.weight"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks the weight .*up_proj"):
        make_engine(model, 1 << 22, speculate=f"eagle={head}")
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle, which is never read"):
        make_engine(model, 1 << 22, speculate=f"eagle={head}")
