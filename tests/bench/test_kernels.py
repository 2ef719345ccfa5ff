"""`kvloom bench kernels`: what it says without a GPU, and one real row with one."""

from __future__ import annotations

import json

import pytest
import torch

from kvloom.bench import attention_work, gpu_timing, kernels, state_work
from kvloom.bench.expert_work import by_torch
from kvloom.kernels.moe import fused_moe

CUDA = torch.cuda.is_available()


@pytest.mark.skipif(CUDA, reason="there is a GPU here")
def test_a_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--json"]) == 2
    shown = capsys.readouterr()
    assert "no CUDA GPU" in shown.err
    assert not shown.out


def test_help_names_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["--help"])
    shown = capsys.readouterr().out
    assert all(section in shown for section in kernels.SECTIONS)


def test_lower_bounds_follow_bytes_and_flops() -> None:
    assert attention_work.shared_floor(1, 16, 0) == pytest.approx(
        16 * 8 * 128 * 4 / gpu_timing.READ_RATE * 1e6
    )
    many = attention_work.shared_floor(4096, 4096, 0)
    assert many == pytest.approx(4096 * 4096 * 32 * 128 * 4 / gpu_timing.FLOP_RATE * 1e6)
    row = gpu_timing.Row("decode", "x", 1.0, {"kvloom": 2.0, "kvloom, plain": 1.0, "other": 3.0})
    assert row.ours == 2.0
    assert row.best_peer == 3.0


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="measures a GPU")
def test_a_section_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--json", "--only", "write", "--rounds", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2
    assert all(row["us"]["kvloom"] > row["floor_us"] * 0.5 for row in rows)


def test_experts_by_torch_are_the_same_work() -> None:
    gate_up, down = torch.randn(4, 32, 64).bfloat16(), torch.randn(4, 64, 16).bfloat16()
    x, index = torch.randn(9, 64).bfloat16(), torch.rand(9, 4).topk(2)[1]
    weights = torch.rand(9, 2).bfloat16()
    ours, peer = (run(x, index, weights, gate_up, down).float() for run in (fused_moe, by_torch))
    assert float((ours - peer).norm() / ours.norm()) < 0.01


@pytest.mark.parametrize("name", list(state_work.LAYERS))
def test_recurrent_layers_fit_their_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_work, "DEVICE", "cpu")
    monkeypatch.setattr(state_work, "SIZES", ((2, 3),))
    monkeypatch.setattr(state_work, "LAYERS", {name: state_work.LAYERS[name]})
    monkeypatch.setattr(
        state_work, "timed", lambda calls, rounds: {k: 1.0 for k, call in calls.items() if call() is not None}
    )
    (row,) = state_work.state_rows(1)
    assert row.work == f"{name}, 2 x 3"
    assert row.floor_us > 0
