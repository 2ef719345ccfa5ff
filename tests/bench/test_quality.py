"""Perplexity through pages against the model's own, and the command on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvloom.models
from kvloom.bench.quality import main, measure
from tests.engines import make_engine
from tests.models.zoo import prompts_of, tiny

EMBEDDED = Path(kvloom.models.__file__).parent / "embedded" / "llama"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_with_pages_of_float32_the_nats_are_the_models_own(family: str) -> None:
    windows = prompts_of(7, (40, 33, 2))
    wanted, choices = [], []
    model = tiny(family)
    for window in windows:
        with torch.inference_mode():
            logits = model(torch.tensor([window])).logits[0, :-1]
        wanted.append(-logits.log_softmax(-1)[torch.arange(len(window) - 1), window[1:]])
        choices.append(logits.argmax(-1))
    engine = make_engine(model, 1 << 24)
    found = measure(engine, windows, chunk=9)
    torch.testing.assert_close(found.nats, torch.cat(wanted), atol=1e-3, rtol=1e-3)
    assert torch.equal(found.choices, torch.cat(choices))
    assert found.against(found) == {"more_nats": 0, "same_choice": 1}
    assert engine.cache.stats()["in_use_pages"] == 0
    assert engine.cache.stats()["cached_pages"] == 0  # one window is not found by the next


def test_every_kv_dtype_is_compared_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.py"
    text.write_text(Path(__file__).read_text())
    on_request = [str(EMBEDDED), "--text", str(text), "--context", "128", "--tokens", "256", "--chunk", "50"]
    assert main([*on_request, "--kv-dtype", "fp32", "int8", "--calibrate", str(text), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == 254
    rows = {row["kv_dtype"]: row for row in report["rows"]}
    assert rows.keys() == {"fp32", "int8", "int8, static scales"}
    assert rows["fp32"]["more_nats"] == 0
    for row in rows.values():
        assert abs(row["more_nats"]) < 0.02
        assert row["same_choice"] > 0.9
    assert main([*on_request, "--kv-dtype", "int4"]) == 2
    assert "'int4' is not known" in capsys.readouterr().err
    assert main([str(EMBEDDED), "--text", str(tmp_path / "nothing")]) == 2
