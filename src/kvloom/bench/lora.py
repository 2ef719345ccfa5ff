"""`kvloom bench lora` measures tokens per second with and without LoRA adapters in one run, and their ratios.

Four engines on the same weights alternate, so that a disturbance of the machine affects all of them:

| case     | engine             | requests                                   |
|----------|--------------------|--------------------------------------------|
| base     | without adapters   | base model                                 |
| slots    | with adapters      | base model                                 |
| one      | with adapters      | all with the same adapter                  |
| mixed    | with adapters      | base model and all adapters, in turn       |

Adapters have random weights for all linear layers that an adapter may target. `prompt` is the number of prompt tokens
per second, and `decode` the number of output tokens per second.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvloom.arguments import Parser, parse_size, whole

__all__ = ["main"]

CASES = ("base", "slots", "one", "mixed")


@dataclass(frozen=True, slots=True)
class Row:
    """One case and number of streams: tokens per second, and their ratios to the case "base"."""

    case: str
    streams: int
    prompt: float
    decode: float
    prompt_ratio: float
    decode_ratio: float


def write_adapter(folder: Path, model: Any, rank: int, seed: int) -> Path:
    """Write an adapter with small random weights for the linear layers of a model's decoder, and return its folder."""
    import torch
    from safetensors.torch import save_file
    from torch import nn

    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in model.get_decoder().named_modules():
        if type(layer) is nn.Linear and "experts" not in name and not name.endswith("kv_b_proj"):
            for which, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
                tensor = 0.01 * torch.randn(shape, generator=draw)
                tensors[f"base_model.model.{name}.lora_{which}.weight"] = tensor.to(layer.weight.dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    )
    return folder


def generate(
    engine: Any, asked: Sequence[Sequence[int]], names: Sequence[str | None], tokens: int
) -> tuple[float, float]:
    """Run prompts together. Return two rates: prompt tokens per second until all requests have a first token, and
    output tokens per second from then until the first request finishes."""
    from kvloom.core import CacheControl
    from kvloom.engine import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    control = CacheControl(store=False, read=False)
    requests = [engine.add(ids, params, control, lora=name) for ids, name in zip(asked, names, strict=True)]
    started = time.perf_counter()
    while not all(one.output_count for one in requests):
        engine.step()
    first = time.perf_counter()
    before = sum(one.output_count for one in requests)
    while not any(one.finish_reason for one in requests):
        engine.step()
    done = time.perf_counter()
    decoded = sum(one.output_count for one in requests) - before
    engine.run()
    return sum(map(len, asked)) / (first - started), decoded / (done - first)


def measure(args: Any) -> list[Row]:
    """Return one row per case and number of streams."""
    import copy

    import torch

    from kvloom.bench.shapes import SHAPES, build, hf_config
    from kvloom.engine import Engine, EngineConfig

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = hf_config(args.shape)
    model = build(config, SHAPES[args.shape].dtype, device)
    rng, most = random.Random(0), max(args.batches)
    prompts = [[rng.randrange(10, config.vocab_size) for _ in range(args.prompt)] for _ in range(most)]
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            f"a{i}": str(write_adapter(Path(folder) / f"a{i}", model, args.rank, i))
            for i in range(args.adapters)
        }
        engines = []
        for lora in ({}, paths):
            settings = EngineConfig(pool_bytes=args.pool, max_running=most, lora=lora)
            own = model if lora or device != "cpu" else copy.deepcopy(model)
            engines.append(Engine(own, settings))
            engines[-1].prepare()
    names: list[str | None] = [None, *paths]
    given: dict[str, list[str | None]] = {
        "base": [None] * most,
        "slots": [None] * most,
        "one": ["a0"] * most,
        "mixed": [names[i % len(names)] for i in range(most)],
    }
    rows = []
    for streams in args.batches:
        rates: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
        for turn in range(args.rounds + 1):
            for case in CASES if turn % 2 else reversed(CASES):
                engine = engines[case != "base"]
                found = generate(engine, prompts[:streams], given[case][:streams], args.tokens)
                if turn:  # the first round warms up
                    rates[case].append(found)
        for case in CASES:
            prompt, decode = (statistics.median(one[i] for one in rates[case]) for i in (0, 1))
            ratios = [
                statistics.median(
                    mine[i] / base[i] for mine, base in zip(rates[case], rates["base"], strict=True)
                )
                for i in (0, 1)
            ]
            rows.append(
                Row(case, streams, round(prompt, 1), round(decode, 1), *(round(r, 3) for r in ratios))
            )
            show(rows[-1], args.json)
    for engine in engines:
        engine.close()
    return rows


def show(row: Row, as_json: bool) -> None:
    """Print one line of the report."""
    if as_json:
        print(json.dumps(asdict(row)), flush=True)
        return
    print(
        f"{row.case:6} {row.streams:4} streams  prompt {row.prompt:10.1f} tokens/s ({row.prompt_ratio:.3f} of base)  "
        f"decode {row.decode:9.1f} tokens/s ({row.decode_ratio:.3f} of base)",
        flush=True,
    )


def _parser() -> Parser:
    parser = Parser("kvloom bench lora", description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--shape", default="tiny", metavar="SHAPE", help="a model of `kvloom bench engine` (default: tiny)")
    add("--adapters", type=whole(1, 64), default=3, metavar="N", help="number of adapters (default: 3)")
    add("--rank", type=whole(1, 512), default=16, metavar="N", help="rank of the adapters (default: 16)")
    add("--prompt", type=whole(1), default=128, metavar="N", help="prompt tokens of a request (default: 128)")
    add("--tokens", type=whole(2), default=64, metavar="N", help="output tokens of a request (default: 64)")
    add("--rounds", type=whole(1), default=3, metavar="N", help="measured rounds (default: 3)")
    add(
        "--batches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 32],
        metavar="N,…",
        help="numbers of streams (default: 1,8,32)",
    )
    add(
        "--pool",
        type=parse_size,
        default="256MiB",
        metavar="SIZE",
        help="memory of each pool (default: 256MiB)",
    )
    add("--device", metavar="D", help="cpu, cuda or cuda:N")
    add("--json", action="store_true", help="print JSON lines")
    return parser


def main(argv: list[str]) -> int:
    """Print one line per case and number of streams, or JSON lines."""
    measure(_parser().parse_args(argv))
    sys.stdout.flush()
    return 0
