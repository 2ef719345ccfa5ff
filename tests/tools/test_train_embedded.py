"""The script that makes the embedded models, run whole at a fraction of the size: what it writes loads, and it has learned."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.masking_utils import create_masks_for_generate

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SCRIPT = TOOLS / "train_embedded.py"
FAST = ["--device", "cpu", "--tiny", "--sequence", "64", "--batch-tokens", "512", "--held-tokens", "256"]

sys.path.insert(0, str(TOOLS))
from embedded import corpus, distillation, models, tokens, training  # noqa: E402

transformers.logging.set_verbosity_error()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*arguments), check=False, capture_output=True, text=True, env=environment, timeout=240
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small part of the standard library, gathered."""
    folder: Path = tmp_path_factory.mktemp("data")
    library = folder / "python3.99"
    for name in ("json", "logging", "importlib", "collections", "email"):
        for source in (corpus.stdlib() / name).rglob("*.py"):
            target = library / source.relative_to(corpus.stdlib())
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    manual = folder / "manual"
    manual.mkdir()
    said = "\n".join(
        f".. function:: f{i}(x)\n\n   Return *x* after adding {i} to it, as everyone asked for.\n"
        for i in range(20)
    )
    (manual / "library.rst").write_text(said)
    done = run("gather", "--out", folder / "out", "--vocabulary", 700, library, manual)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    options = ["--seconds", 200, "--steps", 40, "--pack", folder / "packed"]
    done = run("train", "--data", data, "--out", folder, *FAST, *options)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


@pytest.mark.slow
def test_text_is_split_by_file_and_asks_questions(data: Path) -> None:
    about = json.loads((data / "corpus.json").read_text())
    assert about["sources"] == ["Python 3.99", "manual documentation"]
    assert set(about["train"]) >= {"lib", "doc", "chat"}
    text, held, _ = tokens.read(data)
    assert len(text) == about["train_tokens"]
    assert {kind: len(stream) for kind, stream in held.items()} == {
        kind: one["tokens"] for kind, one in about["held_out"].items()
    }
    tokenizer = tokens.load_tokenizer(data / "tokenizer")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|bos|><|user|>Hello<|eos|><|assistant|>"
    said = "def f(x):\n\tif x:\n        return 'é 漢'  \n\n\n"
    assert tokenizer.decode(tokenizer(said)["input_ids"], skip_special_tokens=True) == said


def test_what_a_later_version_repeats_is_left_out_and_nothing_held_out_leaks(tmp_path: Path) -> None:
    lines = [f"value_{i} = compute_something({i})" for i in range(400)]
    held = next(name for name in map("m{}.py".format, range(1000)) if _is_held(tmp_path / "probe", name))
    for version, changed in (("new", 0), ("old", 40)):
        (tmp_path / version).mkdir()
        text = [f"old_{line}" if i < changed else line for i, line in enumerate(lines[:200])]
        (tmp_path / version / "kept.py").write_text("\n".join(text))
        (tmp_path / version / held).write_text("\n".join(lines[200:]))
    (tmp_path / "old" / "renamed.py").write_text(
        "\n".join(lines[200:300] + [f"fresh_{line}" for line in lines[:100]])
    )
    found = corpus.gather([tmp_path / "new", tmp_path / "old"])
    assert sorted((doc.path, doc.held_out) for doc in found) == sorted([("kept.py", False), (held, True)])


def _is_held(folder: Path, name: str) -> bool:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(f"line number {i} of a file" for i in range(40)))
    found = corpus.gather([folder])[0].held_out
    (folder / name).unlink()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", models.NAMES)
