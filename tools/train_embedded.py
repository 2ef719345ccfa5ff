"""Make the embedded models: `gather` the text, then `train` the three models, each within a number of seconds.

    python tools/train_embedded.py gather --out data                 # the running Python's standard library
    python tools/train_embedded.py gather --out data LIB... MANUAL…  # others beside it, the best first
    python tools/train_embedded.py train --data data --out models --seconds llama=240 hybrid=300 draft=90 distil=90
    python tools/train_embedded.py improve --out models --seconds 200   # only the draft, from the models in the package

Needs torch, transformers, tokenizers and numpy, and no network. The models train at the same time, a process each; the draft
then learns the finished Llama's distributions. A process that is stopped (SIGTERM) saves what it has. `improve` continues
the training of a draft on text that the Llama generates, and saves the draft with the best acceptance.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np

__all__ = ["main"]

SECONDS = {"llama": 240.0, "hybrid": 300.0, "draft": 90.0, "distil": 90.0}
EPOCHS = {"llama": 14.0, "hybrid": 14.0, "draft": 30.0, "distil": 30.0}
PACKAGED = Path(__file__).resolve().parents[1] / "src" / "kvloom" / "models" / "embedded"
MEASURED = {
    "heapq", "bisect", "shlex", "string", "textwrap", "difflib", "calendar", "fnmatch", "glob", "queue", "sched",
    "copy", "pprint", "stat", "csv", "shutil",
}  # fmt: skip
"""Modules whose beginnings are the prompts of `kvloom bench speculation`. `improve` does not learn from them."""
RATES = {"llama": 2.5e-3, "hybrid": 2e-3, "draft": 4e-3, "distil": 2e-3}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(
            {"gather": _gather, "train": _train, "improve": _improve, "one": _one}[options.command](options)
        )
    except (OSError, ValueError) as error:
        print(f"train_embedded: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    gather = commands.add_parser("gather", help="read text, train the tokenizer, write tokens")
    gather.add_argument(
        "folders", nargs="*", type=Path, help="standard libraries and manuals; default: this Python's"
    )
    gather.add_argument("--out", type=Path, required=True)
    gather.add_argument("--vocabulary", type=int, default=4096)
    train = commands.add_parser("train", help="train the models")
    train.add_argument("--data", type=Path, required=True, help="the folder that gather wrote")
    train.add_argument("--out", type=Path, required=True, help="a folder for each model is made in it")
    train.add_argument("--pack", type=Path, help="also write NAME.tar.gz of each model to this folder")
    train.add_argument("--models", nargs="+", choices=list(SECONDS), default=list(SECONDS))
    train.add_argument("--seconds", nargs="+", default=[], help="a number for all, or NAME=NUMBER")
    train.add_argument(
        "--epochs", nargs="+", default=[], help="at most so many; a number for all, or NAME=NUMBER"
    )
    train.add_argument("--steps", type=int, default=0, help="at most so many")
    train.add_argument("--batch-tokens", type=int, default=65_536)
    train.add_argument("--sequence", type=int, default=4096)
    train.add_argument(
        "--measure-every", type=float, default=20.0, help="seconds between looks at held-out text"
    )
    train.add_argument("--held-tokens", type=int, default=0, help="of each kind of held-out text; 0: all")
    train.add_argument("--device", help="default: cuda if there is one")
    train.add_argument("--compile", action="store_true", help="torch.compile: a minute to start, then faster")
    train.add_argument(
        "--tiny", action="store_true", help="models of a fraction of the size, to try this out"
    )
    improve = commands.add_parser("improve", help="continue the training of the draft")
    improve.add_argument(
        "--models", type=Path, default=PACKAGED, help="has llama/ and draft/; default: the package's"
    )
    improve.add_argument("--out", type=Path, required=True, help="gets the folder draft/")
    improve.add_argument(
        "--seconds", type=float, default=200.0, help="of training; reading the text is not counted"
    )
    improve.add_argument("--steps", type=int, default=0, help="at most so many")
    improve.add_argument("--layers", type=int, default=2, help="layers of the new draft (default: 2)")
    improve.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    improve.add_argument("--text", nargs="*", type=Path, help="standard libraries; default: this Python's")
    improve.add_argument(
        "--packages", type=int, default=16, metavar="MB", help="of installed packages; default: 16"
    )
    improve.add_argument("--batch-tokens", type=int, default=49_152)
    improve.add_argument("--row", type=int, default=768, help="tokens of a generated row")
    improve.add_argument("--generated", type=int, default=2048, help="rows that the Llama generates at once")
    improve.add_argument("--held", type=int, default=256, help="held-out prompts that are measured")
    improve.add_argument("--sequence", type=int, default=4096, help="tokens of a row of the corpus")
    improve.add_argument("--measure-every", type=float, default=10.0, help="seconds between measurements")
    improve.add_argument("--seed", type=int, default=0)
    improve.add_argument("--device", help="default: cuda if there is one")
    one = commands.add_parser("one", help="one model by a plan in JSON; `train` calls this")
    one.add_argument("plan")
    return parser


def _gather(options: argparse.Namespace) -> int:
    from embedded import corpus, tokens

    folders = options.folders or [corpus.stdlib()]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise ValueError(f"no such folder: {', '.join(missing)}")
    if not 512 <= options.vocabulary <= 65_536:
        raise ValueError(
            f"a vocabulary of {options.vocabulary} is not within 512 and 65536 (tokens are kept in 16 bits)"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    documents = corpus.gather(folders)
    tokenizer = tokens.train_tokenizer(documents, options.vocabulary, options.out / "tokenizer")
    about = tokens.write(documents, tokenizer, options.out, [_version(folder) for folder in folders])
    print(json.dumps(about, indent=2))
    return 0


def _version(folder: Path) -> str:
    """What a folder is called in the model card: the version of Python, not where it lay."""
    names = [part for part in folder.resolve().parts if part.startswith("python3.")]
    called = "Python " + names[-1].removeprefix("python") if names else folder.name
    return called + (" documentation" if any(folder.rglob("*.rst*")) else "")


def _train(options: argparse.Namespace) -> int:
    from embedded import folders, processes
    from embedded.models import NAMES
    from embedded.training import Plan

    seconds = _numbers(options.seconds, SECONDS, "--seconds")
    epochs = _numbers(options.epochs, EPOCHS, "--epochs")
    device = options.device or _device()

    def plan(name: str) -> Plan:
        model = "draft" if name == "distil" else name
        return Plan(
            name=model,
            data=str(options.data),
            folder=str(options.out / model),
            seconds=seconds[name],
            rate=RATES[name],
            epochs=epochs[name],
            steps=options.steps,
            batch_tokens=options.batch_tokens,
            sequence=options.sequence,
            measure_every=options.measure_every,
            held_tokens=options.held_tokens,
            device=device,
            compiled=options.compile,
            tiny=options.tiny,
            teacher=str(options.out / "llama") if name == "distil" else "",
        )

    began = time.monotonic()
    failed = processes.run({name: plan(name) for name in options.models}, {"distil": {"llama", "draft"}})
    for name in NAMES:
        if options.pack and (options.out / name / "model.safetensors").exists():
            packed = folders.pack(options.out / name, options.pack)
            print(f"{packed}: {packed.stat().st_size:,} bytes", flush=True)
    print(f"{time.monotonic() - began:.0f} s; failed: {', '.join(sorted(failed)) or 'none'}", flush=True)
    return 1 if failed else 0


def _improve(options: argparse.Namespace) -> int:
    import torch
    import transformers

    from embedded import corpus, tokens
    from embedded.distillation import Distillation, distil

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("llama", "draft"):
        if not (options.models / name / "model.safetensors").exists():
            raise ValueError(
                f"{options.models / name} has no model.safetensors: give --models, a folder of both models"
            )
    if options.seconds <= 0:
        raise ValueError(f"--seconds {options.seconds:g}: give a positive number")
    began = time.monotonic()
    folders = options.text or [corpus.stdlib()]
    documents = corpus.gather(folders)
    sources = [_version(folder) for folder in options.text or []] or [f"Python 3.{sys.version_info.minor}"]
    if options.packages:
        documents += corpus.sample(corpus.packages(), options.packages * 1_000_000)
        sources.append(f"{options.packages} MB of installed Python packages")
    held_out = [doc.held_out or doc.path.removesuffix(".py") in MEASURED for doc in documents]
    ids = tokens.encode(documents, tokens.load_tokenizer(options.models / "draft"))
    start = options.row // 3
    text = np.concatenate([one for one, held in zip(ids, held_out, strict=True) if not held])
    prompts = [
        one[at : at + start]
        for one, held in zip(ids, held_out, strict=True)
        if held
        for at in range(0, len(one) - start, 4 * start)
    ]
    random.Random(options.seed).shuffle(prompts)
    if len(prompts) < 2:
        raise ValueError(
            f"the text has {len(prompts)} held-out prompts, and 2 are needed: give more text with --text"
        )
    print(
        f"{len(text):,} tokens, {len(prompts):,} held-out prompts, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    plan = Distillation(
        models=str(options.models), out=str(options.out), seconds=options.seconds, layers=options.layers,
        steps=options.steps, rate=options.rate, batch_tokens=options.batch_tokens, row=options.row,
        generated=options.generated, held=options.held, sequence=options.sequence,
        measure_every=options.measure_every, device=options.device or _device(), seed=options.seed,
    )  # fmt: skip
    distil(
        plan,
        torch.from_numpy(text.astype(np.int32)),
        torch.from_numpy(np.stack(prompts[: options.held]).astype(np.int64)),
        sources,
    )
    return 0


def _one(options: argparse.Namespace) -> int:
    import transformers

    from embedded.training import Plan, train

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return 0 if train(Plan(**json.loads(options.plan)))["finished"] else 1


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _numbers(given: list[str], defaults: dict[str, float], option: str) -> dict[str, float]:
    """`defaults` with what was given: one number for all, or NAME=NUMBER."""
    found = dict(defaults)
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if value <= 0 or (name and name not in defaults):
            raise ValueError(
                f"{option} {text!r}: give a positive number, or NAME=NUMBER of {', '.join(defaults)}"
            )
        found.update(dict.fromkeys([name] if name else defaults, value))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
