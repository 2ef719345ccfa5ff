"""The parts of the vLLM connector without an engine. test_vllm.py runs this file in the environment of vLLM."""

from __future__ import annotations

import inspect
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvloom.adapters.common import EngineVersion, TierPages, of_rank
from kvloom.adapters.vllm import KvloomConnector, KvloomTier
from kvloom.adapters.vllm.block_groups import BlockGroup, block_groups, resume_positions
from kvloom.adapters.vllm.identity import adapter_identity, model_identity
from kvloom.adapters.vllm.layer_pages import LayerPages
from kvloom.adapters.vllm.messages import Answer, Load, Step, Store
from kvloom.adapters.vllm.request_hashes import RequestHashes, Roots
from kvloom.adapters.vllm.scheduler_side import SchedulerSide
from kvloom.adapters.vllm.settings import Settings
from kvloom.adapters.vllm.shard import Shard, worker_count
from kvloom.adapters.vllm.tier_events import TierEvents
from kvloom.adapters.vllm.version import VERSION
from kvloom.adapters.vllm.worker_side import WorkerSide
from kvloom.core import hash_chain, root_hash, token_bytes
from kvloom.tiers import Objects, OpenTier, Tier, open_tier, registry
from kvloom.tiers.testing import Faults, FaultyTier
from tests.tiers.toy_tier import ToyTier

BLOCK, HEADS, SIZE, BLOCKS, WINDOW = 16, 2, 8, 40, 40
SHAPE = (HEADS, BLOCK, 2 * SIZE)
STATES = -1
STATE_SHAPES = ((3, 8), (4, 16))
ATTENTION: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": HEADS,
    "head_size": SIZE,
    "dtype": torch.float32,
}


def settings(*tiers: str, **others: Any) -> Settings:
    return Settings.parse({"tiers": list(tiers) or ["host:1MiB"], "load": "always", **others})


def request(tokens: int = 100, name: str = "r", **others: Any) -> Request:
    ids = [(7 * i + i * i) % 500 for i in range(tokens)]
    return Request(name, ids, SamplingParams(max_tokens=8), None, **others)


def group_spec(window: int) -> Any:
    if window == STATES:
        return MambaSpec(
            block_size=BLOCK,
            shapes=STATE_SHAPES,
            dtypes=(torch.float32, torch.bfloat16),
            page_size_padded=FullAttentionSpec(**ATTENTION).page_size_bytes,
            mamba_cache_mode="align",
        )
    return SlidingWindowSpec(**ATTENTION, sliding_window=window) if window else FullAttentionSpec(**ATTENTION)


def layer_tensors(spec: Any) -> Any:
    """The tensors of a layer as vLLM makes them. Those of a state are views of one buffer with padded pages."""
    if not isinstance(spec, MambaSpec):
        return torch.zeros((BLOCKS, *SHAPE))
    raw = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.uint8)
    tensors, start = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        item = dtype.itemsize
        strides = torch.empty(shape).stride()
        whole = raw.view(dtype)
        tensors.append(
            whole.as_strided((BLOCKS, *shape), (spec.page_size_bytes // item, *strides), start // item)
        )
        start += item * int(np.prod(shape))
    return tensors


def cache_config(windows: tuple[int, ...] = (0,)) -> KVCacheConfig:
    """One group per window: 0 is full attention, STATES is a recurrent state."""
    groups = [
        KVCacheGroupSpec([f"layer {g}.{i}" for i in range(2)], group_spec(w)) for g, w in enumerate(windows)
    ]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(**parallel: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), cache_config=SimpleNamespace(calculate_kv_scales=False)
    )


@dataclass
class Engine:
    """Both sides of the connector over tensors, with steps as vLLM runs them."""

    windows: tuple[int, ...]
    tier: OpenTier | None
    options: dict[str, Any] = field(default_factory=dict)
    staged: bool = False

    def __post_init__(self) -> None:
        config = cache_config(self.windows)
        self.groups = block_groups(engine_config(), config)
        self.caches: dict[str, Any] = {
            name: layer_tensors(group.kv_cache_spec)
            for group in config.kv_cache_groups
            for name in group.layer_names
        }
        given = settings("host:4MiB", **self.options)
        layers = LayerPages(self.groups, config, self.caches, "rank 0 of 1", self.staged)
        self.tiers = TierPages(
            given.tiers, max(f.page_bytes for f in layers.forms), others=[self.tier] if self.tier else []
        )
        self.scheduler = SchedulerSide(given, self.groups, "model", 1)
        self.worker = WorkerSide(given, self.groups, layers, self.tiers)

    def step(
        self, scheduled: dict[str, int] | None = None, tables: Any = None, states: Any = None
    ) -> tuple[set[str], set[str]]:
        """One step of scheduler and worker. Return the finished and the failed loads. `states` are the blocks of
        states that the step writes.
        """
        output: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled or {},
            total_num_scheduled_tokens=sum((scheduled or {}).values()),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: tables[name], boundary_state_offloads=states or {}
            ),
        )
        message = self.scheduler.build_step(output)
        self.worker.begin_compute()
        self.worker.begin_step(message)
        self.worker.end_step(message)
        finished, failed = self.worker.take_finished()
        self.scheduler.receive(self.worker.take_answers(), failed)
        return finished, failed

    def match(self, one: Request, computed: int = 0, seconds: float = 30) -> int:
        """Ask until the tiers have answered."""
        until = time.monotonic() + seconds
        while (found := self.scheduler.match(one, computed))[0] is None:
            assert time.monotonic() < until
            self.step()
        assert found[0] is not None
        assert found[1] == (found[0] > 0)
        return found[0]

    def store(self, one: Request, first_block: int = 1) -> tuple[list[int], ...]:
        """Compute a whole prompt with random keys and values. Return its block tables."""
        self.scheduler.add(one)
        count = one.num_tokens // BLOCK
        tables = tuple(list(range(first_block, first_block + count + 1)) for _ in self.groups)
        for group, table in zip(self.groups, tables, strict=True):
            for name in group.layers:
                self.caches[name][table] = torch.randn((len(table), *SHAPE))
        self.step({one.request_id: one.num_tokens}, {one.request_id: tables})
        return tables

    def load(
        self, one: Request, tokens: int, tables: tuple[list[int], ...], computed: int = 0
    ) -> tuple[set[str], set[str]]:
        self.scheduler.allocated(one, tables, tokens)
        found: tuple[set[str], set[str]] = self.step()
        return found

    def close(self) -> None:
        self.worker.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Any]:
    """Open the same disk tier again and again, with faults if given."""

    def opened(faults: Faults | None = None) -> OpenTier:
        tier = open_tier(f"disk:{tmp_path / 'kv'}:64MiB")
        return OpenTier(tier if faults is None else FaultyTier(tier, faults))

    return opened


