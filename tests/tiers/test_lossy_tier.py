"""Re-encoded pages: close to the original, smaller, and never served as exact."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom.tiers import (
    Coding,
    DiskConfig,
    DiskTier,
    Form,
    HostConfig,
    HostTier,
    LossyTier,
    Objects,
    Outcome,
    Ranges,
    Transfer,
    TransferCounts,
    lossy_form,
    lossy_tier as lossy,
    wrapped_tier as wrapped,
)
from kvloom.tiers.encoding import decode, encode
from kvloom.tiers.encoding.quantisation import fp8_values, to_fp8
from kvloom.tiers.testing import Faults, FaultyFiles, FaultyTier
from kvloom.tiers.testing.conformance import block_hash

torch = pytest.importorskip("torch")
MIB = 1 << 20
FORM = Form("bf16", "LKTHD", 32768, 8192)
ALLOWED = replace(FORM, exact=False)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODINGS: list[Coding] = ["int8", "fp8"]


def values(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3
    return drawn.to(TYPES[dtype]).view(torch.uint8).numpy().copy()


def as_floats(data: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(data).view(TYPES[dtype]).float().numpy()


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("dtype", list(TYPES))
def test_a_decoded_run_is_close_to_the_original(coding: Coding, dtype: str) -> None:
    data = values(64 * 100, dtype)
    small = bytearray(64 * 100 + 100 * 4)
    encode(memoryview(data), dtype, coding, memoryview(small))
    back = np.zeros_like(data)
    decode(memoryview(small), dtype, coding, memoryview(back))
    before, after = as_floats(data, dtype).reshape(-1, 64), as_floats(back, dtype).reshape(-1, 64)
    most = np.abs(before).max(axis=1, keepdims=True)
    bound = 0.51 / 127 * most if coding == "int8" else np.maximum(np.abs(before) / 15.9, most / 448 / 500)
    bound = bound + np.abs(before) * 2**-8  # and the page's own rounding
    assert (np.abs(before - after) <= bound).all()


def test_fp8_equals_that_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float().numpy()
    finite = ~np.isnan(theirs)
    assert np.array_equal(fp8_values()[finite], theirs[finite])
    drawn = (torch.randn(20000, generator=torch.Generator().manual_seed(1)) * 100).clamp(-448, 448)
    ours = fp8_values()[to_fp8(drawn.numpy())]
    assert (
        np.abs(ours - drawn.numpy())
        <= np.abs(drawn.to(torch.float8_e4m3fn).float().numpy() - drawn.numpy()) + 1e-9
    ).all()


def test_zeros_and_non_finite_values_are_encoded() -> None:
    data = torch.zeros(128, dtype=torch.float32)
    data[64:68] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    small = bytearray(128 + 8)
    for coding in CODINGS:
        encode(memoryview(data.view(torch.uint8).numpy()), "fp32", coding, memoryview(small))
        back = np.zeros(512, np.uint8)
        decode(memoryview(small), "fp32", coding, memoryview(back))
        assert np.isfinite(back.view(np.float32)).all()
        assert not back.view(np.float32)[:64].any()


@pytest.mark.parametrize("coding", CODINGS)
def test_stored_pages_have_half_the_size_and_need_the_lossy_form(tmp_path: Path, coding: Coding) -> None:
    inner = DiskTier(DiskConfig(tmp_path, 8 * MIB, segment_bytes=MIB, compression="lz4"))
    tier = LossyTier(inner, coding)
    names = [block_hash(n) for n in range(6)]
    pages = values(6 * 16384, "bf16")
    source = Ranges(pages, np.arange(6) * 32768)
    exact, allowed = Objects(names, 0, FORM), Objects(names, 0, ALLOWED)
    assert tier.write(exact, source).wait(20)
    assert lossy_form(FORM, coding).page_bytes == 32768 // 2 * 17 // 16

    back = np.zeros_like(pages)
    into = Ranges(back, source.starts)
    assert not tier.lookup(exact).any()
    assert not inner.lookup(exact).any()
    assert not inner.lookup(allowed).any(), "its own form, not the page's"
    transfer = tier.read(exact, into)
    assert transfer.wait(20)
    assert (transfer.results == Outcome.MISSING).all()
    assert not back.any()

    assert tier.lookup(allowed).all()
    first = tier.read(allowed, into, (8192, 16384))
    assert first.wait(20)
    assert first.ok.all()
    assert not back[:8192].any()
    assert back[8192:16384].any()
    whole = tier.read(allowed, into)
    assert whole.wait(20)
    assert whole.ok.all()
    error = np.abs(as_floats(back, "bf16") - as_floats(pages, "bf16"))
    assert error.mean() < 0.08
    assert error.max() > 0

    before = back.copy()
    again = tier.write(allowed, into)
    assert again.wait(20)
    assert again.ok.all()
    assert tier.read(allowed, into).wait(20)
    assert np.array_equal(back, before), "a stored page is not re-encoded again"
    other = LossyTier(HostTier(HostConfig(MIB, slab_bytes=65536)), "fp8" if coding == "int8" else "int8")
    assert lossy_form(FORM, "int8") != lossy_form(FORM, "fp8"), "codings never meet"
    other.close()
    assert tier.drop(exact) == 6
    assert not tier.lookup(allowed).any()
    tier.close()
    assert (tier.read(allowed, into).results == Outcome.FAILED).all()
    assert (tier.write(exact, source).results == Outcome.FAILED).all()


def test_outcomes_of_the_inner_tier_are_reported() -> None:
    faults = Faults()
    tier = LossyTier(FaultyTier(HostTier(HostConfig(MIB, slab_bytes=65536)), faults), "int8")
    names, pages = [block_hash(1)], values(16384, "bf16")
    faults.full = True
    transfer = tier.write(Objects(names, 0, FORM), Ranges(pages, [0]))
    assert transfer.wait(20)
    assert transfer.results.tolist() == [Outcome.FULL]
    faults.full = False
    assert tier.write(Objects(names, 0, FORM), Ranges(pages, [0])).wait(20)
    faults.failing = True
    transfer = tier.read(Objects(names, 0, ALLOWED), Ranges(np.zeros_like(pages), [0]))
    assert transfer.wait(20)
    assert transfer.results.tolist() == [Outcome.FAILED]
    assert tier.stats().reads["failed"] == 1
    tier.close()


def test_a_late_inner_read_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapped, "_WAIT_SECONDS", 0.05)
    exact = Form("fp32", "LKTHD", 65536, 16384)
    wanted = Objects([bytes([n]) * 16 for n in range(2)], 0, replace(exact, exact=False))
    inner, transfers = HostTier(HostConfig(8 << 20)), list[Transfer]()

    def read(asked: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        transfers.append(Transfer(len(asked), TransferCounts(), "read", 1))
        transfers[0].settle([0], Outcome.OK)
        return transfers[0]

    def decode(*args: Any) -> None:
        transfers[0].settle([1], Outcome.OK)  # read, but too late to be decoded

    monkeypatch.setattr(inner, "read", read)
    monkeypatch.setattr(lossy, "decode", decode)
    tier = LossyTier(inner, "int8")
    transfer = tier.read(wanted, Ranges(np.zeros(2 * 65536, np.uint8), np.arange(2) * 65536))
    assert transfer.wait(5)
    assert transfer.results.tolist() == [Outcome.OK, Outcome.LATE]
    tier.close()


def test_a_hung_tier_closes_in_bounded_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wrapped, "_CLOSE_SECONDS", 0.1)
    faults = Faults()
    config = DiskConfig(tmp_path, 8 << 20, 1 << 20, close_seconds=0.1)
    tier = LossyTier(DiskTier(config, lambda directory: FaultyFiles(directory, faults)), "int8")
    faults.hung = True
    form = Form("fp32", "LKTHD", 65536, 16384)
    transfer = tier.write(Objects([bytes(16)], 0, form), Ranges(np.zeros(65536, np.uint8), [0]))
    began = time.monotonic()
    tier.close()
    assert time.monotonic() - began < 5
    assert transfer.wait(5)
    assert transfer.failed
    faults.release()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_call_during_close_ends(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    tier = LossyTier(HostTier(HostConfig(MIB, slab_bytes=1 << 16)), "int8")
    encoded = tier._encoded

    def close_first(objects: Objects) -> Objects:
        tier.close()  # by another thread, after the call found the tier open
        return encoded(objects)

    monkeypatch.setattr(tier, "_encoded", close_first)
    transfer = getattr(tier, verb)(
        Objects([block_hash(1)], 0, ALLOWED), Ranges(np.zeros(FORM.page_bytes, np.uint8), [0])
    )
    assert transfer.wait(10)
    assert transfer.results.tolist() == [Outcome.FAILED]


def test_pages_that_cannot_be_re_encoded_are_refused() -> None:
    with pytest.raises(ValueError, match="'int8' is none of fp32, fp16, bf16"):
        lossy_form(Form("int8", "x", 64, 64), "int8")
    with pytest.raises(ValueError, match="not whole blocks of 64 values"):
        lossy_form(Form("bf16", "x", 300, 100), "int8")
    with pytest.raises(ValueError, match="coding='int4'"):
        LossyTier(HostTier(HostConfig(MIB, slab_bytes=65536)), "int4")  # type: ignore[arg-type]
