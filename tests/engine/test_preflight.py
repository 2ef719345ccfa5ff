"""Errors that are reported before an engine is loaded, and those that loading reports."""

from __future__ import annotations

import json
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvloom.engine import check_engine, check_model, engine_config, preflight as checking
from kvloom.kernels.memory import CudaError
from kvloom.models.specs import folder_of

LLAMA = folder_of("kvloom-llama")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kv_dtype": "int3"}, "KV dtype 'int3' is not known"),
        ({"kv_dtype": "fp8,sliding=bf16"}, "no sliding layers"),
        ({"kv_scales": "scales.safetensors"}, "there is none"),
        ({"kv_scales": "/no/scales", "kv_dtype": "fp8"}, "there is no file /no/scales with scales"),
        ({"pool_bytes": 1 << 10}, "a pool of 1,024 bytes is too small"),
        ({"tiers": ["host:x"]}, "tier 'host:x': size 'x' is not understood"),
        ({"eviction_policy": "oldest"}, "unknown eviction policy 'oldest'; known: lru"),
        ({"block_tokens": 24}, "block_tokens 24 must be a power of two from 16 to 256"),
        ({"load": "sometimes"}, "load 'sometimes' is not one of auto, always, never"),
        ({"checkpoint_every": -1}, "checkpoint_every -1 is negative"),
        ({"fixed": ["pool"]}, "fixed 'pool' is not one of chunk, drafts, snapshots"),
        ({"evict_policy": "lru"}, "no setting 'evict_policy'; did you mean eviction_policy"),
        ({"grammar_memory": 1}, "grammar_memory 1 must be at least 16 MiB"),
    ],
)
def test_invalid_settings_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_engine(LLAMA, engine_config(**asked))


def test_a_host_tier_must_have_a_slab_of_all_ranks() -> None:
    """The pages of a host tier have the parts of all ranks."""
    config = {"tensor_parallel": 2, "pool_bytes": 64 << 20}
    with pytest.raises(ValueError, match="host tier of 4,096 bytes is too small") as refused:
        check_engine(LLAMA, engine_config(tiers=["host:4KiB"], **config), dtype="float32")
    least = int(str(refused.value).partition("slabs have ")[2].split()[0].replace(",", ""))
    check_engine(LLAMA, engine_config(tiers=[f"host:{least}"], **config), dtype="float32")
    with pytest.raises(ValueError, match="is too small"):
        check_engine(LLAMA, engine_config(tiers=[f"host:{least - 1}"], **config), dtype="float32")
    for name in ("tensor_parallel", "context_parallel"):
        with pytest.raises(ValueError, match="a pool of 1,024 bytes is too small"):
            check_engine(LLAMA, engine_config(**{name: 2, "pool_bytes": 1024}))
    check_engine(folder_of("kvloom-hybrid"), engine_config(tensor_parallel=2, tiers=["host:1GiB"]))


def test_valid_settings_pass(tmp_path: Path) -> None:
    scales = tmp_path / "scales.safetensors"
    scales.touch()
    config = engine_config(kv_dtype="fp8", kv_scales=scales, pool_bytes=64 << 20, eviction_policy="adaptive")
    check_engine(LLAMA, config, dtype="float32")
    config = engine_config(kv_dtype={"full": "int8"}, kv_scales="checkpoint", tiers=["host:1GiB"])
    check_engine(LLAMA, config)
    check_engine(folder_of("kvloom-hybrid"), engine_config(kv_dtype="sliding=int8"))
    check_engine("llama-3-8b", engine_config(pool_bytes=1 << 30), load_format="random")


@pytest.mark.parametrize(
    ("device", "count", "said"),
    [
        ("cuda", OSError("no libcuda"), "no device 'cuda': no NVIDIA driver is installed; use --device cpu"),
        (
            "cuda:0",
            CudaError("cuInit", 100, "none found"),
            ": the NVIDIA driver reports: cuInit failed with 100",
        ),
        ("cuda", 0, "the NVIDIA driver sees 0 GPUs; use --device cpu, or omit"),
        ("cuda:1", 1, "no device 'cuda:1': the NVIDIA driver sees 1 GPU;"),
        ("cuda", 1, None),
        ("cuda:1", 2, None),
        ("cpu", OSError("not called"), None),
        ("cuda:x", OSError("not called"), None),
    ],
)
def test_missing_gpu_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int | Exception, said: str | None
) -> None:
    class Driver:
        def devices(self) -> int:
            assert isinstance(count, int)
            return count

    def driver() -> Driver:
        if isinstance(count, Exception):
            raise count
        return Driver()

    monkeypatch.setattr(checking, "load_cuda_driver", driver)
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        check_engine(LLAMA, engine_config(), device=device)


def test_pool_check_matches_the_engines_layout() -> None:
    for dtype, unit in (("float32", 98_304), ("bfloat16", 49_152)):
        check_engine(LLAMA, engine_config(pool_bytes=2 * unit), dtype=dtype)
        with pytest.raises(ValueError, match=f"two slabs of {unit:,} bytes"):
            check_engine(LLAMA, engine_config(pool_bytes=2 * unit - 1), dtype=dtype)


def test_config_for_transformers_only_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    check_engine(str(tmp_path), engine_config(pool_bytes=1))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nothing-like-it", "no model 'nothing-like-it'.*kvloom-llama"),
        ("no/such/folder", "no model 'no/such/folder'"),
        ("./org/name", "no model"),
        ("llama-3-8b", "a config without weights"),
        (__file__, "a config without weights"),
        (str(Path(__file__).parent), "the folder has no config.json"),
    ],
)
def test_missing_model_is_refused_with_advice(model: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_model(model)


def test_unreachable_hub_is_refused_at_once_unless_behind_a_proxy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(checking, "getproxies", dict)
        with pytest.raises(
            ValueError, match=r"the hub \(127.0.0.1:\d+\) cannot be reached: Connection refused"
        ):
            check_model("org/name")
        monkeypatch.setattr(checking, "getproxies", lambda: {"http": "http://proxy"})
        assert check_model("org/name") is None


def test_sizes_may_be_text() -> None:
    sizes = ("pool_bytes", "max_pool_bytes", "min_pool_bytes", "keep_free", "public_bytes")
    config = engine_config(**dict.fromkeys(sizes, "256MiB"), grammar_memory="64MiB")
    assert {getattr(config, name) for name in sizes} == {256 << 20}
    assert config.grammar_limits.memory == 64 << 20
    assert engine_config(pool_bytes=None, public_bytes=0) == engine_config()


@pytest.mark.parametrize("value", ["much", "-1MiB", -1, 1.5, [1]])
@pytest.mark.parametrize("name", ["pool_bytes", "grammar_memory"])
def test_a_value_that_is_no_size_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}.*size.*80GiB|^{name}.*size.*256MiB"):
        engine_config(**{name: value})
