"""Compare n-gram speculation of kvloom and vLLM on one machine: the same model, prompts, outputs and drafts.

    python tools/compare_speculation.py make FOLDER --shape llama-3.1-8b --requests 32
    python tools/compare_speculation.py run FOLDER --engine kvloom --speculate ngram
    VLLM/python tools/compare_speculation.py run FOLDER --engine vllm --speculate ngram

The weights are random, but the next token depends on the last token only: the last layer has the embeddings, permuted,
and the layers before add little. So every engine must generate the same known tokens, which `run` checks. A prompt
consists of the coming output, cut into segments and shuffled. A draft from the prompt is correct until its segment ends,
so `--segment` (mean length) sets the acceptance of all engines. `run` prints one JSON line for each number
of streams.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIRST_TOKEN = 16
Measured = tuple[float, list[list[int]], dict[str, int]]
"""Seconds, outputs, and counters of drafts since the start."""


def make(folder: Path, shape: str, requests: int, output: int, segment: float, device: str) -> None:
    """Write the model and the prompts."""
    import torch

    from kvloom.bench.shapes import SHAPES, build, hf_config

    config = hf_config(shape)
    if config.tie_word_embeddings:
        raise SystemExit(f"the embeddings of {shape} are tied: use a shape whose embeddings are not")
    model = build(config, SHAPES[shape].dtype, device)
    rng = random.Random(0)
    tokens = list(range(FIRST_TOKEN, config.vocab_size))
    after = dict(zip(tokens, rng.sample(tokens, len(tokens)), strict=True))
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.01)
        embedding, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        torch.manual_seed(0)
        embedding.normal_()
        last.zero_()
        last[torch.tensor(list(after.values()), device=device)] = embedding[
            torch.tensor(list(after), device=device)
        ]
    model.save_pretrained(folder)
    cases = []
    for _ in range(requests):
        chain = [rng.choice(tokens)]
        for _ in range(output):
            chain.append(after[chain[-1]])
        segments, start = [], 1
        while start < len(chain):
            end = start + 2 + int(rng.expovariate(1 / max(1e-9, segment - 2)))
            segments.append(chain[start:end])
            start = end
        rng.shuffle(segments)
        cases.append({"prompt": [*itertools.chain(*segments), chain[0]], "output": chain[1:]})
    (folder / "cases.json").write_text(json.dumps(cases))


def dtype_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["dtype"])


def start_kvloom(
    folder: Path, options: argparse.Namespace, speculate: str
) -> Callable[[list[Any]], Measured]:
    import torch

    from kvloom.core import CacheControl
    from kvloom.engine import Engine, EngineConfig, SamplingParams, default_token_budget
    from kvloom.models.loading import load

    model = load(str(folder), getattr(torch, dtype_of(folder)), options.device)[0]
    settings = EngineConfig(
        pool_bytes=None if options.device.startswith("cuda") else 256 << 20,
        token_budget=default_token_budget(torch.device(options.device)),
        speculate=speculate,
        draft_tokens=None if speculate == "off" else options.draft_tokens or None,
    )
    engine = Engine(model, settings)
    engine.prepare()
    gc.collect()
    gc.freeze()
    totals = {"draft": 0, "accepted": 0}
    alone = CacheControl(store=False, read=False)

    def params(case: Any) -> SamplingParams:
        return SamplingParams(max_tokens=len(case["output"]), temperature=0, ignore_eos=True)

    def run(cases: list[Any]) -> Measured:
        begin = time.perf_counter()
        requests = [engine.add(case["prompt"], params(case), alone) for case in cases]
        engine.run()
        seconds = time.perf_counter() - begin
        totals["draft"] += sum(request.draft_tokens for request in requests)
        totals["accepted"] += sum(request.accepted_tokens for request in requests)
        return seconds, [request.output for request in requests], dict(totals)

    return run


def start_vllm(folder: Path, options: argparse.Namespace, speculate: str) -> Callable[[list[Any]], Measured]:
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {}
    if speculate != "off":
        more["speculative_config"] = {
            "method": speculate,
            "num_speculative_tokens": options.draft_tokens or 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    if not options.device.startswith("cuda"):
        more |= {"enforce_eager": True, "block_size": 32}
    llm = LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=options.max_model_len, enable_prefix_caching=False,
        disable_log_stats=False, dtype=dtype_of(folder), **more,
    )  # fmt: skip

    def count(name: str) -> int:
        return sum(
            int(one.value) for one in llm.get_metrics() if one.name == f"vllm:spec_decode_num_{name}_tokens"
        )

    def run(cases: list[Any]) -> Measured:
        prompts = [{"prompt_token_ids": case["prompt"]} for case in cases]
        params = [
            SamplingParams(temperature=0, max_tokens=len(case["output"]), ignore_eos=True, detokenize=False)
            for case in cases
        ]
        begin = time.perf_counter()
        found = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        outputs = [list(one.outputs[0].token_ids) for one in found]
        return seconds, outputs, {"draft": count("draft"), "accepted": count("accepted")}

    return run


def measure(folder: Path, options: argparse.Namespace, speculate: str) -> None:
    """Run all batch sizes, and print a JSON line for each."""
    cases = json.loads((folder / "cases.json").read_text())
    began = time.perf_counter()
    run = {"kvloom": start_kvloom, "vllm": start_vllm}[options.engine](folder, options, speculate)
    start_s = time.perf_counter() - began
    before = {"draft": 0, "accepted": 0}
    for streams in options.streams:
        asked = cases[:streams]
        best, seconds, same = float("inf"), [], 1.0
        for turn in range(options.rounds + 1):  # the first one warms up
            took, outputs, after = run(asked)
            drafted, accepted = (after[name] - before[name] for name in ("draft", "accepted"))
            before = after
            if turn:
                seconds.append(round(took, 4))
                best = min(best, took)
            right = sum(out == case["output"] for out, case in zip(outputs, asked, strict=True))
            same = min(same, right / len(asked))
        tokens = sum(len(case["output"]) for case in asked)
        line = {
            "engine": options.engine, "speculate": speculate, "streams": len(asked), "tokens_s": round(tokens / best, 1),
            "seconds": seconds, "acceptance": round(accepted / drafted, 3) if drafted else None,
            "tokens_per_verified_row": round(tokens / max(1, tokens - accepted), 3), "as_expected": same,
            "prompt_tokens": sum(len(case["prompt"]) for case in asked), "output_tokens": tokens,
            "start_s": round(start_s, 1),
        }  # fmt: skip
        print("RESULT " + json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("make", help="write the model and the prompts")
    second = commands.add_parser("run", help="run one engine")
    for each in (first, second):
        each.add_argument("folder", type=Path)
        each.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    first.add_argument("--shape", default="llama-3.1-8b", help="a shape of `kvloom bench engine`")
    first.add_argument("--requests", type=int, default=32)
    first.add_argument("--output", type=int, default=512, help="output tokens of a request (default: 512)")
    first.add_argument("--segment", type=float, default=16, help="mean length of a segment (default: 16)")
    add = second.add_argument
    add("--engine", choices=["kvloom", "vllm"], required=True)
    add("--speculate", default="ngram", help="off, ngram; kvloom: suffix, too; vLLM: ngram_gpu, too")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests at a time (default: 1 8 32)")
    add("--draft-tokens", type=int, default=4, help="tokens of a draft; 0: kvloom's own number (default: 4)")
    add("--rounds", type=int, default=2, help="best of so many rounds (default: 2)")
    add("--max-model-len", type=int, default=4096, help="for vLLM (default: 4096)")
    options = parser.parse_args()
    if options.command == "make":
        make(options.folder, options.shape, options.requests, options.output, options.segment, options.device)
        return
    measure(options.folder, options, options.speculate)


if __name__ == "__main__":
    main()
