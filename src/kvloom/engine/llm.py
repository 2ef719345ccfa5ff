"""The offline API: prompts in, results out, on one engine.

    llm = LLM("path/to/model")
    for result in llm.generate(["Once upon a time"], SamplingParams(temperature=0)):
        print(result.outputs[0].text)

Prompts are text or lists of token ids. The model is a folder (or hub id) or a Hugging Face model that is loaded already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .engine import Engine
from .request import Finish, Request, SamplingParams

__all__ = ["LLM", "Completion", "Result"]

Prompt = str | Sequence[int]
POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt; `text` is empty where the model has no tokenizer."""

    token_ids: list[int]
    text: str
    finish_reason: Finish


@dataclass(frozen=True, slots=True)
class Result:
    """What a prompt led to. `num_cached_tokens` of it were found in the cache."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int


class LLM:
    """A model and its engine. `pool_bytes` are for the cache; `dtype` and `device` are the weights'."""

    def __init__(
        self,
        model: Any,
        *,
        pool_bytes: int = POOL_BYTES,
        kv_dtype: str | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        token_budget: int = 2048,
        max_running: int = 256,
        tokenizer: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        if isinstance(model, str):
            model, self.tokenizer = _load(model, dtype, device, tokenizer)
        self.engine = Engine(model, pool_bytes, kv_dtype, token_budget=token_budget, max_running=max_running)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Result]:
        """Results in the prompts' order. One `params` serves all, or one each. All requests run together; if one of
        them can never run, ValueError is raised and none does."""
        many = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise ValueError(f"{len(each)} sampling parameters for {len(many)} prompts")
        requests: list[Request] = []
        try:
            for prompt, mine in zip(many, each, strict=True):
                requests.append(self.engine.add(self._ids(prompt), mine))
            self._run(requests, progress)
        except BaseException:
            for request in requests:
                self.engine.cancel(request)
            raise
        return [self._result(request) for request in requests]

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

    def _ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give prompts as token ids")
        return list(self.tokenizer(prompt)["input_ids"])

    def _result(self, request: Request) -> Result:
        assert request.finish is not None
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(request.output, skip_special_tokens=True)
        done = Completion(request.output, text, request.finish)
        return Result(list(request.prompt), [done], request.cached_tokens or 0)


def _is_ids(prompts: Any) -> bool:
    return len(prompts) > 0 and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__")


def _load(
    name: str, dtype: torch.dtype | str, device: torch.device | str | None, tokenizer: Any
) -> tuple[Any, Any]:
    """Weights and tokenizer of a folder or hub id; a tokenizer that is not there is None."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError):
            tokenizer = None
    return model, tokenizer
