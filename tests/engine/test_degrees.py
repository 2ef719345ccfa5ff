"""Engines with different numbers of ranks use the same pages: in tiers, and in hand-overs between workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvloom.core import Field, LayerSpec, PoolLayout, TensorPart, Visibility, attention_fields, divided_specs
from kvloom.engine import LLM, Engine, Request, SamplingParams
from kvloom.engine.offload import HostPages
from kvloom.models.loading import model_fingerprint, shard_model
from kvloom.models.sharding import Shard, shard_config
from kvloom.models.specs import load_config, model_spec
from kvloom.tiers import Objects, PageFields
from tests.engine.test_hand_over import address_of, finished, step_until
from tests.engine.test_offload import PATIENT, drawn, greedy, offload_of, served
from tests.engine.test_rank_tiers import closed, engine_of, stored
from tests.engine.test_tensor_parallel import POOL, made
from tests.models.zoo import expected

Bytes = npt.NDArray[np.uint8]
CPU = torch.device("cpu")


def state(heads: int, groups: int, channels: tuple[int, ...]) -> LayerSpec:
    conv = Field("conv", (sum(channels), 4), "bf16", 0, channels)
    return LayerSpec("state", (conv, Field("recurrent", (heads, 8, groups), "fp32", 0)))


LATENT = LayerSpec("token", (Field("latent", (40,), "bf16"), Field("latent_scale", (1,), "fp32")))
KINDS: dict[str, tuple[LayerSpec, LayerSpec, LayerSpec]] = {
    "full": tuple(LayerSpec("token", attention_fields(heads, 16, "bf16")) for heads in (4, 2, 1)),  # type: ignore[dict-item]
    "values of another size": tuple(  # type: ignore[dict-item]
        LayerSpec("token", attention_fields(heads, 24, "fp32", v_dim=16)) for heads in (4, 2, 1)
    ),
    "window": tuple(  # type: ignore[dict-item]
        LayerSpec("token", attention_fields(heads, 16, "fp16"), Visibility("sliding", 32))
        for heads in (8, 4, 2)
    ),
    "chunks": tuple(  # type: ignore[dict-item]
        LayerSpec("token", attention_fields(heads, 16, "fp32"), Visibility("chunked", 64))
        for heads in (4, 2, 1)
    ),
    "int8": tuple(LayerSpec("token", attention_fields(heads, 16, "int8")) for heads in (4, 2, 1)),  # type: ignore[dict-item]
    "fp8": tuple(LayerSpec("token", attention_fields(heads, 16, "fp8")) for heads in (4, 2, 1)),  # type: ignore[dict-item]
    "shared heads": tuple(LayerSpec("token", attention_fields(heads, 16, "bf16")) for heads in (2, 1, 1)),  # type: ignore[dict-item]
    "one head": tuple(LayerSpec("token", attention_fields(1, 16, "bf16")) for _ in range(3)),  # type: ignore[dict-item]
    "latents": (LATENT, LATENT, LATENT),
    "Mamba-2": (state(8, 4, (64, 16, 16)), state(4, 4, (32, 8, 8)), state(2, 4, (16, 4, 4))),
    "Mamba-2, shared groups": (state(8, 4, (64, 16, 16)), state(4, 4, (32, 8, 8)), state(2, 4, (16, 8, 8))),
    "delta rule": (state(8, 4, (32, 32, 64)), state(4, 4, (16, 16, 32)), state(2, 4, (8, 8, 16))),
    "Mamba-1": (state(64, 4, (64,)), state(32, 4, (32,)), state(16, 4, (16,))),
}
"""The spec of a layer in the whole model, on 2 ranks, and on 4 ranks."""


def cut(
    whole: Field, own: Field, view: npt.NDArray[Any], rank: int, count: int, axis: int
) -> npt.NDArray[Any]:
    """The values of a field that a rank has, by plain slices of `view`."""
    found, begin = [], 0
    for size, mine in zip(whole.axis_parts, own.axis_parts, strict=True):
        some = view.take(range(begin, begin + size), axis)
        found.append(np.split(some, size // mine, axis)[rank * (size // mine) // count])
        begin += size
    return np.concatenate(found, axis) if found else view


def fields_of(layout: PoolLayout, group: int) -> PageFields:
    one = layout.groups[group]
    tokens = one.page_tokens if one.spec.unit == "token" else 0
    return PageFields(one.spec.fields, one.run_layers, tokens, one.layer_bytes, one.page_stride)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_copy_their_bytes_of_whole_pages_and_back(kind: str, count: int, block: int) -> None:
    """Every rank loads a page of the whole model, and offloads it again to another place."""
    specs = KINDS[kind]
    wholes, owns = ({f"{i}": spec for i in range(3)} for spec in (specs[0], specs[count // 2]))
    layout = PoolLayout.build(divided_specs(owns, wholes), block)
    assert layout.whole() == PoolLayout.build(wholes, block)
    (own,), (whole,) = layout.groups, layout.whole().groups
    assert own.runs == whole.runs
    size = whole.page_stride
    arena = np.random.default_rng(0).integers(0, 256, 8 * size, np.uint8)
    page, copied = arena[2 * size : 3 * size].copy(), np.zeros(size, np.uint8)
    arena[5 * size : 6 * size] = 0
    for rank in range(count):
        buffer = torch.zeros(4 * own.page_stride, dtype=torch.uint8)
        pages = HostPages(layout, buffer, arena, part=TensorPart(rank, count))
        pages.load(own, np.array([1]), np.array([2 * size]))
        got = fields_of(layout, 0).views(buffer[own.page_stride : 2 * own.page_stride].numpy())
        axis = 2 if own.spec.unit == "token" else 1  # [layers, tokens, heads, …] or [layers, channels, …]
        views = fields_of(layout.whole(), 0).views(page)
        for field, other, mine, every in zip(own.spec.fields, whole.spec.fields, got, views, strict=True):
            np.testing.assert_array_equal(mine, cut(other, field, every, rank, count, axis))
        before = arena.copy()
        pages.offload(own, np.array([1]), np.array([5 * size]))
        changed = np.flatnonzero(arena != before)
        assert not copied[changed - 5 * size].any(), "two ranks wrote the same bytes"
        copied[changed - 5 * size] = 1
    for mine, every in zip(
        fields_of(layout.whole(), 0).views(arena[5 * size : 6 * size]),
        fields_of(layout.whole(), 0).views(page),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, every)


def test_a_field_that_is_not_cut_on_its_first_axis_is_refused() -> None:
    whole = LayerSpec("token", (Field("k", (4, 16), "bf16", 0),))
    own = LayerSpec("token", (Field("k", (4, 8), "bf16", 0),))
    with pytest.raises(ValueError, match=r"k \(4, 16\) cannot be divided into fields of shape \(4, 8\)"):
        divided_specs({"layers.0": own}, {"layers.0": whole})


@pytest.mark.parametrize(
    "model", ["gemma-3-4b", "gemma-3-27b", "qwen3-next-80b", "nemotron-h-8b", "jamba-1.5-mini"]
)
def test_ranks_put_the_same_layers_into_a_page_as_the_whole_model(model: str) -> None:
    from transformers import AutoConfig

    fields = load_config(model)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields).get_text_config()
    layers = model_spec(config.to_dict()).layers
    wholes = [PoolLayout.build(layers, block) for block in (16, 64)]
    for count in (2, 4, 8):
        own = divided_specs(model_spec(shard_config(config, count).to_dict()).layers, layers)
        for whole in wholes:
            layout = PoolLayout.build(own, whole.block_tokens)
            assert [group.runs for group in layout.groups] == [group.runs for group in whole.groups]
            assert layout.whole() == whole
            assert layout.slab_bytes <= whole.slab_bytes


class OneRank:
    """A rank that gathers nothing, because its model never runs."""

    def __init__(self, rank: int, count: int) -> None:
        self.shard, self.device = Shard(rank, count), CPU

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor] * self.shard.count)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v3", "moshi"]
)
def test_the_fingerprint_does_not_depend_on_the_number_of_ranks(family: str) -> None:
    model = made(family)
    wanted = model_fingerprint(model)
    for rank, count in ((0, 2), (3, 4)):
        ranks: Any = OneRank(rank, count)
        assert model_fingerprint(shard_model(model, ranks)) == wanted
    with torch.no_grad():
        next(model.parameters()).add_(1)
    ranks = OneRank(0, 2)
    assert model_fingerprint(shard_model(model, ranks)) != wanted


FAMILIES = (
    *("llama", "gemma3_text", "llama4_text", "deepseek_v3", "qwen3_next", "kimi_linear"),
    *("mamba", "mamba2", "jamba", "bamba", "falcon_h1", "nemotron_h"),
)


def host_pages(engine: Engine, request: Request) -> dict[tuple[int, int, bytes], list[npt.NDArray[Any]]]:
    """All fields of the full pages and states of a prompt in host memory, by group, run and block hash."""
    manager, layout = offload_of(engine), engine.layout.whole()
    plan = engine.cache.loading.plan(engine.cache.match(request.prompt))
    ends = {plan.hash_at(position) for position in range(1, plan.limit + 1)}
    found = {}
    for group in layout.groups:
        for run, form in enumerate(manager.forms[group.index]):
            for block_hash in ends if group.spec.unit == "state" else plan.hashes:
                lease = manager.host.acquire(Objects([block_hash], group.index, form))
                at = int(lease.offsets[0])
                if at >= 0:
                    page = manager.host.arena[at : at + form.page_bytes].copy()
                    views = fields_of(layout, group.index).views(page)
                    found[group.index, run, block_hash] = [
                        view.view(np.float32) if field.dtype == "fp32" else view
                        for view, field in zip(views, group.spec.fields, strict=True)
                    ]
                lease.release()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_of_several_ranks_are_the_pages_of_one_rank(family: str) -> None:
    """Keys are equal, and values differ only by rounding: every head and channel is in its place."""
    (prompt,) = drawn(("pages", family), 70)
    found = []
    for name in ("one", "weights 2", "weights 4"):
        engine = engine_of(family, name, tiers=["host:16MiB?write=through"])
        (request,) = served(engine, [prompt])
        stored(engine)
        found.append(host_pages(engine, request))
        engine.close()
    assert found[0]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, fields in found[0].items():
            for wanted, got in zip(fields, other[key], strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "blocks", "prefill", "decode"),
    [
        ("llama", (16, 16), "weights 4", "weights 2"),
        ("llama", (64, 16), "weights 2", "one"),
        ("llama", (16, 16), "context 2", "context 2"),
        ("llama", (16, 16), "both", "context 4"),
        ("gemma3_text", (16, 32), "weights 2", "weights 4"),
        ("bamba", (16, 16), "context 2", "one"),
        ("bamba", (16, 16), "weights 4", "weights 2"),
        ("bamba", (16, 16), "one", "weights 2"),
        ("deepseek_v3", (32, 16), "weights 2", "one"),
        ("qwen3_next", (16, 16), "weights 2", "one"),
        ("kimi_linear", (16, 16), "one", "weights 2"),
    ],
    ids=str,
)
def test_a_worker_hands_over_pages_to_a_worker_with_another_number_of_ranks(
    family: str, blocks: tuple[int, int], prefill: str, decode: str
) -> None:
    (prompt,) = drawn(("hand-over", family), 118)
    wanted = expected(made(family), [prompt], 8)
    first = engine_of(
        family, prefill, tiers=["host:16MiB?share=0&checked=1"], token_budget=64, block_tokens=blocks[0]
    )
    peer = address_of(first)
    second = engine_of(family, decode, tiers=[f"peer://{peer}?timeout=30"], block_tokens=blocks[1])
    got = second.add(prompt, greedy(8), awaits_peer=peer)
    step_until(lambda: second.scheduler.loading_count == 1, second)
    given = first.add(prompt, greedy(1), offers_pages=True)

    def is_done() -> bool:
        offload_of(first).poll()  # as a server does while it is idle
        return finished(given, got)()

    step_until(is_done, first, second)
    assert [got.tokens] == wanted
    assert offload_of(second).stats.hand_overs == 1
    assert offload_of(second).stats.cut_hand_overs == 0
    assert (got.cached_tokens or 0) >= (len(prompt) - 1) // max(blocks) * max(blocks)
    closed(second)
    closed(first)


@pytest.mark.slow
def test_processes_that_load_a_checkpoint_share_a_disk_with_one_process(tmp_path: Path) -> None:
    """The checkpoint is in float32. Ranks cut and convert its weights while they read them."""
    made("qwen3_next").save_pretrained(tmp_path / "model")
    prompts = drawn("processes", 70, 50)
    for count in (2, 1):
        llm = LLM(
            str(tmp_path / "model"),
            tensor_parallel=count,
            device="cpu",
            dtype="bfloat16",
            pool_bytes=POOL,
            tiers=["host:8MiB", f"disk:{tmp_path / 'tier'}:64MiB"],
            offload=PATIENT,
        )
        try:
            found = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0))
            assert [each.num_cached_tokens for each in found] == ([0, 0] if count == 2 else [69, 49])
            stored(llm.engine)
        finally:
            llm.close()