def test_a_folder_loads_and_has_learned(trained: Path, name: str) -> None:
    folder = trained / name
    record = json.loads((folder / "training.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert record["finished"]
    assert record["held_out"]["all"]["nats_per_token"] < math.log(len(tokenizer)) - 0.5
    assert [phase["steps"] for phase in record["phases"]] == ([40, 40] if name == "draft" else [40])
    assert "nats per token" in (folder / "README.md").read_text()
    assert (trained / "packed" / f"{name}.tar.gz").stat().st_size > 10_000
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    ids = tokenizer("def ", return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert made.shape == (1, ids.shape[1] + 8)


@pytest.mark.slow
def test_the_hybrid_has_every_kind_and_generates_what_it_computes(trained: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "hybrid", dtype=torch.float32)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention", "linear_attention"}
    ids = torch.arange(10, 90)[None]  # longer than the window
    made = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    for length in range(80, 86):
        seen = made[:, :length]
        row = torch.empty(1, length, 0)
        mask = create_masks_for_generate(
            model.config, inputs_embeds=row, attention_mask=None, past_key_values=None
        )
        logits = model(input_ids=seen, attention_mask=mask, use_cache=False).logits[0, -1]
        logits[tokens.EOS] = -torch.inf
        assert int(logits.argmax()) == int(made[0, length])


def test_the_layers_of_training_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = models.build("hybrid", 700, tiny=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    ids = torch.randint(0, 700, (2, 150))
    mask = create_masks_for_generate(
        model.config, inputs_embeds=torch.empty(2, 150, 0), attention_mask=None, past_key_values=None
    )
    modeling = sys.modules[type(model).__module__]
    for name in ("mamba2_chunk_scan", "causal_conv1d_fn"):  # put back after the test
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        models.for_training(model)
        got = model(input_ids=ids, use_cache=False, **models.masks(model)).logits
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_every_window_is_seen_once_an_epoch() -> None:
    stream = torch.arange(1001)
    batches = training.windows(stream, 10, 9, seed=3)
    rows = torch.cat([next(batches) for _ in range(11)])
    assert bool((rows[:, 1:] == rows[:, :-1] + 1).all())
    assert len(rows[:, 0].unique()) == 99
    with pytest.raises(ValueError, match="too few for rows of 600"):
        next(training.windows(stream, 600, 1, seed=0))


def test_loss_is_measured_on_every_token_but_the_first() -> None:
    model = models.build("draft", 700, tiny=True)
    stream = np.arange(3, 200, dtype=np.uint16)
    nats, count = training.measure(model, stream, 64, 2, "cpu")
    assert count == len(stream) - 1
    assert abs(nats / count - math.log(700)) < 0.5


@pytest.mark.slow
def test_a_training_told_to_stop_saves_what_it_has(data: Path, tmp_path: Path) -> None:
    arguments = command(
        "train", "--data", data, "--out", tmp_path, *FAST, "--models", "draft", "--seconds", "200"
    )
    arguments += ["--epochs", "1000"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "step" in process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 1
    record = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert not record["finished"]
    assert record["phases"][0]["steps"] >= 1
    assert "stopped before its time" in (tmp_path / "draft" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gather", "--out", "OUT", "nowhere"], "no such folder: nowhere"),
        (["gather", "--out", "OUT", "--vocabulary", "70000"], "70000 is not within 512 and 65536"),
        (
            ["train", "--data", "OUT", "--out", "OUT", "--seconds", "lama=3"],
            "'lama=3': give a positive number",
        ),
        (["train", "--data", "OUT", "--out", "OUT", "--epochs", "0"], "'0': give a positive number"),
    ],
)
@pytest.mark.slow
def test_a_wrong_option_says_what_is_right(arguments: list[str], message: str, tmp_path: Path) -> None:
    given = [str(tmp_path) if part == "OUT" else part for part in arguments]
    done = run(*given)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_a_draft_is_improved_on_text_that_the_target_generates(
    data: Path, trained: Path, tmp_path: Path
) -> None:
    options = [
        "--text",
        data.parent / "python3.99",
        "--packages",
        0,
        "--device",
        "cpu",
        "--seconds",
        200,
        "--steps",
        4,
    ]
    sizes = ["--batch-tokens", 96, "--row", 48, "--generated", 8, "--held", 8, "--sequence", 64]
    done = run("improve", "--models", trained, "--out", tmp_path, "--layers", 3, *options, *sizes)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "tokens per step" in done.stdout
    record = json.loads((tmp_path / "draft" / "training.json").read_text())
    before, after = (record["acceptance"][when] for when in ("before", "after"))
    assert after["greedy"] + after["sampled"] >= before["greedy"] + before["sampled"] > 0
    assert [phase["steps"] for phase in record["phases"]] == [40, 40, 4]
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "## Acceptance" in card
    assert "Held-out loss" not in card
    assert f"{record['weights']:,} weights" in card
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert model.config.num_hidden_layers == 3
    for wrong, message in ((["--layers", 1], "the draft has 2 layers"), (["--seconds", -1], "positive")):
        done = run("improve", "--models", trained, "--out", tmp_path, *options, *sizes, *wrong)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    done = run("improve", "--models", tmp_path, "--out", tmp_path)
    assert (done.returncode, "has no model.safetensors" in done.stderr) == (2, True), done.stderr


def test_layers_that_are_added_to_a_draft_do_not_change_its_output() -> None:
    torch.manual_seed(0)
    model = models.build("draft", 700, tiny=True)
    grown = distillation.grow(model, 3)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(grown(input_ids=ids).logits, model(input_ids=ids).logits)
    assert grown.config.num_hidden_layers == 3
    assert distillation.grow(model, 2) is model


def test_acceptance_of_a_draft() -> None:
    torch.manual_seed(0)
    target = models.build("draft", 700, tiny=True)
    heat = torch.tensor([0.0, 1.0])
    rows = distillation.generate(target, torch.tensor([[5, 6, 7], [8, 9, 10]]), 20, heat)
    again = distillation.generate(target, torch.tensor([[5, 6, 7], [8, 9, 10]]), 20, heat)
    assert rows.shape == (2, 20)
    assert torch.equal(rows[0], again[0])  # greedy
    found = distillation.acceptance(target, target, rows, 3, heat == 0)
    assert found["greedy"] == 1.0
    assert abs(found["sampled"] - 1.0) < 1e-5
    assert found["tokens"] == 17 / 4  # 17 tokens in steps of 5, 5, 5 and 2
    assert distillation.tokens_per_step([[True, True, False, True, False, False]]) == 2.0
    other = models.build("draft", 700, tiny=True)
    assert distillation.acceptance(other, target, rows, 3, heat == 0)["sampled"] < 1.0
    logits = torch.randn(4, 700)
    assert distillation.loss_of(logits, logits) < distillation.loss_of(-logits, logits)
