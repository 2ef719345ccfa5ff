"""The offline API: prompts in, results out, on one engine.

    llm = LLM("path/to/model")
    for result in llm.generate(["Once upon a time"], SamplingParams(temperature=0)):
        print(result.outputs[0].text)
    for delta in llm.stream("Once upon a time"):
        print(delta.text, end="")

Prompts are text or lists of token ids, or {"prompt": text or ids, "images": [...]} where the model sees. The model is a folder (or hub id) or a Hugging Face model that is loaded already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvloom.models.catalog import folder_of
from kvloom.models.load import LoadFormat, device_of, load
from kvloom.models.specs import KVDtype

from .checking import check_engine
from .engine import Engine
from .grammar import GrammarLimits
from .logprobs import TokenLogprobs
from .request import Finish, Request, SamplingParams
from .sizing import long_budget
from .text import Detokenizer
from .threads import use_threads

__all__ = ["LLM", "Completion", "Delta", "Result"]

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt, the `index`th. `text` goes on from the prompt, and is empty where there is no tokenizer.
    `cumulative_logprob` and `logprobs` (one dictionary a token) are None where nothing asked for them; `stop_reason` is the
    stop text or the stop token that ended it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: Finish
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a prompt led to. `num_cached_tokens` of it were found in the cache. `prompt_logprobs` has an entry for each of its
    tokens, None for the first; it is None where nobody asked."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of the `index`th answer to the `prompt`th prompt. Text may lag behind its tokens: characters are whole, and
    what may begin a stop text is held back. `finish_reason` comes with the last."""

    prompt: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: Finish | None = None


