"""`kvloom bench encoding` compares an encode worker and another worker with two workers that encode images themselves.

A router sends the same load to both fleets, in turns: text streams, and chats with one new image each. The benchmark
measures the time between the tokens of the streams, and the time to first token of the chats. The model is a LLaVA with
random weights, made for the benchmark. All workers are `kvloom serve` processes on loopback, with one thread each. With
`--pin`, every worker of a fleet has a separate core, if there are enough cores.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.arguments import whole

from .fleet import free_port, ready, start_router, start_workers, token_times

__all__ = ["main"]

NAME = "bench-llava"
STREAM_TOKENS = 400
SETTLE_SECONDS = 2.0
"""Seconds to wait after the start of the streams, so that all of them get their first tokens."""
REPORT_SECONDS = 2.0
"""Seconds to wait until workers have reported their last counters."""
TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvloom bench encoding", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--images", type=whole(1), default=8, metavar="N", help="images in a turn (default: 8)")
    add("--concurrency", type=whole(1), default=2, metavar="N", help="images at once (default: 2)")
    add("--streams", type=whole(1), default=2, metavar="N", help="text streams (default: 2)")
    add("--turns", type=whole(1), default=3, metavar="N", help="turns of each fleet (default: 3)")
    layers = "layers of the image encoder (default: 6)"
    add("--layers", type=whole(2), default=6, metavar="N", help=layers)
    side = "width and height of an image in pixels, a multiple of 14 (default: 224)"
    add("--pixels", type=whole(14), default=224, metavar="N", help=side)
    add("--pin", action="store_true", help="give every worker of a fleet a core of its own")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.pixels % 14:
        raise ValueError(f"--pixels {args.pixels} is not a multiple of 14")
    found = asyncio.run(_run(args))
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for name in ("mixed", "split"):
        one = found[name]
        print(
            f"{name:6} time between tokens: mean {one['mean_tbt_ms']:.1f} ms, p50 {one['p50_tbt_ms']:.1f} ms, "
            f"p99 {one['p99_tbt_ms']:.1f} ms, longest {one['max_tbt_ms']:.1f} ms ({one['tokens']} tokens); "
            f"images: TTFT mean {one['mean_ttft_ms']:.0f} ms, {one['images_per_second']:.1f} a second"
        )
    print(f"p99 time between tokens, mixed / split: {found['p99_ratio']:.1f}")
    print(
        f"encode worker: {found['encoded_images']} images, {found['encode_ms']:.0f} ms each; {found['fallbacks']} fallbacks"
    )
    return 0


def _make_model(folder: Path, layers: int, pixels: int) -> Path:
    """Write a LLaVA with random weights, a byte-level tokenizer and a processor, and return its folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: i + 3 for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(models.BPE({**letters, **special}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    config = transformers.LlavaConfig(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 4096,
        },
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers,
            "num_attention_heads": 8, "image_size": pixels, "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    torch.manual_seed(0)
    path = folder / NAME
    transformers.LlavaForConditionalGeneration(config).save_pretrained(path)
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(
            size={"shortest_edge": pixels}, crop_size={"height": pixels, "width": pixels}
        ),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = _make_model(Path(folder), args.layers, args.pixels)
        port = free_port()
        share, ask = f"host:64MiB?share={port}", f"peer://127.0.0.1:{port}"
        roles = ["--encoder", ask], ["--role", "encode", "--tier", share]
        mixed, split = (
            start_workers(
                stack, str(model), [["--dtype", "float32", *more] for more in fleet], "64MiB", args.pin
            )
            for fleet in (([], []), roles)
        )
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            for url in (*mixed, *split):
                await ready(session, f"{url}/health", 300)
            loads = {}
            for name, urls in (("mixed", mixed), ("split", split)):
                loads[name] = _Load(session, await start_router(session, stack, urls))
            for turn in range(-1, args.turns):  # the first turn warms up
                for load in loads.values():
                    await load.turn(args, turn)
            await asyncio.sleep(REPORT_SECONDS)
            encoder, worker = await _counters(session, split[1]), await _counters(session, split[0])
    found: dict[str, Any] = {name: load.summary() for name, load in loads.items()}
    images = encoder["kvloom_encoder_images_total"]
    return {
        **found,
        "p99_ratio": found["mixed"]["p99_tbt_ms"] / found["split"]["p99_tbt_ms"],
        "encoded_images": int(images),
        "encode_ms": 1e3 * encoder["kvloom_encoder_seconds_total"] / max(1.0, images),
        "fallbacks": int(worker["kvloom_image_fallbacks_total"]),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


async def _counters(session: Any, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


@dataclass(slots=True)
class _Load:
    """The streams and images of one fleet, and the measured times."""

    session: Any
    url: str
    gaps: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    seconds: float = 0.0

    async def turn(self, args: argparse.Namespace, number: int) -> None:
        """Run the load once on this fleet: text streams, and chats with images. The turn with the number -1 warms up
        and is not measured."""
        arrivals: list[list[float]] = []
        streams = [
            asyncio.create_task(self._keep_streaming(f"{number} {i} ", arrivals)) for i in range(args.streams)
        ]
        rng = np.random.default_rng(1000 + number)
        pictures = [_picture(rng, args.pixels) for _ in range(args.images)]
        places = asyncio.Semaphore(args.concurrency)
        ttfts: list[float] = []

        async def one(url: str) -> None:
            async with places:
                content = [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "What is it?"},
                ]
                began = time.perf_counter()
                times: list[float] = []
                await self._stream(
                    "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}, 4, times
                )
                ttfts.append(times[0] - began)

        try:
            await asyncio.sleep(SETTLE_SECONDS)
            began = time.perf_counter()
            await asyncio.gather(*map(one, pictures))
            ended = time.perf_counter()
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        if number >= 0:
            self.gaps += [b - a for times in arrivals for a, b in pairwise(times) if began < b <= ended]
            self.ttfts += ttfts
            self.seconds += ended - began

    async def _keep_streaming(self, prompt: str, arrivals: list[list[float]]) -> None:
        """Stream one answer after another, until the task is cancelled."""
        while True:
            arrivals.append([])
            await self._stream("/v1/completions", {"prompt": prompt}, STREAM_TOKENS, arrivals[-1])

    async def _stream(self, path: str, body: dict[str, Any], max_tokens: int, times: list[float]) -> None:
        """Stream an answer, and append the times of its tokens to `times`."""
        body = {
            **body,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with self.session.post(self.url + path, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                    times.append(time.perf_counter())

    def summary(self) -> dict[str, Any]:
        """Return statistics of all measured turns."""
        if not self.gaps:
            raise RuntimeError("the streams had no tokens while images were encoded: use more images")
        return token_times(self.gaps, self.ttfts) | {"images_per_second": len(self.ttfts) / self.seconds}


def _picture(rng: np.random.Generator, pixels: int) -> str:
    """Return an image of noise as a data URL."""
    from PIL import Image

    target = BytesIO()
    Image.fromarray(rng.integers(0, 255, (pixels, pixels, 3), dtype=np.uint8)).save(target, "PNG")
    return f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"