# --- the interface that this adapter is written for

UNUSED = {
    "build_kv_connector_stats",
    "build_prom_metrics",
    "clear_connector_metadata",
    "finish_forward",
    "get_block_ids_with_load_errors",
    "get_external_cache_hit_sources",
    "get_finished",
    "get_finished_count",
    "get_handshake_metadata",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids",
    "get_mem_pool_context",
    "get_required_kvcache_layout",
    "handle_preemptions",
    "has_connector_metadata",
    "has_pending_block_frees",
    "has_pending_push_work",
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "register_finished_partial_tail",
    "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    "role",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "supports_divergent_local_hybrid_hits",
}
"""The members of vLLM's connector whose defaults are right for kvloom's connector."""
UNUSED_BY_TIERS = {
    "block_size_bytes",
    "bp_detector",
    "build_metric_definitions",
    "cache_hit_source",
    "get_stats",
    "on_schedule_end",
    "serve_external_requests",
    "take_events",
    "touch",
}
"""The members of vLLM's secondary tier whose defaults are right for KvloomTier."""


@pytest.mark.parametrize(
    ("theirs", "ours", "unused"),
    [
        (KVConnectorBase_V1, KvloomConnector, UNUSED),
        (SupportsHMA, KvloomConnector, set()),
        (SecondaryTierManager, KvloomTier, UNUSED_BY_TIERS),
    ],
    ids=["connector", "hybrid models", "secondary tier"],
)
def test_the_interface_of_vllm_is_the_tested_one(theirs: Any, ours: Any, unused: set[str]) -> None:
    """If this test fails, vLLM changed its interface: adapt the adapter, then these values."""
    found = VERSION.installed()
    members = {name for name in vars(theirs) if not name.startswith("_")}
    assert unused <= members, f"{sorted(unused - members)} are gone in vLLM {found}"
    for name in sorted(members - unused):
        assert name in vars(ours), f"{name} is new in vLLM {found}: does the adapter need it?"
        if inspect.isfunction(vars(theirs)[name]):
            expected = list(inspect.signature(getattr(theirs, name)).parameters)
            parameters = list(inspect.signature(getattr(ours, name)).parameters)
            assert parameters == expected, f"{name} has other parameters in vLLM {found}"
    assert not ours.__abstractmethods__


def test_the_messages_of_vllm_are_the_tested_ones() -> None:
    """If this test fails, vLLM changed what it passes to connectors: adapt the adapter, then these values."""
    found = VERSION.installed()
    parameters = list(inspect.signature(KVConnectorBase_V1.__init__).parameters)
    assert parameters == ["self", "vllm_config", "role", "kv_cache_config"]
    assert KVConnectorTransferResults() == KVConnectorTransferResults(set(), set(), set())
    fields = {
        KVConnectorTransferResults: "finished_sending finished_recving failed_recving",
        KVConnectorOutput: "finished_recving failed_recving kv_connector_worker_meta",
        SchedulerOutput: "num_scheduled_tokens total_num_scheduled_tokens kv_connector_block_state",
        KVConnectorBlockState: "boundary_state_offloads",
        TransferJob: "job_id keys chunk_ids req_context submit_time",
        JobResult: "job_id success successful_keys transfer_time transfer_bytes",
    }
    for kind, names in fields.items():
        missing = set(names.split()) - set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
        assert not missing, f"{kind.__name__} of vLLM {found} has no {missing}"
    assert {one.name for one in LookupResult} == {"MISS", "HIT", "HIT_PENDING", "RETRY"}
    of_request = {"all_token_ids", "cache_salt", "lora_request", "mm_features", "num_computed_tokens"}
    of_request |= {"num_tokens", "prompt_embeds", "skip_reading_prefix_cache"}
    missing = {name for name in of_request if not hasattr(request(), name)}
    assert not missing, f"a request of vLLM {found} has no {missing}"
    assert VERSION.installed_minor() == VERSION.tested, (
        f"vLLM {found} has the tested interface: run `make test-vllm`, then raise VERSION.tested and docs/vllm.md"
    )


# --- settings, versions, identities, hashes


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "needs tiers, a list of URLs, and has None"),
        ({"tiers": []}, "needs tiers"),
        ({"tiers": ["host:1MiB"], "tier": 1}, "unknown setting 'tier'"),
        ({"tiers": ["host:1MiB"], "load": "maybe"}, "load 'maybe' is not one of auto, always, never"),
        ({"tiers": ["host:1MiB"], "load_seconds": -1}, "load_seconds -1 must be a number of at least 0"),
        ({"tiers": ["floppy:a"]}, "has no known scheme"),
        ({"tiers": ["int8:disk:/kv:1GiB"]}, "re-encodes pages"),
        ({"tiers": ["disk:/kv:1GiB"]}, "write {rank} into the path"),
        ({"tiers": ["host:1MiB?share=127.0.0.1:7000"]}, "cannot be shared"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("{", r"\{").replace("}", r"\}")):
        Settings.parse(extra, world_size=2)


def test_each_rank_has_its_own_disk() -> None:
    found = Settings.parse(
        {"tiers": ["disk:/kv-{rank}:1GiB", "redis://127.0.0.1?capacity=1GiB"]}, world_size=2
    )
    assert of_rank(found.tiers, 1) == ["disk:/kv-1:1GiB", "redis://127.0.0.1?capacity=1GiB"]


def test_another_version_of_vllm_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EngineVersion, "installed", lambda _: "0.32.7")
    VERSION.check()
    assert not caplog.records
    monkeypatch.setattr(EngineVersion, "installed", lambda _: "0.33.0rc1")
    VERSION.check()
    assert "tested with vLLM 0.32, found 0.33.0rc1" in caplog.text
    for old in ("0.31.2", None):
        monkeypatch.setattr(EngineVersion, "installed", lambda _, old=old: old)
        with pytest.raises(ImportError, match=r"needs vLLM 0\.32"):
            VERSION.check()