class LLM:
    """A model (a folder, a hub id, the name of one that comes along, or a loaded one) and its engine. `pool_bytes` are for the
    cache (without them it takes what the device has left); `dtype` and `device` are the weights'; `kv_dtype` and `kv_scales` say
    how K and V are kept, as the engine takes them. A `processor` is what turns text and images into ids and tensors; that of the
    model's folder is taken when the first image comes.
    `load_format` "random" makes weights of a config; `threads` are torch's on a CPU, for the whole process (threads.py has the
    rule for None); `progress` shows bars while loading and preparing. `batch_invariant`: the same seed, the same tokens and
    log-probabilities on a GPU, whatever runs beside. `tiers` are places for pages below the pool: `["host:64GiB",
    "disk:/path:1TiB"]`; `close` brings them up to date and ends them.
    `max_context` bounds sequences below what the model could do, and `token_budget` the tokens of prompts a step. One grammar may take
    `grammar_seconds` of CPU time to compile, and again for each step, and `grammar_memory` bytes."""

    def __init__(
        self,
        model: Any,
        *,
        pool_bytes: int | None = None,
        kv_dtype: KVDtype | None = None,
        kv_scales: str | os.PathLike[str] = "dynamic",
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        token_budget: int | None = None,
        max_running: int | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        load_format: LoadFormat = "auto",
        threads: int | None = None,
        progress: bool = False,
        batch_invariant: bool = False,
        tiers: Sequence[str] = (),
        max_context: int | None = None,
        grammar_seconds: float = 2.0,
        grammar_memory: int = 256 << 20,
    ) -> None:
        limits = GrammarLimits(grammar_seconds, grammar_memory)
        self.tokenizer, self.processor = tokenizer, processor
        self._folder = folder_of(model) if isinstance(model, str) else None
        if self._folder is not None:
            check_engine(
                self._folder,
                load_format=load_format,
                dtype=str(dtype).removeprefix("torch."),
                kv_dtype=kv_dtype,
                kv_scales=kv_scales,
                pool_bytes=pool_bytes,
                tiers=tiers,
                device=None if device is None else str(device),
            )
            where = device_of(device)
            if dtype == "auto" and where.type == "cpu" and self._folder != model:
                dtype = "float32"  # one that comes along, as `kvloom serve` has it
            model, found = load(self._folder, dtype, where, load_format, progress)
            self.tokenizer = tokenizer or found
        if token_budget is None:
            token_budget = long_budget(next(model.parameters()).device)
        self.engine = Engine(
            model,
            pool_bytes,
            kv_dtype,
            token_budget=token_budget,
            max_running=max_running,
            tokenizer=self.tokenizer,
            kv_scales=kv_scales,
            batch_invariant=batch_invariant,
            tiers=tiers,
            max_context=max_context,
            grammar_limits=limits,
        )
        if threads is not None or self.engine.device.type == "cpu":
            use_threads(threads)
        self._prepare(progress)
        self._names: dict[int, str] = {}

    def _prepare(self, progress: bool) -> None:
        if not progress:
            self.engine.prepare()
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("compiling and capturing", total=None)
            self.engine.prepare(lambda done, total: bar.update(task, completed=done, total=total))

    def close(self) -> None:
        """End what still runs, and the tiers below the pool: what they want is stored first, within seconds."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Result]:
        """Results in the prompts' order. One `params` serves all, or one each. All requests run together; if one of
        them can never run, ValueError is raised and none does."""
        many, requests = self._added(prompts, params)
        try:
            self._run(requests, progress)
        except BaseException:
            self._cancel(requests)
            raise
        return [self._result(prompt, request) for prompt, request in zip(many, requests, strict=True)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """What is new, as it comes; each answer's pieces in order, those of several answers mixed. Nothing is done before the
        first is asked for, and ending the loop early cancels what still runs. Answers that are picked at the end (`best_of`,
        beams) are refused: use `generate`."""
        _, requests = self._added(prompts, params, text=True)
        open_ = [one for request in requests for one in request.family]
        places = {
            id(one): (i, j) for i, request in enumerate(requests) for j, one in enumerate(request.family)
        }
        told = {id(one): 0 for one in open_}
        try:
            while open_:
                self.engine.step()
                for one in open_:
                    count = one.output_count
                    if count > told[id(one)] or one.finish is not None:
                        yield self._delta(one, *places[id(one)], told[id(one)])
                        told[id(one)] = count
                open_ = [one for one in open_ if one.finish is None]
        finally:
            self._cancel(requests)

    def _delta(self, one: Request, prompt: int, index: int, start: int) -> Delta:
        tokens = one.output[start:]
        logprobs = None if one.params.logprobs is None else self._named(one.logprobs[start:])
        text = "" if one.text is None else one.text.take()
        return Delta(prompt, index, text, tokens, logprobs, one.finish)

    def _added(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        text: bool = False,
    ) -> tuple[list[Any], list[Request]]:
        """The prompts as a list, and their requests: all, or none if one is refused."""
        one = isinstance(prompts, str | Mapping) or _is_ids(prompts)
        many: list[Any] = [prompts] if one else list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise ValueError(f"{len(each)} sampling parameters for {len(many)} prompts")
        if text and any(mine is not None and mine.samples > mine.n for mine in each):
            raise ValueError(
                "best_of and beam_width pick answers at the end, so there is nothing to stream: use generate"
            )
        requests: list[Request] = []
        try:
            for prompt, mine in zip(many, each, strict=True):
                told = text and self.tokenizer is not None
                ids, images = self._given(prompt)
                requests.append(self.engine.add(ids, mine, text=told, images=images))
        except BaseException:
            self._cancel(requests)
            raise
        return many, requests

    def _cancel(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request)

    def _run(self, requests: list[Request], progress: bool) -> None:
        if not progress:
            self.engine.run()
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("generating", total=len(requests))
            while self.engine.busy:
                self.engine.step()
                bar.update(task, completed=sum(request.finish is not None for request in requests))

    def _given(self, prompt: Any) -> tuple[list[int], list[Any]]:
        """A prompt's ids and its images, as the engine takes them."""
        if not isinstance(prompt, Mapping):
            return self._ids(prompt), []
        if "prompt" not in prompt or prompt.keys() - {"prompt", "images"}:
            raise ValueError(
                f"a prompt has 'prompt' and may have 'images', not {', '.join(map(repr, prompt))}"
            )
        words, images = prompt["prompt"], list(prompt.get("images") or ())
        if not images or self.engine.vision is None:
            return self._ids(words), images
        if isinstance(words, str):
            made = self._processor()(text=words, images=images, return_tensors="pt")
            return made["input_ids"][0].tolist(), self.engine.vision.split(made)
        if not all(isinstance(image, Mapping | torch.Tensor) for image in images):
            images = self.engine.vision.split(self._processor().image_processor(images, return_tensors="pt"))
        return self._ids(words), images

    def _processor(self) -> Any:
        if self.processor is None:
            if self._folder is None:
                raise ValueError("images and text need the model's processor: LLM(model, processor=...)")
            from transformers import AutoProcessor

            self.processor = AutoProcessor.from_pretrained(self._folder, trust_remote_code=False)
        return self.processor

    def _ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give prompts as token ids")
        return list(self.tokenizer(prompt)["input_ids"])

    def _result(self, prompt: Any, request: Request) -> Result:
        outputs = [self._completion(i, one) for i, one in enumerate(request.best)]
        words = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
        text = words if isinstance(words, str) else None
        told: list[TokenLogprobs | None] | None = None
        if request.params.prompt_logprobs is not None:
            # The first token follows nothing.
            told = [None, *self._named([one for one in request.prompt_logprobs if one is not None])]
        return Result(text, list(request.prompt), outputs, request.cached_tokens or 0, told)

    def _completion(self, index: int, one: Request) -> Completion:
        assert one.finish is not None
        params = one.params
        told = one.cumulative_logprob if params.wants_logprobs else None
        logprobs = None if params.logprobs is None else self._named(one.logprobs)
        return Completion(index, self._text(one), one.output, told, logprobs, one.finish, one.stop_reason)

    def _text(self, one: Request) -> str:
        if self.tokenizer is None:
            return ""
        if one.text is not None:
            one.text.finish()
            return one.text.text
        tokens, params = one.output, one.params
        ended = tokens[-1:] if one.finish == "stop" else []
        if any(t in params.stop_token_ids or (t in self.engine.eos and not params.ignore_eos) for t in ended):
            tokens = tokens if params.include_stop_str_in_output else tokens[:-1]
        return Detokenizer(self.tokenizer, one.prompt, params.skip_special_tokens).add_all(tokens)

    def _named(self, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """With the tokens' texts."""
        if self.tokenizer is None:
            return logprobs
        for token in {token for one in logprobs for token in one if token not in self._names}:
            self._names[token] = str(self.tokenizer.decode([token]))
        return [{t: replace(p, decoded_token=self._names[t]) for t, p in one.items()} for one in logprobs]


def _is_ids(prompts: Any) -> bool:
    return len(prompts) > 0 and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__")
