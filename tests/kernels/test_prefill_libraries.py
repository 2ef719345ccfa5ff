"""Libraries in the place of our prefill: who is asked, who is measured, who is remembered, and that results are the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvloom.core import Visibility
from kvloom.kernels.attention import (
    Mask,
    QueryRows,
    Shape,
    installed_libraries,
    prefill_libraries as libraries,
    reference,
)
from kvloom.kernels.attention.prefill_backends import BlockTile
from kvloom.kernels.attention.prefill_libraries import (
    FlashAttention3,
    Library,
    LibraryStep,
    PagedCall,
    measure_fastest,
    size_class,
)

triton = pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.attention import PrefillPlan, prefill  # noqa: E402

from .batches import DEVICE, TOLERANCE, Batch, relative  # noqa: E402

CPU = torch.device("cpu")
FULL = Visibility("full")
SHAPE = Shape(4, 2, 64, 64, dtype=torch.float32)
TILE = None if DEVICE == "cuda" else BlockTile(16, 32, 4, 2)


class Fake:
    """A library that knows full attention without softcap, by the oracle; it counts its calls."""

    name = "fake"

    def __init__(self) -> None:
        self.calls = 0

    def supports(self, shape: Shape, dtype: torch.dtype, span: Visibility, softcap: float | None) -> bool:
        return span == FULL and softcap is None

    def attend(self, step: LibraryStep, call: PagedCall) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        rows = call.tables[: len(step.rows.lengths)]
        out, lse = reference.attend(
            call.q, call.k, call.v, rows, step.starts, step.lengths, Mask(call.span), call.scale
        )
        return out if call.out is None else call.out.copy_(out), lse


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(libraries, "_FASTEST", {})
    monkeypatch.setattr(prefill, "MIN_LIBRARY_PAIRS", 0)
    installed_libraries.cache_clear()
    yield
    installed_libraries.cache_clear()


def timed(monkeypatch: pytest.MonkeyPatch, fake_is_faster: bool) -> list[Any]:
    """A clock that advances by given steps only, and a record of the measured calls."""
    measured: list[Any] = []

    def seconds(call: Callable[[], Any], device: torch.device) -> float:
        call()
        measured.append(call)
        return float((len(measured) % 2 == 1) == fake_is_faster)  # ours is measured first, then the fake

    monkeypatch.setattr(libraries, "_seconds", seconds)
    return measured


def run(plan: PrefillPlan, batch: Batch, mask: Mask | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    plan.make(batch.starts.tolist(), batch.lengths)
    out = torch.full((*batch.q.shape[:2], batch.shape.v_dim), math.nan, dtype=batch.q.dtype, device=DEVICE)
    lse = torch.full(batch.q.shape[:2], math.nan, device=DEVICE)
    return plan.attend(batch.q, batch.k, batch.v, batch.tables, mask, out=out, lse=lse)


@pytest.mark.parametrize("faster", [True, False], ids=["faster", "slower"])
@pytest.mark.few(1)
def test_the_faster_one_computes_and_is_remembered(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    measured, fake = timed(monkeypatch, faster), Fake()
    batch = Batch(SHAPE, [40, 9, 0, 33], [12, 9, 0, 1])
    plan = PrefillPlan(SHAPE, device=DEVICE, tile=TILE, libraries=[fake])
    found = run(plan, batch)
    assert len(measured) == 2
    assert fake.calls == 2 + faster  # once to be compared, once to be measured
    exact = batch.expected(Mask(FULL))
    assert relative(found[0], exact[0]) < TOLERANCE[torch.float32]
    torch.testing.assert_close(found[1].double().cpu(), exact[1], atol=1e-4, rtol=1e-4)
    run(plan, Batch(SHAPE, [41, 9, 0, 34], [12, 9, 0, 1]))  # much the same sizes: nothing is measured again
    assert len(measured) == 2
    assert fake.calls == 2 + 2 * faster
    run(plan, Batch(SHAPE, [80, 9, 0, 33], [30, 9, 0, 1]))
    assert len(measured) == 4


def test_what_it_does_not_take_stays_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, fake = timed(monkeypatch, True), Fake()
    batch = Batch(SHAPE, [30, 20], [5, 20])
    run(PrefillPlan(SHAPE, device=DEVICE, tile=TILE, libraries=[fake]), batch, Mask(FULL, softcap=5.0))
    sinks = Mask(FULL, sinks=torch.randn(4, device=DEVICE))
    run(PrefillPlan(SHAPE, device=DEVICE, tile=TILE, libraries=[fake]), batch, sinks)
    window = Visibility("sliding", 8)
    run(
        PrefillPlan(SHAPE, window, DEVICE, tile=TILE, libraries=[fake]),
        Batch(SHAPE, [30], [5], window),
        Mask(window),
    )
    more_queries_than_tokens = Batch(SHAPE, [30, 0], [5, 2])
    run(PrefillPlan(SHAPE, device=DEVICE, tile=TILE, libraries=[fake]), more_queries_than_tokens)
    monkeypatch.setattr(prefill, "MIN_LIBRARY_PAIRS", 1 << 40)
    run(PrefillPlan(SHAPE, device=DEVICE, tile=TILE, libraries=[fake]), batch)
    assert not measured
    assert not fake.calls
    assert PrefillPlan(SHAPE, device=DEVICE, backend="pages").libraries == ()


def test_a_window_that_no_row_exceeds_is_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, True)
    fake, window = Fake(), Visibility("sliding", 64)
    batch = Batch(SHAPE, [30, 20], [5, 20], window)
    found = run(PrefillPlan(SHAPE, window, DEVICE, tile=TILE, libraries=[fake]), batch, Mask(window))
    assert fake.calls == 3
    assert relative(found[0], batch.expected(Mask(window))[0]) < TOLERANCE[torch.float32]


def test_a_library_that_fails_is_excluded_with_a_warning() -> None:
    result = torch.ones(3), torch.ones(3)

    def broken() -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("no kernel image")

    with pytest.warns(RuntimeWarning, match="no kernel image"):
        assert measure_fastest("key", {"kvloom": lambda: result, "other": broken}, CPU) == "kvloom"
    with pytest.raises(RuntimeError, match="no kernel image"):
        measure_fastest("another", {"kvloom": broken, "other": lambda: result}, CPU)


@pytest.mark.parametrize("wrong", [1.1, math.nan], ids=str)
def test_a_library_with_other_results_is_excluded_with_a_warning(wrong: float) -> None:
    def slow() -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.01)
        return torch.ones(3), torch.ones(3)

    candidates = {"kvloom": slow, "hasty": lambda: (torch.full((3,), wrong), torch.ones(3))}
    with pytest.warns(RuntimeWarning, match="outputs differ"):
        assert measure_fastest("key", candidates, CPU) == "kvloom"


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    calls: list[str] = []
    candidates: Any = {name: (lambda name=name: calls.append(name)) for name in ("kvloom", "other")}
    assert measure_fastest("key", candidates, torch.device("cuda")) == "kvloom"
    assert not calls
    assert not libraries._FASTEST


def test_size_classes_differ_by_factors_of_two() -> None:
    def of(starts: list[int], lengths: list[int], softcap: float | None = None) -> object:
        return size_class(SHAPE, torch.float32, FULL, softcap, QueryRows.from_lists(starts, lengths))

    assert of([0, 600], [5000]) == of([0, 700], [5500])
    assert of([0, 600], [5000]) != of([0, 1100], [5000])
    assert of([0, 600], [5000]) != of([0, 600], [9000])
    assert of([0, 600], [5000]) != of([0, 300, 600], [2500, 2500])
    assert of([0, 600], [5000]) != of([0, 600], [5000], 30.0)


def test_the_environment_variable_selects_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libraries.ENVIRONMENT_VARIABLE, "")
    assert installed_libraries() == ()
    installed_libraries.cache_clear()
    monkeypatch.setenv(libraries.ENVIRONMENT_VARIABLE, "flash_attn_9, flashinfer")
    with pytest.raises(ValueError, match=r"flash_attn_9.*known are flash_attn_interface"):
        installed_libraries()


def test_a_package_that_only_has_the_name_is_left_out() -> None:
    class Namesake:
        __name__ = "flash_attn_interface"

        def flash_attn_with_kvcache(self, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return q

    batch = Batch(SHAPE, [30], [5])
    step = LibraryStep(QueryRows.from_lists([0, 5], [30]), torch.device(DEVICE))
    call = PagedCall(batch.q, batch.k, batch.v, batch.tables, 1.0, FULL, None)
    with pytest.raises(TypeError, match="no log-sum-exps"):
        FlashAttention3(Namesake()).attend(step, call)


def there() -> list[Library]:
    return list(installed_libraries()) if DEVICE == "cuda" else []


@pytest.mark.parametrize("name", ["FlashAttention-3", "FlashInfer"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_installed_libraries_agree_with_the_oracle(name: str, order: str) -> None:
    found = [library for library in there() if library.name == name]
    if not found:
        pytest.skip(f"{name} is not installed here, or there is no GPU")
    shape = Shape(8, 2, 128, 128, dtype=torch.bfloat16)
    batch = Batch(shape, [300, 128, 40, 290], [40, 128, 40, 1], order=order, dtype=torch.bfloat16)
    rows = QueryRows.from_lists(batch.starts.tolist(), batch.lengths)
    assert found[0].supports(shape, torch.bfloat16, FULL, None)
    step = LibraryStep(rows, torch.device(DEVICE))
    exact = batch.expected(Mask(FULL))
    for out in (None, torch.full_like(batch.q, math.nan)):
        call = PagedCall(batch.q, batch.k, batch.v, batch.tables, 128**-0.5, FULL, None, out)
        result, lse = found[0].attend(step, call)
        assert relative(result, exact[0]) < TOLERANCE[torch.bfloat16]
        assert relative(lse, exact[1]) < TOLERANCE[torch.bfloat16]
        assert out is None or result.data_ptr() == out.data_ptr()


def test_flash_attention_takes_windows_and_softcap() -> None:
    found = [library for library in there() if library.name == "FlashAttention-3"]
    if not found:
        pytest.skip("FlashAttention-3 is not installed here, or there is no GPU")
    shape, window = Shape(8, 2, 128, 128, dtype=torch.bfloat16), Visibility("sliding", 100)
    batch = Batch(shape, [300, 128], [140, 128], window, dtype=torch.bfloat16)
    plan = PrefillPlan(shape, window, DEVICE, libraries=found)
    libraries._FASTEST[
        size_class(
            shape, torch.bfloat16, window, 20.0, QueryRows.from_lists(batch.starts.tolist(), batch.lengths)
        )
    ] = "FlashAttention-3"
    mask = Mask(window, softcap=20.0)
    assert relative(run(plan, batch, mask)[0], batch.expected(mask)[0]) < TOLERANCE[torch.bfloat16]