def test_a_model_is_identified_by_its_weights(tmp_path: Path) -> None:
    def identity(folder: str, dtype: str = "float32", layers: int = 2) -> str:
        config = SimpleNamespace(to_dict=lambda: {"layers": layers, "_name_or_path": folder})
        model = SimpleNamespace(
            model=folder, revision=None, hf_config=config, dtype=dtype, quantization=None, seed=0
        )
        given: Any = SimpleNamespace(
            model_config=model, load_config=SimpleNamespace(load_format="auto"), speculative_config=None
        )
        return model_identity(given)

    one, copy = tmp_path / "one", tmp_path / "copy"
    one.mkdir()
    (one / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    shutil.copytree(one, copy)
    assert identity(str(one)) == identity(str(copy))
    assert identity(str(one)) != identity(str(one), dtype="bfloat16")
    assert identity(str(one)) != identity(str(one), layers=3)
    before = adapter_identity("a", str(one))
    assert before != adapter_identity("b", str(one))
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[0] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert identity(str(one)) != identity(str(copy))
    assert before != adapter_identity("a", str(copy))
    with pytest.raises(ValueError, match="no weight files"):
        identity(str(tmp_path))


def test_hashes_are_those_of_kvloom_and_cover_salt_adapter_and_images(tmp_path: Path) -> None:
    def first(one: Request) -> bytes:
        return RequestHashes(Roots("m").of(one), one).of_blocks(0, 1, 32)[0]

    plain = request()
    expected = hash_chain(root_hash("m"), token_bytes(plain.prompt_token_ids))
    assert RequestHashes(Roots("m").of(plain), plain).of_blocks(1, 3, 32) == [expected[3], expected[5]]
    assert (
        first(request(cache_salt="a"))
        == hash_chain(root_hash("m", salt="a"), token_bytes(plain.prompt_token_ids))[1]
    )
    adapters = []
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(name.encode() * 100)
        adapters.append(request(lora_request=LoRARequest("lora", 1, str(tmp_path / name))))

    def image(name: str, at: int) -> Request:
        feature = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=at, length=10))
        return request(mm_features=[feature])

    others = [
        request(cache_salt="a"),
        request(cache_salt="b"),
        *adapters,
        image("x", 5),
        image("y", 5),
        image("x", 6),
    ]
    assert len({first(one) for one in [plain, *others]}) == len(others) + 1
    assert first(image("x", 40)) == first(plain)  # the image is behind the block
    again = request(lora_request=LoRARequest("lora", 1, str(tmp_path / "v1")))
    assert first(again) == first(adapters[0])


def test_hashes_of_generated_tokens_follow() -> None:
    one = request(30)
    hashes = RequestHashes(b"r" * 16, one)
    begun = hashes.of_blocks(0, 1, 16)
    with pytest.raises(ValueError, match="only 30 are known"):
        hashes.of_blocks(0, 2, 16)
    one.append_output_token_ids([1, 2])
    assert hashes.of_blocks(0, 2, 16) == hash_chain(b"r" * 16, token_bytes(one.all_token_ids[:32]))
    assert hashes.of_blocks(0, 1, 16) == begun


# --- groups


def test_groups_that_cannot_be_stored_are_refused_with_the_reason() -> None:
    for fields, words in (
        ({"mamba_cache_mode": "none"}, "only with mamba cache mode 'align', and the mode is 'none'"),
        ({"mamba_cache_mode": "align", "num_speculative_blocks": 1}, "draft tokens change it"),
    ):
        mamba = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), **fields)
        config = KVCacheConfig(1, [], [KVCacheGroupSpec(["m"], mamba)])
        with pytest.raises(ValueError, match=words):
            block_groups(engine_config(), config)
    small = FullAttentionSpec(**{**ATTENTION, "block_size": 8})
    with pytest.raises(ValueError, match="block size 8 is not a multiple of 16"):
        block_groups(engine_config(), KVCacheConfig(1, [], [KVCacheGroupSpec(["a"], small)]))
    with pytest.raises(ValueError, match="decode_context_parallel_size is 2"):
        block_groups(engine_config(decode_context_parallel_size=2), cache_config())


