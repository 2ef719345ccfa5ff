"""The engine benchmark: its workloads, floors and memory figures are what they say, and both engines answer alike."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvloom import cli
from kvloom.bench import engine, engine_report
from kvloom.bench.engine_peers import HuggingFace, NotInstalledError, Vllm
from kvloom.bench.engine_runners import Measurement, Options
from kvloom.bench.pool_usage import capacity, waste
from kvloom.bench.roofline import FLOP_RATE, READ_RATE, ForwardPass, Roofline, tokens_read
from kvloom.bench.shapes import SHAPES, build, hf_config
from kvloom.bench.workloads import WORKLOADS, Conversation, Workload, select_workloads
from kvloom.core import KVCache, LayerSpec, PoolLayout, Visibility, attention_fields
from kvloom.models.specs import load_spec

BY_NAME = {work.name: work for work in WORKLOADS}


# -- workloads ------------------------------------------------------------------------------------


def test_the_workloads_are_the_published_ones() -> None:
    assert [work.size for work in WORKLOADS] == [
        "256 x (128 in, 512 out)",
        "512 x (1024 in, 128 out)",
        "512 x (4096 + 64 in, 64 out)",
        "512 x (4096 + 64 in, 64 out)",
        "16 x (16384 in, 128 out)",
        "1 x (512 in, 256 out)",
        "64 x (1024 in, 64 out, 6 turns of 448 more)",
        "1 x (130816 in, 256 out)",
    ]
    assert [work.output_tokens for work in select_workloads(["W1", "W6"])] == [256 * 512, 64 * 6 * 64]
    assert BY_NAME["W6"].longest == 1024 + 6 * 64 + 5 * 448
    assert all(
        work.name in quoted for quoted in engine_report.QUOTED.values() for work in select_workloads(None)
    )
    assert BY_NAME["W7"].longest == hf_config("llama-3.1-8b").max_position_embeddings


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.name)
def test_a_draw_has_its_size_and_is_reproducible(work: Workload) -> None:
    work = work.scaled(1 / 32)
    drawn = work.draw(1000, seed=1, round_=2)
    assert drawn == work.draw(1000, seed=1, round_=2)
    assert len(drawn) == work.requests
    assert {len(each.prompt) for each in drawn} == {work.prefix + work.prompt}
    assert all([len(new) for new in each.later] == [work.more] * (work.turns - 1) for each in drawn)
    assert all(3 <= token < 1000 for each in drawn for token in each.prompt)
    assert len({tuple(each.prompt) for each in drawn}) == work.requests
    others = work.draw(1000, seed=1, round_=3), work.draw(1000, seed=2, round_=2)
    assert all(other[0].prompt[:4] != drawn[0].prompt[:4] for other in others)


def test_a_warm_workload_has_its_rounds_prefixes_and_other_tails() -> None:
    cold, warm = (work.scaled(1 / 16) for work in (BY_NAME["W3"], BY_NAME["W3 warm"]))
    first, again = cold.draw(4096, 0, 1), warm.draw(4096, 0, 1)
    assert [each.prompt[: cold.prefix] for each in first] == [each.prompt[: cold.prefix] for each in again]
    assert all(a.prompt[cold.prefix :] != b.prompt[cold.prefix :] for a, b in zip(first, again, strict=True))
    assert len({tuple(each.prompt[: cold.prefix]) for each in first}) == cold.prefixes == 2


def test_scaling_keeps_a_workloads_character() -> None:
    tiny = {work.name: work.scaled(0.001) for work in WORKLOADS}
    assert (tiny["W1"].requests, tiny["W5"].requests, tiny["W3"].prefixes) == (2, 1, 2)
    assert (tiny["W6"].turns, tiny["W6"].more, tiny["W1"].prefix) == (6, 4, 0)
    assert select_workloads(None) == list(WORKLOADS[:-1])  # the longest runs where it is named
    assert select_workloads(["W7"]) == [BY_NAME["W7"]]
    assert [work.name for work in select_workloads(["W3"])] == ["W3", "W3 warm"]
    for scale in (0, -1, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            BY_NAME["W1"].scaled(scale)
    with pytest.raises(ValueError, match="unknown workload 'W9'; known: W1"):
        select_workloads(["W9"])


# -- shapes and floors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [("llama-3.1-8b", 8030), ("llama-3.2-1b", 1236), ("gemma-3-12b", 11766), ("qwen3-30b-a3b", 30532), ("tiny", 5)],
)  # fmt: skip
def test_shapes_have_the_parameters_of_the_models_they_name(name: str, millions: int) -> None:
    model = build(hf_config(name), SHAPES[name].dtype, "meta")
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e6) == millions


def test_gemma_slides_in_five_layers_of_six() -> None:
    kinds = hf_config("gemma-3-12b").layer_types
    assert (kinds.count("sliding_attention"), kinds.count("full_attention")) == (40, 8)


def test_a_layer_reads_its_visible_tokens_and_a_shared_prefix_once() -> None:
    full, sliding = Visibility("full"), Visibility("sliding", 4)
    assert tokens_read(full, ForwardPass(rows=2, cached=0, new=3)) == (6, 2 * (1 + 2 + 3))
    assert tokens_read(full, ForwardPass(rows=2, cached=10, new=1)) == (22, 22)
    assert tokens_read(sliding, ForwardPass(rows=2, cached=10, new=1)) == (8, 8)
    assert tokens_read(full, ForwardPass(rows=6, cached=10, new=1, prefixes=2, shared=8)) == (
        6 * 3 + 2 * 8,
        66,
    )
    assert tokens_read(sliding, ForwardPass(rows=6, cached=10, new=1, prefixes=2, shared=8)) == (
        6 * 3 + 2 * 1,
        24,
    )


def test_lower_bounds_follow_bytes_and_flops() -> None:
    floor = Roofline(hf_config("llama-3.1-8b"), torch.bfloat16)
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    head = 128256 * 4096
    assert (floor.dense, floor.head) == (matrices, head)
    alone = Workload("", "", 1, 100, 2)  # one decode step, of 101 tokens: by bytes
    moved = (matrices + head) * 2 + 101 * 131072
    assert floor.of(alone).decode == pytest.approx(moved / READ_RATE)
    assert floor.of(alone).decode_bytes == moved
    many = Workload("", "", 1024, 8, 2)  # the products by FLOPs, attention by bytes
    step = 2 * 1024 * (matrices + head) / FLOP_RATE + 1024 * 9 * 131072 / READ_RATE
    assert floor.of(many).decode == pytest.approx(step)
    # What was worked out by hand elsewhere: about 8 ms a step in W1.
    assert floor.of(BY_NAME["W1"]).decode / 511 == pytest.approx(0.008, rel=0.05)
    cold, warm = floor.of(BY_NAME["W3"]), floor.of(BY_NAME["W3 warm"])
    assert warm.prefill < cold.prefill
    assert warm.decode == cold.decode
    assert (
        Roofline(hf_config("llama-3.1-8b"), torch.bfloat16, "fp8").of(alone).decode < floor.of(alone).decode
    )


def test_only_chosen_experts_are_read() -> None:
    floor = Roofline(hf_config("qwen3-30b-a3b"), torch.bfloat16)
    assert floor.experts == 48 * 128 * 3 * 2048 * 768
    alone, many = (floor.of(Workload("", "", rows, 1, 2)).decode for rows in (1, 160))
    weights = (floor.dense + floor.head + floor.experts * 8 / 128) * 2
    assert alone == pytest.approx((weights + 2 * 2048 * 48) / READ_RATE)
    assert many == pytest.approx(sum((floor.dense, floor.head, floor.experts)) * 2 / READ_RATE, rel=0.02)


# -- memory ---------------------------------------------------------------------------------------


def _cache(**spans: Visibility) -> KVCache:
    layers = {name: LayerSpec("token", attention_fields(1, 16, "bf16"), span) for name, span in spans.items()}
    return KVCache(PoolLayout.build(layers), slabs=200, max_sequences=8, max_tokens=1024)


def _computed(cache: KVCache, tokens: Sequence[int]) -> Any:
    prompt = np.array(tokens, dtype=np.int32)
    sequence = cache.open(cache.match(prompt))
    assert not sequence.extend(len(prompt) - sequence.length)
    cache.take_copies()
    sequence.commit(prompt[sequence.length :])
    return sequence


def test_waste_counts_unneeded_tokens_of_pages_in_use() -> None:
    cache = _cache(full=Visibility("full"))
    assert waste(cache) == (0, 0.0)
    _computed(cache, range(17))
    page = cache.layout.groups[0].page_stride
    assert waste(cache) == (2 * page, pytest.approx(15 / 32))
    _computed(cache, [*range(16), *range(100, 108)])  # shares the full block: one page more, half of it empty
    assert waste(cache) == (3 * page, pytest.approx((15 + 8) / 48))
    ahead = _computed(cache, range(200, 216))
    assert not ahead.extend(1)  # a page for a token to come
    assert waste(cache) == (5 * page, pytest.approx((15 + 8 + 16) / 80))


def test_tokens_outside_a_window_are_waste_and_shared_pages_count_once() -> None:
    cache = _cache(sliding=Visibility("sliding", 16))
    _computed(cache, range(40))  # the last query sees 24 to 39: half of block 1, half of block 2
    held, share = waste(cache)
    assert held == 2 * cache.layout.groups[0].page_stride
    assert share == pytest.approx(16 / 32)
    cache = _cache(sliding=Visibility("sliding", 32))
    sequences = [_computed(cache, [*range(32), *range(100 * i, 100 * i + 8)]) for i in (1, 2)]
    assert [sequence.resumed for sequence in sequences] == [0, 32]
    # Both see 8 to 39: they share blocks 0 and 1, and each has a last block of its own.
    assert waste(cache)[1] == pytest.approx((8 + 2 * 8) / 64)


@pytest.mark.parametrize("gib", [40, 97, 100, 111])
def test_gemma_fits_three_times_the_requests_of_uniform_paging(gib: int) -> None:
    found = capacity(load_spec("gemma-3-12b"), 16384, gib << 30)
    assert found.agrees, found
    assert found.ratio >= 3


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-next-80b"])
def test_full_attention_fits_as_many_requests_as_uniform_paging(model: str) -> None:
    found = capacity(load_spec(model), 4096, 20 << 30)
    assert found.agrees, found
    assert found.kvloom == found.uniform > 0


# -- running --------------------------------------------------------------------------------------


def _report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert engine.main([*arguments, "--device", "cpu", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize(
    ("shape", "works"),
    [
        ("tiny", []),
        pytest.param("tiny-sliding", ["W3", "W5"], marks=pytest.mark.slow),
        pytest.param("tiny-hybrid", ["W5", "W6"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_both_engines_give_the_same_answers(
    shape: str, works: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", *works] if works else []
    report = _report(capsys, "--shape", shape, "--peers", "hf", "--scale", "0.015", *only)
    assert {each["error"] for each in report["runners"].values()} == {None}
    assert [row["work"] for row in report["rows"]] == [work.name for work in select_workloads(works)]
    for row in report["rows"]:
        ours, theirs = row["runs"]["kvloom"], row["runs"]["Hugging Face"]
        assert theirs["same_answers"] == 1
        assert row["ratios"]["Hugging Face"] == pytest.approx(theirs["seconds"] / ours["seconds"])
        assert ours["preemptions"] == 0
        assert ours["peak_running"] >= 1
        assert 0 <= ours["waste"] < 1
        assert 0 <= ours["pool_waste"] < 1
        assert "floor_s" not in row  # of an H200 alone
        assert "quoted_s" not in row
        assert ("prefill_tokens_s" in ours) == (row["work"] in ("W1", "W2", "W4", "W5"))
    rates = {row["work"]: row["runs"]["kvloom"]["hit_rate"] for row in report["rows"]}
    assert rates["W5"] == 0
    assert rates.get("W6", 1) > 0.5
    assert rates.get("W3 warm", 1) > 0.9


def test_a_single_prompt_reports_its_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, "--only", "W7", "--peers", "--scale", "0.002")
    (row,) = report["rows"]
    assert row["size"] == "1 x (262 in, 4 out)"
    ours = row["runs"]["kvloom"]
    assert 0 < ours["first_token_s"] < ours["seconds"]
    assert "decode_tb_s" not in ours  # only reported with the floor, which exists for an H200 only


@pytest.mark.slow
def test_rounds_share_no_tokens_and_the_best_counts() -> None:
    class Recorder:
        name, version, notes, start_s = "recorder", "", {}, 0.0

        def __init__(self) -> None:
            self.given: list[tuple[tuple[int, ...], int]] = []

        def run(self, conversations: Sequence[Conversation], output: int) -> Measurement:
            self.given += [(tuple(each.prompt), output) for each in conversations]
            answers = [[[len(self.given)] * output] * (1 + len(each.later)) for each in conversations]
            return Measurement(10.0 - len(self.given), answers)

        def close(self) -> None: ...

    runner, results = Recorder(), dict[str, engine_report.WorkloadResult]()
    pieces = engine.measure(runner, [Workload("W", "", 1, 4, 20)], 1000, 3, 0, results)
    assert len(list(pieces)) == 4  # a warm-up and three rounds, with a pause after each
    assert [output for _, output in runner.given] == [8, 20, 1, 20, 1, 20, 1]  # a warm-up, then each round
    assert len({prompt for prompt, _ in runner.given}) == 7
    assert results["W"].rounds == [8.0, 6.0, 4.0]
    assert (results["W"].seconds, results["W"].prompts) == (4.0, 3.0)
    assert results["W"].first_answers == [[[2] * 20]]
    with pytest.raises(RuntimeError, match="not 20 in 2"):
        engine._check(Workload("W", "", 1, 4, 20, turns=2), Measurement(1.0, [[[1] * 20]]))


@pytest.mark.slow
def test_hugging_face_batches_do_not_change_answers() -> None:
    runner = HuggingFace("tiny", Options())
    prompts = [list(range(3, 3 + size)) for size in (5, 9, 14)]
    alone = [runner._generate([prompt], 4)[0] for prompt in prompts]
    assert runner._generate(prompts, 4) == alone

    class Small(HuggingFace):
        def _generate(self, prompts: list[list[int]], output: int) -> list[list[int]]:
            if len(prompts) > 2:
                raise torch.cuda.OutOfMemoryError("two at most")
            return super()._generate(prompts, output)

    runner = Small("tiny", Options())
    for _ in range(2):
        found = runner.run([Conversation(prompt, []) for prompt in prompts], 4)
        assert [turns[0] for turns in found.answers] == alone
        assert found.figures["peak_running"] == 2


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_peer_is_reported_with_a_remedy() -> None:
    with pytest.raises(
        NotInstalledError, match=r"not installed for .*--vllm-python, or exclude it with --peers hf"
    ):
        Vllm("tiny", Options())


# -- the report -----------------------------------------------------------------------------------


def test_ratios_separate_measured_and_quoted_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = BY_NAME["W5"]
    ours = Measurement(0.5, [[[1, 2]]], {"waste": 0.01, "first_token_s": 0.1})
    theirs = Measurement(1.0, [[[1, 3]]])
    ran = [
        engine_report.RunnerResult(
            "kvloom",
            "x",
            1.0,
            results={"W5": engine_report.WorkloadResult(work, ours, [0.5], ours.answers, prompts=0.1)},
        ),
        engine_report.RunnerResult(
            "vLLM",
            "y",
            2.0,
            results={"W5": engine_report.WorkloadResult(work, theirs, [1.0], theirs.answers)},
        ),
    ]
    least = Roofline(hf_config("llama-3.2-1b"), torch.bfloat16).of(work)
    rows = engine_report.rows_of([work], ran, {"W5": least}, engine_report.QUOTED["llama-3.2-1b"], exact=True)
    ratios = rows[0]["ratios"]
    assert ratios["vLLM"] == 2
    assert ratios["over the floor"] == pytest.approx(0.5 / least.seconds)
    assert ratios[engine_report.QUOTED_AS] == pytest.approx(0.34 / 0.5)
    assert rows[0]["runs"]["vLLM"]["same_answers"] == 0
    assert rows[0]["runs"]["kvloom"]["prefill_tflops"] == pytest.approx(least.prefill_flops / 0.1 / 1e12)
    assert rows[0]["runs"]["kvloom"]["decode_tb_s"] == pytest.approx(least.decode_bytes / 0.4 / 1e12)
    report = {
        "shape": "llama-3.2-1b", "scale": 1, "device": "some H200", "rows": rows, "method": "once",
        "quoted_start_s": 30, "quoted_note": "not of this run",
        "runners": {e.name: {"version": e.version, "start_s": e.start_s, "notes": {}, "error": None} for e in ran},
    }  # fmt: skip
    engine_report.render(report)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 120
    assert "…" not in shown
    assert "preempted" not in shown  # no runner reports it here
    for head in ("output tokens/s", "prefill tokens/s", "same answers"):
        assert head in shown  # in one line
    assert "quoted" in shown
    assert "not of this run" in shown


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvloom.cli", "bench", "engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_command_compares_capacities() -> None:
    done = _command("--shape", "gemma-3-12b", "--capacity", "16384", "--pool", "40GiB", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["kvloom"], found["uniform"], found["planned"], found["agrees"]) == (30, 6, 30, True)
    planned = subprocess.run(
        [sys.executable, "-m", "kvloom.cli", "plan", "gemma-3-12b", "--context", "16384", "--gpu-memory", "40GiB", "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    schemes = json.loads(planned.stdout)["schemes"]
    assert (schemes["kvloom"]["max_requests"], schemes["uniform"]["max_requests"]) == (30, 6)


def test_help_names_workloads_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*SHAPES, *BY_NAME))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scale", "2"], "--scale: 2 is out of range"),
        (["--pool", "much"], "'much' is not understood"),
        (["--capacity", "0"], "--capacity: 0 is out of range"),
        (["--only", "W7", "--scale", "1"], "W7 needs 131,072 tokens, but the limit of tiny is 32,768"),
        (["--capacity", "16", "--kv-dtype", "int3"], "'int3' is not known"),
        (["--kv-dtype", "int3"], "'int3' is not known"),
        (["--tier", "attic:1GiB"], "tier 'attic:1GiB' has no known scheme"),
        (["--vllm-python", "/no/python"], "no interpreter '/no/python'"),
    ],
)
def test_bad_input_is_named_and_returns_two(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "engine", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert not shown.out


def test_runners_alternate() -> None:
    said: list[str] = []

    def run(name: str, pieces: int) -> Iterator[None]:
        for piece in range(pieces):
            said.append(f"{name}{piece}")
            yield

    engine.take_turns([run("a", 2), run("b", 3), run("c", 0)])
    assert said == ["a0", "b0", "a1", "b1", "b2"]
