"""`kvloom generate`: generates text for prompts on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom.arguments import MODEL, elapsed, number, token_ids, whole

from .audio_clips import wav_seconds
from .options import add_engine_arguments, engine_settings

if TYPE_CHECKING:
    from .llm import LLM
    from .sampling import SamplingParams

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("prompts", nargs="*", metavar="PROMPT", help="prompt texts; - reads one from standard input")
    add(
        "--tokens",
        action="append",
        default=[],
        metavar="IDS",
        help='a prompt as token ids, "5 6 7"; repeatable',
    )
    image = "image of a vision model, for the next placeholder (such as <image>) in every prompt; repeatable"
    add("--image", action="append", default=[], metavar="FILE", help=image)
    audio = (
        "WAV file of an audio model, for the next placeholder (such as <|AUDIO|>) in every prompt; repeatable"
    )
    add("--audio", action="append", default=[], metavar="FILE", help=audio)
    add(
        "--max-tokens",
        type=whole(1),
        default=64,
        metavar="N",
        help="largest number of new tokens (default: 64)",
    )
    add(
        "--temperature",
        type=number(0),
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 selects the most likely token (default: 0)",
    )
    add(
        "--top-p",
        type=number(0, 1, above=True),
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens of total probability P (default: 1)",
    )
    add("--seed", type=int, metavar="N", help="seed of sampling: the same seed gives the same tokens")
    add("--n", type=whole(1), default=1, metavar="N", help="samples of each prompt (default: 1)")
    add("--best-of", type=whole(1), metavar="N", help="compute N samples, and print the best --n of them")
    beams = "search with N beams instead of sampling, and print the best --n of them"
    add("--beam-width", type=whole(1), default=1, metavar="N", help=beams)
    penalty = "above 0 prefers long beams, below 0 short ones (default: 1)"
    add("--length-penalty", type=float, default=1.0, metavar="P", help=penalty)
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop at this text; repeatable",
    )
    add(
        "--logprobs",
        type=whole(0),
        metavar="N",
        help="print log-probabilities, also of the N most likely tokens; implies --json",
    )
    add(
        "--prompt-logprobs",
        type=whole(0),
        metavar="N",
        help="print log-probabilities of the prompt's tokens; implies --json",
    )
    add(
        "--json-schema",
        metavar="SCHEMA",
        help="generate JSON that matches this schema (JSON text, or the name of a file)",
    )
    add("--adapter", metavar="NAME", help="LoRA adapter of --lora for the prompts (default: the only --lora)")
    add("--stream", action="store_true", help="print text as it is generated (one prompt, one sample)")
    add("--json", action="store_true", help="print results as JSON")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Return the exit status."""
    from kvloom.models.specs import folder_of

    from .config import engine_config
    from .preflight import check_engine
    from .sampling import SamplingParams

    prompts: list[Any] = [*_texts(args.prompts), *map(token_ids, args.tokens)]
    if not prompts:
        raise ValueError("there is no prompt: give a PROMPT or --tokens; - reads standard input")
    if args.image or args.audio:
        images, audio = [_image(name) for name in args.image], [_audio(name) for name in args.audio]
        prompts = [{"prompt": prompt, "images": images, "audio": audio} for prompt in prompts]
    args.json |= args.logprobs is not None or args.prompt_logprobs is not None
    samples = max(args.n, args.best_of or 1, args.beam_width)
    if args.stream and (len(prompts) > 1 or samples > 1 or args.json):
        raise ValueError(
            "--stream needs one prompt and one sample, without --json, --logprobs or --prompt-logprobs"
        )
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        n=args.n,
        best_of=args.best_of,
        beam_width=args.beam_width,
        length_penalty=args.length_penalty,
        stop=args.stop,
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
        json_schema=_schema(args.json_schema),
    )
    settings = engine_settings(args)
    check_engine(
        folder_of(args.model),
        engine_config(**settings),
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
    )
    with elapsed("loading torch", sys.stderr.isatty()):
        from .llm import LLM

    llm = LLM(
        args.model,
        dtype=args.dtype,
        device=args.device,
        load_format=args.load_format,
        threads=args.threads,
        progress=sys.stderr.isatty(),
        **settings,
    )
    try:
        return _generate(args, llm, prompts, params)
    finally:
        llm.close()


def _generate(args: argparse.Namespace, llm: LLM, prompts: list[Any], params: SamplingParams) -> int:
    """Generate and print the results. Return the exit status."""
    from dataclasses import asdict

    def shown(text: str, token_ids: list[int]) -> str:
        return text if llm.tokenizer is not None else " ".join(map(str, token_ids))

    names = [text.partition("=")[0] for text in args.lora]
    adapter = args.adapter or (names[0] if len(names) == 1 else None)
    if args.stream:
        for delta in llm.stream(prompts, params, lora=adapter):
            print(
                shown(delta.text, delta.token_ids), end="" if llm.tokenizer is not None else " ", flush=True
            )
        print()
        return 0
    results = llm.generate(prompts, params, progress=sys.stderr.isatty(), lora=adapter)
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return 0
    for result in results:
        for done in result.outputs:
            print(shown(done.text, done.token_ids))
    return 0


def _texts(given: list[str]) -> list[str]:
    """Return prompt texts. `-` stands for the text of standard input, without its last line end."""
    if given.count("-") > 1:
        raise ValueError("- is given twice: standard input is one prompt")
    texts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in given]
    if "-" in given and not texts[given.index("-")]:
        raise ValueError("standard input is empty: write a prompt to it")
    return texts


def _image(name: str) -> Any:
    """Return the pixels of an image file as RGB, upright. Raises ValueError if the file is not an image."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError("--image needs Pillow: pip install 'kvloom[vision]'") from None
    try:
        with Image.open(name) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"--image {name}: cannot read an image: {error}") from None


def _audio(name: str) -> bytes:
    """Return the bytes of a WAV file. Raises ValueError if the file cannot be decoded."""
    try:
        data = Path(name).read_bytes()
        wav_seconds(data)
    except (OSError, ValueError) as error:
        raise ValueError(f"--audio {name}: {error}") from None
    return data


def _schema(given: str | None) -> str | None:
    """Return a JSON schema, which is given as text or as the name of a file."""
    if given is None or given.lstrip().startswith(("{", "true", "false")):
        return given
    return Path(given).read_text(encoding="utf-8")