def test_resume_positions_are_those_whose_readable_tokens_are_stored() -> None:
    generator = np.random.default_rng(0)
    for window, chunk, start, sizes in product(
        (0, 1, 17, 33, 64, STATES), (0, 64), (0, 64), ((16, 16), (16, 32))
    ):
        if window and chunk:
            continue
        second = BlockGroup(1, (), sizes[1], window, chunk)
        if window == STATES:
            second = BlockGroup(1, (), sizes[1], is_state=True)
        groups = [BlockGroup(0, (), sizes[0]), second]
        end = start + 256
        found = [generator.random(256 // size) > 0.15 for size in sizes]
        expected = []
        for p in range(start + sizes[1], end + 1, sizes[1]):
            visible = range(start, p) if not chunk else range(max(start, p // chunk * chunk), p)
            if window == STATES:
                visible = range(p - sizes[1], p)
            elif window:
                visible = range(max(start, p - window + 1), p)
            full = all(found[0][(t - start) // sizes[0]] for t in range(start, p))
            if full and all(found[1][(t - start) // sizes[1]] for t in visible):
                expected.append(p)
        assert resume_positions(groups, start, end, found) == expected


# --- the scheduler side


def side(workers: int = 1, **others: Any) -> SchedulerSide:
    return SchedulerSide(
        settings(**others), block_groups(engine_config(), cache_config((0, WINDOW))), "m", workers
    )


def built(scheduler: SchedulerSide) -> Step:
    output: Any = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    return scheduler.build_step(output)


def test_matching_asks_once_and_changes_nothing() -> None:
    scheduler, one = side(), request(100)
    scheduler.add(one)
    assert [scheduler.match(one, 0) for _ in range(3)] == [(None, False)] * 3
    (lookup,) = built(scheduler).lookups
    assert (lookup.start, lookup.end, len(lookup.hashes[BLOCK])) == (0, 96, 6)
    assert scheduler.match(one, 0) == (None, False)
    assert not built(scheduler).lookups
    scheduler.receive([Answer("r", lookup.number, [16, 64])], set())
    assert [scheduler.match(one, 0) for _ in range(2)] == [(64, True)] * 2
    assert scheduler.match(one, 32) == (32, True)  # vLLM's own hit grew meanwhile
    assert scheduler.match(one, 64) == (0, False)
    scheduler.allocated(one, ([9, 8, 7, 6, 5], [0, 0, 3, 2, 1]), 32)
    (load,) = built(scheduler).loads
    assert load == Load("r", lookup.number, 32, 64, [[7, 6], [3, 2]])
    scheduler.allocated(one, ([9], [9]), 0)  # the second call, after the load
    step = built(scheduler)
    assert not step.loads
    assert not step.ended


def test_every_worker_must_answer_and_only_common_positions_count() -> None:
    scheduler, one = side(workers=2), request(100)
    scheduler.add(one)
    scheduler.match(one, 0)
    number = built(scheduler).lookups[0].number
    scheduler.receive([Answer("r", number, [16, 32, 48])], set())
    assert scheduler.match(one, 0) == (None, False)
    scheduler.receive([Answer("r", number, [16, 48, 64]), Answer("gone", 1, [16])], set())
    assert scheduler.match(one, 0) == (48, True)


def test_a_request_that_loads_nothing_releases_its_pages() -> None:
    scheduler, one = side(), request(100)
    scheduler.add(one)
    scheduler.match(one, 0)
    scheduler.receive([Answer("r", built(scheduler).lookups[0].number, [16])], set())
    scheduler.allocated(one, ([1], [1]), 0)  # another connector loads
    assert built(scheduler).ended == ["r"]
    scheduler.match(one, 0)
    scheduler.finish(one)  # aborted while it was looked up
    assert built(scheduler).ended == ["r"]
    assert scheduler.match(one, 0) == (0, False)


def test_a_failed_load_is_not_tried_again() -> None:
    scheduler, one = side(), request(100)
    scheduler.add(one)
    scheduler.match(one, 0)
    scheduler.receive([Answer("r", built(scheduler).lookups[0].number, [96])], set())
    assert scheduler.match(one, 0) == (96, True)
    scheduler.allocated(one, ([1] * 6, [1] * 6), 96)
    scheduler.receive([], {"r"})
    assert scheduler.match(one, 0) == (0, False)


def test_short_prompts_and_hits_are_computed() -> None:
    for tokens, others in ((16, {}), (100, {"load": "never"}), (100, {"min_load_tokens": 97})):
        scheduler, one = side(**others), request(tokens)
        scheduler.add(one)
        assert scheduler.match(one, 0) == (0, False)


def test_a_request_that_skips_the_cache_is_computed() -> None:
    scheduler, one = side(), request(100)
    one.skip_reading_prefix_cache = True
    scheduler.add(one)
    assert scheduler.match(one, 0) == (0, False)
    assert not built(scheduler).lookups


def test_blocks_are_stored_when_their_tokens_are_known() -> None:
    scheduler, one = side(), request(40)
    scheduler.add(one)

    def stores(computed: int, tokens: int, tables: tuple[list[int], ...]) -> list[Store]:
        one.num_computed_tokens = computed
        state = SimpleNamespace(get_block_ids=lambda name: tables)
        output: Any = SimpleNamespace(
            num_scheduled_tokens={"r": tokens},
            total_num_scheduled_tokens=tokens,
            kv_connector_block_state=state,
        )
        return scheduler.build_step(output).stores

    known = hash_chain(root_hash("m"), token_bytes(one.prompt_token_ids))
    first = stores(0, 20, ([1, 2], [3, 4]))
    assert first == [Store(0, known[:1], [1]), Store(1, known[:1], [3])]
    assert stores(20, 20, ([1, 2, 5], [0, 4, 6])) == [Store(0, known[1:2], [2]), Store(1, known[1:2], [4])]
    assert stores(40, 8, ([1, 2, 5], [0, 4, 6])) == []  # draft tokens that nothing has accepted
    one.append_output_token_ids(list(range(8)))
    (third, window) = stores(48, 1, ([1, 2, 5, 7], [0, 0, 6, 8]))
    assert third.block_ids == [5]
    assert window.block_ids == [6]
    scheduler.reset()
    other = request(40, name="after")
    scheduler.add(other)
    one = other
    scheduler.match(one, 0)
    assert built(scheduler).lookups[0].hashes[BLOCK][0] != known[0]  # the weights may have changed


# --- both sides


@pytest.mark.parametrize(("windows", "staged"), [((0,), False), ((0, WINDOW), False), ((0, WINDOW), True)])
def test_pages_come_back_in_another_process(windows: tuple[int, ...], staged: bool, disk: Any) -> None:
    one = Engine(windows, disk(), staged=staged)
    tables = one.store(request(100))
    one.close()
    other = Engine(windows, disk(), staged=staged)
    again = request(100, name="again")
    other.scheduler.add(again)
    assert other.match(again) == 96
    into = tuple([i + 20 for i in table] for table in tables)
    if len(windows) > 1:
        into[1][:3] = [0, 0, 0]  # out of the window of token 96
    assert other.load(again, 96, into) == ({"again"}, set())
    for group, source, target in zip(one.groups, tables, into, strict=True):
        for name in group.layers:
            for a, b in list(zip(source, target, strict=True))[:6]:
                if b:
                    assert torch.equal(one.caches[name][a], other.caches[name][b])
    untouched = [i for i in range(BLOCKS) if i not in {b for table in into for b in table[:6]}]
    assert not any(other.caches[name][untouched].any() for name in other.caches)
    assert not other.worker.faults
    assert other.worker.stats.loaded_tokens == 96
    assert all(not lease for lease in (other.worker._leased, other.worker._pending))
    other.close()


def test_copies_follow_the_stream_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, vLLM runs the model on a stream of its own. The copy stream waits for this stream before it copies."""
    calls: list[str] = []

    class CopyStream:
        def wait_stream(self, other: str) -> None:
            calls.append(f"wait for {other}")

    @contextmanager
    def use(_: CopyStream) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    config = cache_config((0,))
    caches = {name: torch.ones((BLOCKS, *SHAPE)) for name in config.kv_cache_groups[0].layer_names}
    layers = LayerPages(block_groups(engine_config(), config), config, caches, "rank 0 of 1", staged=True)
    monkeypatch.setattr(layers, "_stream", CopyStream())
    monkeypatch.setattr(layers, "_mark", lambda: bool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the model")
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: calls.append("keep"))
    arena = np.zeros(layers.forms[0].page_bytes, np.uint8)
    layers.offload(0, [3], arena, np.array([0]))
    assert calls == ["wait for the model", "keep", "begin", "end"]
    assert arena.any()
    calls.clear()
    layers.load(0, [4], np.zeros_like(arena), np.array([0]))
    assert calls == ["wait for the model", "keep", "keep", "begin", "end"]
    assert not any(cache[4].any() for cache in caches.values())


def test_a_load_begins_after_vllms_own_hit(disk: Any) -> None:
    one = Engine((0, WINDOW), disk())
    tables = one.store(request(100))
    again = request(100, name="again")
    one.scheduler.add(again)
    assert one.match(again, 32) == 64  # from host memory
    into = tuple([i + 20 for i in table] for table in tables)
    into[1][2] = 0  # out of the window of token 96
    assert one.load(again, 64, into) == ({"again"}, set())
    layer = one.groups[0].layers[0]
    assert torch.equal(one.caches[layer][tables[0][2:6]], one.caches[layer][into[0][2:6]])
    assert not one.caches[layer][into[0][:2]].any()
    one.close()


def test_other_salts_and_forms_are_misses(disk: Any) -> None:
    one = Engine((0,), disk())
    one.store(request(100))
    salted = request(100, name="salted", cache_salt="s")
    one.scheduler.add(salted)
    assert one.match(salted) == 0
    one.close()
    other = Engine((0, WINDOW), disk())  # other groups
    plain = request(100, name="plain")
    other.scheduler.add(plain)
    assert other.match(plain) == 0
    other.close()


def test_a_load_without_its_lease_fails_and_reports_the_request(disk: Any) -> None:
    one = Engine((0,), disk())
    tables = one.store(request(100))
    again = request(100, name="again")
    one.scheduler.add(again)
    assert one.match(again) == 96
    one.worker.end("again")
    assert one.load(again, 96, tables) == ({"again"}, {"again"})
    assert one.match(again) == 0
    one.close()


def test_an_aborted_request_releases_host_memory() -> None:
    one = Engine((0,), None)
    one.store(request(100))
    again = request(100, name="again")
    one.scheduler.add(again)
    assert one.match(again) == 96
    assert int(one.tiers.host.index.slots.refs.sum()) == 6
    one.scheduler.finish(again)
    one.step()
    assert int(one.tiers.host.index.slots.refs.sum()) == 0
    one.close()


@pytest.mark.parametrize("windows", [(0,), (0, WINDOW)])
@pytest.mark.parametrize("fault", ["failing", "slow", "hung", "lost"])
def test_a_broken_tier_is_a_miss(windows: tuple[int, ...], fault: str, disk: Any) -> None:
    one = Engine(windows, disk())
    one.store(request(100))
    one.close()
    faults = Faults()
    other = Engine(windows, disk(faults), {"load_seconds": 0.3})
    again = request(100, name="again")
    other.scheduler.add(again)
    if fault == "slow":
        faults.slow = 1.0
    elif fault == "lost":  # found by the lookup, and gone before the read
        faults.tamper = lambda objects: other.tiers.manager.queues[0].tier.drop(objects) and None
    else:
        setattr(faults, fault, True)
    assert other.match(again) == 0
    outcome = {"failing": "failed", "lost": "missing"}.get(fault, "late")
    until = time.monotonic() + 30
    while not any(name[2] == outcome for name in other.worker.faults):  # its queue counts it soon
        assert time.monotonic() < until
        time.sleep(0.01)
    faults.release()
    other.close()


def test_a_prefix_is_loaded_if_a_later_page_is_lost(disk: Any) -> None:
    one = Engine((0, WINDOW), disk())
    one.store(request(100))
    one.close()
    faults = Faults()
    other = Engine((0, WINDOW), disk(faults))
    again = request(100, name="again")
    lost = RequestHashes(Roots("model").of(again), again).of_blocks(5, 6, BLOCK)

    def tamper(objects: Any) -> None:
        some = type(objects)([n for n in objects.block_hashes if n in lost], objects.group, objects.form)
        other.tiers.manager.queues[0].tier.drop(some)

    faults.tamper = tamper
    other.scheduler.add(again)
    assert other.match(again) == 80
    other.close()


def test_host_memory_that_is_full_skips_stores(disk: Any) -> None:
    one = Engine((0,), None, {"tiers": ["host:64KiB"]})
    page = one.worker._layers.forms[0].page_bytes
    assert page == 2 * BLOCK * HEADS * 2 * SIZE * 4
    one.store(request(200))
    assert one.worker.stats.stored_pages <= (64 << 10) // page
    assert one.worker.stats.skipped_pages + one.worker.stats.stored_pages == 12
    one.close()


def test_load_or_recompute_follows_what_was_measured(disk: Any) -> None:
    one = Engine((0,), disk())
    one.store(request(400))
    one.close()
    faults = Faults()
    other = Engine((0,), disk(faults), {"load": "auto"})
    names = iter(range(100))

    def matched(tokens: int) -> int:
        again = request(tokens, name=str(next(names)))
        other.scheduler.add(again)
        return other.match(again)

    for _ in range(4):  # the engine computes quickly
        other.worker._compute._model.observe(400, 0.001)
    other.tiers.manager.queues[0].throughput.record(
        1000, time.monotonic() - 1, time.monotonic()
    )  # a slow tier
    assert matched(400) == 0
    assert other.worker.stats.refused_loads == 1
    for _ in range(40):  # now it computes slowly
        other.worker._compute._model.observe(400, 10000.0)
    assert matched(400) == 384
    other.close()


def test_tiers_publish_events_with_vllms_hashes(disk: Any) -> None:
    one = Engine((0, WINDOW), disk())
    events = TierEvents(one.groups, BLOCK)
    one.worker = WorkerSide(settings("host:4MiB"), one.groups, one.worker._layers, one.tiers, events=True)
    one.scheduler = SchedulerSide(settings(), one.groups, "model", 1, events=events)
    stored = request(100, block_hasher=lambda r: [bytes([i]) * 32 for i in range(6)][len(r.block_hashes) :])
    one.store(stored)

    def published(index: int) -> Any:
        return maybe_convert_block_hash(stored.block_hashes[index])

    found: list[Any] = []
    until = time.monotonic() + 30
    while len(found) < 24:  # six blocks of two groups, in host memory and on disk
        assert time.monotonic() < until
        one.step()
        events.apply(one.worker.take_changes())
        found += events.take()
    first = next(
        e for e in found if e.medium == "CPU" and e.group_idx == 1 and e.block_hashes == [published(1)]
    )
    assert isinstance(first, BlockStored)
    assert first.parent_block_hash == published(0)
    assert first.token_ids == list(stored.all_token_ids[16:32])
    assert (first.block_size, first.kv_cache_spec_sliding_window) == (BLOCK, WINDOW)
    assert {e.medium for e in found} == {"CPU", "STORAGE"}
    hashes = RequestHashes(Roots("model").of(stored), stored).of_blocks(1, 2, BLOCK)
    one.tiers.host.drop(Objects(hashes, 1, one.worker._layers.forms[1]))
    events.apply(one.worker.take_changes())
    (removed,) = events.take()
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([published(1)], "CPU", 1)
    one.close()


# --- recurrent states


def store_states(one: Engine) -> dict[int, list[torch.Tensor]]:
    """Compute a prompt of 100 tokens in chunks, as vLLM does in its align mode. Return the states by position."""
    stored, found, computed = request(100), {}, 0
    one.scheduler.add(stored)
    for end, block in ((64, 9), (96, 10), (100, 11)):
        count = -(-end // BLOCK)
        tables = (list(range(1, count + 1)), [0] * (count - 1) + [block])
        for name in one.groups[0].layers:
            one.caches[name][tables[0]] = torch.randn((count, *SHAPE))
        for tensor in [t for name in one.groups[1].layers for t in one.caches[name]]:
            tensor[block] = torch.randn(tensor.shape[1:]).to(tensor.dtype)
        offers = [(1, block, end)] if end % BLOCK == 0 else []
        one.step({"r": end - computed}, {"r": tables}, {"r": offers})
        found[end] = [tensor[block].clone() for name in one.groups[1].layers for tensor in one.caches[name]]
        stored.num_computed_tokens = computed = end
    return found


def loaded_states(other: Engine, expected: int) -> list[torch.Tensor]:
    """Load a prompt into another engine. Return the states of the block that vLLM resumes from."""
    again = request(100, name="again")
    other.scheduler.add(again)
    assert other.match(again) == expected
    count = expected // BLOCK
    tables = (list(range(20, 20 + count)), [0] * (count - 1) + [30])
    assert other.load(again, expected, tables) == ({"again"}, set())
    return [tensor[30] for name in other.groups[1].layers for tensor in other.caches[name]]


@pytest.mark.parametrize("staged", [False, True])
def test_states_come_back_in_another_process(staged: bool, disk: Any) -> None:
    one = Engine((0, STATES), disk(), staged=staged)
    stored = store_states(one)
    assert one.worker.stats.stored_pages == 6 + 2
    one.close()
    other = Engine((0, STATES), disk(), staged=staged)
    for state, loaded in zip(stored[96], loaded_states(other, 96), strict=True):
        assert torch.equal(state, loaded)
    assert other.worker.stats.loaded_pages == 6 + 1  # only one state is needed
    for tensor in [t for name in other.groups[1].layers for t in other.caches[name]]:
        assert not tensor[[i for i in range(BLOCKS) if i != 30]].any()
    other.close()


def test_a_damaged_state_is_a_miss(disk: Any, tmp_path: Path) -> None:
    one = Engine((0, STATES), disk())
    stored = store_states(one)
    one.close()
    bad, damaged = stored[96][0].numpy().tobytes(), 0
    for path in (tmp_path / "kv").rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        if (at := data.find(bad)) >= 0:
            data[at] ^= 1
            path.write_bytes(data)
            damaged += 1
    assert damaged == 1
    other = Engine((0, STATES), disk())
    for state, loaded in zip(stored[64], loaded_states(other, 64), strict=True):  # the state before it
        assert torch.equal(state, loaded)
    assert any(outcome == "corrupt" for _, _, outcome in other.worker.faults)
    other.close()


def test_states_inside_a_block_and_of_unknown_tokens_are_not_stored(disk: Any) -> None:
    one = Engine((0, STATES), None)
    one.scheduler.add(request(40))
    tables = {"r": ([1, 2, 3], [0, 0, 4])}
    one.step({"r": 40}, tables, {"r": [(1, 4, 40), (1, 4, 48), (1, 0, 32)], "unknown": [(1, 4, 16)]})
    assert one.worker.stats.stored_pages == 2  # of the full group
    one.close()


# --- several workers


@dataclass
class Workers:
    """The connector in a scheduler and in all workers of one engine, with steps as vLLM runs them. All workers use the
    same tier.
    """

    folder: Path
    tier: Tier
    tensor: int = 1
    pipeline: int = 1
    replica: int = 0
    caches: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        SHARED["tier"] = self.tier
        registry.SCHEMES["shared"] = f"{__name__}:parse_shared"
        count = self.tensor * self.pipeline
        self.scheduler, *self.workers = (
            KvloomConnector(self._config(rank), role, self._layers(rank))
            for rank, role in [(0, KVConnectorRole.SCHEDULER)]
            + [(rank, KVConnectorRole.WORKER) for rank in range(count)]
        )
        for rank, worker in enumerate(self.workers):
            (group,) = self._layers(rank).kv_cache_groups
            self.caches.append({name: torch.zeros((BLOCKS, *SHAPE)) for name in group.layer_names})
            worker.register_kv_caches(self.caches[rank])
        self._outputs = KVOutputAggregator(count)

    def _config(self, rank: int) -> Any:
        (self.folder / "model.safetensors").write_bytes(b"weights" * 100)
        model = SimpleNamespace(
            model=str(self.folder),
            revision=None,
            hf_config=SimpleNamespace(to_dict=dict),
            dtype="float32",
            quantization=None,
            seed=0,
        )
        extra = {"tiers": ["host:1MiB", "shared:"], "load": "always"}
        return SimpleNamespace(
            parallel_config=parallel(self.tensor, self.pipeline, rank, self.replica),
            cache_config=SimpleNamespace(calculate_kv_scales=False, block_size=BLOCK),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvloomConnector", kv_role="kv_both", kv_connector_extra_config=extra
            ),
            kv_events_config=None,
            model_config=model,
            load_config=SimpleNamespace(load_format="auto"),
            speculative_config=None,
        )

    def _layers(self, rank: int) -> KVCacheConfig:
        """Each stage of the pipeline has other layers. The heads of a worker are the same in number."""
        names = [f"layer {rank // self.tensor}.{i}" for i in range(2)]
        return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, FullAttentionSpec(**ATTENTION))])

    def step(self, scheduled: dict[str, int] | None = None, tables: Any = None) -> Any:
        output: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled or {},
            total_num_scheduled_tokens=sum((scheduled or {}).values()),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: tables),
        )
        message = self.scheduler.build_connector_meta(output)
        outputs: list[ModelRunnerOutput | None] = []
        for worker in self.workers:
            worker.bind_connector_metadata(message)
            context: Any = None
            worker.start_load_kv(context)
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            found = KVConnectorOutput(
                finished_recving=set(results.finished_recving or ()),
                failed_recving=set(results.failed_recving or ()),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=found))
        merged = self._outputs.aggregate(outputs)
        assert merged is not None
        assert merged.kv_connector_output is not None
        self.scheduler.update_connector_output(merged.kv_connector_output)
        return merged.kv_connector_output

    def store(self, one: Request) -> list[int]:
        self.scheduler.on_new_request(one)
        table = list(range(1, one.num_tokens // BLOCK + 2))
        for caches in self.caches:
            for cache in caches.values():
                cache[table] = torch.randn((len(table), *SHAPE))
        self.step({one.request_id: one.num_tokens}, (table,))
        return table

    def match(self, one: Request) -> int:
        self.scheduler.on_new_request(one)
        until = time.monotonic() + 30
        while (found := self.scheduler.get_num_new_matched_tokens(one, 0))[0] is None:
            assert time.monotonic() < until
            self.step()
        return int(found[0])

    def load(self, one: Request, tokens: int, table: list[int]) -> Any:
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (table,))
        self.scheduler.update_state_after_alloc(one, blocks, tokens)
        return self.step()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()


class SharedTier(ToyTier):
    """A store that all workers use, as they use Redis."""

    def close(self) -> None:
        pass


SHARED: dict[str, Tier] = {}


def parse_shared(_: str) -> Any:
    return lambda: SHARED["tier"]


def parallel(tensor: int = 1, pipeline: int = 1, rank: int = 0, replica: int = 0, replicas: int = 1) -> Any:
    """The fields of vLLM's ParallelConfig in one worker. For dense models vLLM sets `data_parallel_size` to 1."""
    return SimpleNamespace(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        world_size=tensor * pipeline,
        rank=rank,
        data_parallel_index=replica,
        data_parallel_size=replicas,
        data_parallel_rank=replica if replicas > 1 else 0,
    )


def test_shards_differ_between_the_workers_of_an_engine_and_not_between_replicas() -> None:
    sizes = [(t, p, r) for t, p in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2)) for r in range(t * p)]
    shards = [Shard.of(parallel(*size)) for size in sizes]
    assert len({shard.text for shard in shards}) == len(sizes)
    replicas = [Shard.of(parallel(2, 1, rank, replica)) for replica in (0, 1) for rank in (0, 1)]
    assert [shard.process for shard in replicas] == [0, 1, 2, 3]
    assert [shard.text for shard in replicas[:2]] == [shard.text for shard in replicas[2:]]
    assert [worker_count(parallel(2, 1, 0, *dp)) for dp in ((0, 1), (1, 1), (0, 2))] == [2, 4, 4]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_every_worker_loads_its_own_shard(tensor: int, pipeline: int, tmp_path: Path) -> None:
    tier = SharedTier(1 << 24)
    one = Workers(tmp_path, tier, tensor, pipeline)
    table = one.store(request(100))
    one.close()
    assert len(tier.pages) == 6 * tensor * pipeline
    other = Workers(tmp_path, tier, tensor, pipeline, replica=1)  # a replica has the same pages
    again = request(100, name="again")
    assert other.match(again) == 96
    into = [i + 20 for i in table]
    done = other.load(again, 96, into)
    assert (done.finished_recving, done.failed_recving) == ({"again"}, set())
    for stored, loaded in zip(one.caches, other.caches, strict=True):
        for name in stored:
            assert torch.equal(stored[name][table[:6]], loaded[name][into[:6]])
    other.close()


def test_workers_never_load_pages_of_another_number_of_workers(tmp_path: Path) -> None:
    tier = SharedTier(1 << 24)
    one = Workers(tmp_path, tier, tensor=2)
    one.store(request(100))
    one.close()
    for tensor, pipeline in ((1, 1), (1, 2), (4, 1), (2, 2)):
        other = Workers(tmp_path, tier, tensor, pipeline)
        assert other.match(request(100, name="other")) == 0
        other.close()


def test_a_hit_ends_before_a_page_that_one_worker_lost(tmp_path: Path) -> None:
    tier = SharedTier(1 << 24)
    one = Workers(tmp_path, tier, tensor=2)
    first = request(100)
    one.store(first)
    one.close()
    form = one.workers[1]._shard.text
    shard = Workers(tmp_path, tier, tensor=2)
    hashes = RequestHashes(Roots(model_identity(shard._config(0))).of(first), first).of_blocks(3, 4, BLOCK)
    forms = [worker.worker._layers.forms[0] for worker in shard.workers]
    assert forms[1].shard == form != forms[0].shard
    assert tier.drop(Objects(hashes, 0, forms[1])) == 1
    again = request(100, name="again")
    assert shard.match(again) == 48
    shard.close()


def test_a_load_that_fails_on_one_worker_fails_for_the_engine(tmp_path: Path) -> None:
    tier = SharedTier(1 << 24)
    one = Workers(tmp_path, tier, tensor=2)
    table = one.store(request(100))
    again = request(100, name="again")
    assert one.match(again) == 96
    one.workers[1].worker.end("again")
    done = one.load(again, 96, table)
    assert (done.finished_recving, done.failed_recving) == ({"again"}, {"again"})
    one.close()


def test_replicas_need_their_own_disks(tmp_path: Path) -> None:
    config = Workers(tmp_path, SharedTier(1 << 20), replica=1)._config(0)
    config.kv_transfer_config.kv_connector_extra_config["tiers"] = [f"disk:{tmp_path}:1MiB"]
    with pytest.raises(ValueError, match=r"write \{rank\} into the path"):
        KvloomConnector(config, KVConnectorRole.WORKER, cache_config())


def test_a_stage_without_layers_of_a_group_is_refused() -> None:
    empty = KVCacheConfig(1, [], [KVCacheGroupSpec([], FullAttentionSpec(**ATTENTION))])
    with pytest.raises(ValueError, match=r"group 0 .* has no layer on this stage"):
        block_groups(engine_config(), empty)


# --- the secondary tier of vLLM's own offloading


def secondary(folder: Path, memory: np.ndarray, dtype: str = "float16", host: str = "host:1MiB") -> Any:
    """A KvloomTier over `memory`, made by vLLM's factory as from a config."""
    config = SimpleNamespace(
        groups=[SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("a",))],
        worker_kv_bytes_per_block=memory.shape[1],
        model=SimpleNamespace(name=str(folder), dtype=dtype),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(tp_size=1, pp_size=1, data_parallel_index=0, data_parallel_size=1),
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )
    order = {
        "type": "KvloomTier",
        "module_path": "kvloom.adapters.vllm",
        "tiers": [host, f"disk:{folder / 'kv'}:16MiB"],
        "load_seconds": 2.0,
    }
    spec: Any = SimpleNamespace(config=config)
    return SecondaryTierFactory.create_secondary_tier(json.loads(json.dumps(order)), memoryview(memory), spec)


def finished(tier: Any) -> Any:
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    return result


def looked_up(tier: Any, key: Any, context: ReqContext) -> Any:
    until = time.monotonic() + 30
    while (found := tier.lookup(key, context)) is LookupResult.RETRY:
        assert time.monotonic() < until
        time.sleep(0.002)
    return found


def test_the_secondary_tier_stores_and_loads_chunks(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 100)
    memory = np.random.default_rng(0).integers(0, 256, (8, 4096), np.uint8)
    context = ReqContext("a")
    keys = [make_offload_key(bytes([i]) * 32, i % 2) for i in range(4)]
    tier = secondary(tmp_path, memory)
    assert isinstance(tier, KvloomTier)
    tier.on_new_request(context)
    assert looked_up(tier, keys[0], context) is LookupResult.MISS
    tier.submit_store(TransferJob(1, keys, np.array([3, 1, 0, 2]), False, context))
    stored = finished(tier)
    assert (stored.job_id, stored.success, tier.has_pending_work()) == (1, True, False)
    tier.on_request_finished(context)
    assert looked_up(tier, keys[0], context) is LookupResult.HIT
    tier.shutdown()

    target = np.zeros_like(memory)
    again = secondary(tmp_path, target)
    other = [*keys, make_offload_key(b"x" * 32, 0)]
    assert [looked_up(again, key, context) for key in other] == [LookupResult.HIT] * 4 + [LookupResult.MISS]
    again.submit_load(TransferJob(2, other, np.array([7, 6, 5, 4, 1]), True, context))
    loaded = finished(again)
    assert not loaded.success
    assert list(loaded.successful_keys) == keys
    assert (target[[7, 6, 5, 4]] == memory[[3, 1, 0, 2]]).all()
    assert not target[:4].any()
    again.shutdown()
    wrong = secondary(tmp_path, target, dtype="bfloat16")
    assert looked_up(wrong, keys[0], context) is LookupResult.MISS
    wrong.shutdown()


def test_a_job_of_the_secondary_tier_may_be_larger_than_host_memory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 100)
    memory = np.random.default_rng(0).integers(0, 256, (128, 4096), np.uint8)  # 512 KiB
    context, ids = ReqContext("a"), np.arange(128)
    keys = [make_offload_key(bytes([i]) * 32, i % 2) for i in range(128)]
    tier = secondary(tmp_path, memory, host="host:64KiB")
    tier.submit_store(TransferJob(1, keys, ids, False, context))
    assert finished(tier).success
    tier.shutdown()
    target = np.zeros_like(memory)
    again = secondary(tmp_path, target, host="host:64KiB")
    again.submit_load(TransferJob(2, keys, ids[::-1].copy(), True, context))
    loaded = finished(again)
    assert loaded.success
    assert loaded.transfer_bytes == memory.nbytes
    assert (target[::-1] == memory).all()
    again.shutdown()


def test_a_job_of_the_secondary_tier_that_raises_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 100)
    memory = np.random.default_rng(0).integers(0, 256, (4, 4096), np.uint8)
    context, keys = ReqContext("a"), [make_offload_key(b"a" * 32, 0)]
    tier = secondary(tmp_path, memory)

    def fail(*_: Any) -> Any:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(tier._pages, "store", fail)
        patch.setattr(tier._pages, "lookup", fail)
        tier.submit_store(TransferJob(1, keys, np.array([2]), False, context))
        assert not finished(tier).success
        assert looked_up(tier, keys[0], context) is LookupResult.MISS
    tier.on_request_finished(context)
    tier.submit_store(TransferJob(2, keys, np.array([2]), False, context))
    assert finished(tier).success
    assert looked_up(tier, keys[0], context) is LookupResult.HIT
    tier.shutdown()


class Offloading:
    """vLLM's manager of its CPU memory, above a KvloomTier. `memory` has one row for each chunk."""

    def __init__(self, folder: Path, memory: np.ndarray) -> None:
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
        self.memory, self.tier = memory, secondary(folder, memory)
        region: Any = SimpleNamespace(create_kv_memoryview=lambda: memoryview(memory), cleanup=int)
        self.manager = TieringOffloadingManager(
            CPUPrimaryTierOffloadingManager(len(memory), region), [self.tier]
        )

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def store(self, context: ReqContext, keys: list[Any], chunks: np.ndarray) -> None:
        plan = self.manager.prepare_store(keys, context)
        assert plan is not None
        self.memory[plan.store_spec.chunk_ids] = chunks  # type: ignore[attr-defined]
        self.manager.complete_store(keys, context)
        self.tier.drain_jobs()
        self.step()

    def look_up(self, context: ReqContext, keys: list[Any], steps: int = 200) -> list[Any]:
        """Look up as vLLM does in every step, until the manager knows all keys."""
        for _ in range(steps):
            found = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                return found
            self.step()
            self.tier.drain_jobs()
            time.sleep(0.005)
        raise AssertionError(f"no answer after {steps} steps: {found}")


def test_vllms_offloading_manager_loads_from_the_secondary_tier_what_its_memory_evicted(
    tmp_path: Path,
) -> None:
    chunks = np.random.default_rng(0).integers(0, 256, (8, 4096), np.uint8)
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(8)]
    one = Offloading(tmp_path, np.zeros((4, 4096), np.uint8))
    first = ReqContext("first")
    one.manager.on_new_request(first)
    one.store(first, keys[:4], chunks[:4])
    one.store(first, keys[4:], chunks[4:])
    one.manager.on_request_finished(first)
    again = ReqContext("again")
    one.manager.on_new_request(again)
    assert one.look_up(again, keys[:4]) == [LookupResult.HIT] * 4
    plan: Any = one.manager.prepare_load(keys[:4], again)
    assert (one.memory[plan.chunk_ids] == chunks[:4]).all()
    one.manager.complete_load(keys[:4], again)
    one.manager.on_request_finished(again)
    one.tier.shutdown()


@pytest.mark.parametrize("fault", ["damaged", "failing"])
def test_vllms_offloading_manager_computes_chunks_that_the_secondary_tier_lost(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier finds the chunks, and cannot load them. The lookups of the request must end."""
    chunks = np.random.default_rng(0).integers(0, 256, (4, 4096), np.uint8)
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(4)]
    one = Offloading(tmp_path, np.zeros((4, 4096), np.uint8))
    first = ReqContext("first")
    one.manager.on_new_request(first)
    one.store(first, keys, chunks)
    one.tier.shutdown()
    for file in (tmp_path / "kv").rglob("*") if fault == "damaged" else ():
        if file.is_file() and file.stat().st_size > 8192:
            data = np.fromfile(file, np.uint8)
            data[4096::64] ^= 0x55
            data.tofile(file)
    other = Offloading(tmp_path, np.zeros((4, 4096), np.uint8))
    if fault == "failing":

        def fail(*_: Any) -> Any:
            raise OSError("injected")

        monkeypatch.setattr(other.tier._pages, "load", fail)
    again = ReqContext("again")
    other.manager.on_new_request(again)
    assert other.look_up(again, keys, steps=20) == [LookupResult.MISS] * 4
    assert not other.memory.any()
    other.tier.shutdown()
