"""The offline API: runs prompts on one engine and returns their results.

    llm = LLM("path/to/model")
    for result in llm.generate(["Once upon a time"], SamplingParams(temperature=0)):
        print(result.outputs[0].text)
    print(llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text)
    for delta in llm.stream("Once upon a time"):
        print(delta.text, end="")

A prompt is a text, a list of token ids, or {"prompt": text or ids, "images": [...], "audio": [...]} for a model that
takes images or audio clips. A clip is the bytes of a WAV file, or (samples, rate). The prompt of an encoder-decoder
model of text is the input of the encoder, and "decoder_prompt" may set the first tokens of the decoder. The prompt of
Whisper is that of the decoder, and may be empty. `transcribe` makes the prompts of Whisper itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvloom.combinations import refused
from kvloom.core import CacheControl, Objective, Pin
from kvloom.models.loading import LoadFormat, choose_device
from kvloom.models.specs import folder_of
from kvloom.models.vision import EncoderDecoder, Vision

from .config import engine_config
from .encoding import RemoteEncoders
from .engine import Engine
from .execution import default_token_budget, use_threads
from .image_prompts import clip_frames, clip_tensors, encode_image_prompt, load_processor
from .offload import opened_tiers
from .parallel import load_ranks
from .preflight import check_engine
from .request import Request
from .sampling import Detokenizer, Finish, SamplingParams, TokenLogprobs
from .transcription import Transcript, Transcription

__all__ = ["LLM", "Completion", "Delta", "Result"]

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of a prompt. `text` continues the prompt, and is empty without a tokenizer. `cumulative_logprob` and
    `logprobs` (one dictionary per token) are None unless requested. `stop_reason` is the stop text or token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: Finish
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """All samples of a prompt. `num_cached_tokens` is the number of prompt tokens that were cached.
    `prompt_logprobs` is None unless requested. If requested, `prompt_logprobs` has one entry per prompt token, and the
    first entry is None.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    slo: dict[str, Any] | None = None
    """Objectives, prediction and outcome, in milliseconds. For a refused prompt, `refusal` is set and the finish reason
    is "slo". None if the prompt has no objective."""
    num_reused_tokens: int = 0
    """Number of prompt tokens whose K and V were copied from documents (`reuse_documents`)."""

    @property
    def is_approximate(self) -> bool:
        """Whether K and V of documents were copied, so that the answer may differ from the model's answer."""
        return self.num_reused_tokens > 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and text of one sample, identified by the numbers of prompt and sample. `finish_reason` is set in
    the last delta. Text may lag behind tokens, because only whole characters are returned. Text that may begin a
    stop text is also held back.
    """

    prompt: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: Finish | None = None


class LLM:
    """A model and its engine. `model` is a folder, a hub id, the name of a small model that the package contains (such
    as `kvloom-llama`), or a loaded Hugging Face model.

    | argument                         | meaning                                                                   |
    |----------------------------------|---------------------------------------------------------------------------|
    | `dtype`, `device`, `load_format` | dtype, device and format of the weights; `load_format` "random" creates   |
    |                                  | weights from a config                                                     |
    | `tokenizer`, `processor`         | replace the tokenizer and processor of the model's folder; a processor is |
    |                                  | loaded with the first image or audio clip                                 |
    | `threads`                        | CPU threads of torch for this process (None: the rule in                  |
    |                                  | execution/threads.py)                                                     |
    | `progress`                       | show progress bars while loading and preparing                            |
    | `settings`                       | fields of `EngineConfig` (`pool_bytes`, `kv_dtype`, `eviction_policy`,    |
    |                                  | `tiers` …); `load` ("auto", "always" or "never"): whether pages in tiers  |
    |                                  | are loaded; `grammar_seconds`, `grammar_memory`: limits of one grammar    |
    |                                  | Sizes are bytes, or texts such as "256MiB"                                |

    Call `close` to store pages in the tiers and end the engine."""

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        load_format: LoadFormat = "auto",
        tokenizer: Any = None,
        processor: Any = None,
        threads: int | None = None,
        progress: bool = False,
        **settings: Any,
    ) -> None:
        config = engine_config(**settings)
        self.tokenizer, self.processor = tokenizer, processor
        self._folder, group = folder_of(model) if isinstance(model, str) else None, None
        if self._folder is not None:
            where = None if device is None else str(device)
            asked = str(dtype).removeprefix("torch.")
            check_engine(self._folder, config, load_format=load_format, dtype=asked, device=where)
            chosen = choose_device(device)
            if dtype == "auto" and chosen.type == "cpu" and self._folder != model:
                dtype = "float32"  # an embedded model, as in `kvloom serve`
            if config.token_budget is None:
                config = replace(config, token_budget=default_token_budget(chosen))
            # Opened first, so that an error appears before the model is loaded.
            with opened_tiers(config.tiers) as opened:
                model, found, group = load_ranks(
                    self._folder, config, dtype, chosen, load_format, progress, threads
                )
            config = replace(config, tiers=opened)
            self.tokenizer = tokenizer or found
        elif config.token_budget is None:
            config = replace(config, token_budget=default_token_budget(next(model.parameters()).device))
        try:
            self.engine = Engine(model, config, self.tokenizer, group)
        except BaseException:
            if group is not None:
                group.close()
            raise
        if threads is not None or self.engine.device.type == "cpu":
            use_threads(threads)
        self._prepare(progress)
        self._token_texts: dict[int, str] = {}

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
        """Cancel all requests, store the queued offloads in the tiers, and close the tiers. Takes up to 10 seconds."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        control: CacheControl | Sequence[CacheControl] | None = None,
        slo: Objective | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[Result]:
        """Return results in the order of the prompts. All requests run together. If one of them can never run, raises
        ValueError and runs none.

        Without `params`, the values of the model's generation config apply (see `default_params`). `params` and `control`
        are one object for all prompts, or a list with one per prompt. `control` contains the
        caching options: tenant, session, whether pages are stored (`store`) and cached pages are used (`read`),
        eviction priorities of token ranges, and a public prefix.

        `lora` is the name of a LoRA adapter for all prompts, or a list with one name per prompt. None is the base
        model.

        With `slo`, a prompt that cannot meet the objective is not run. Its answers are empty and have the finish
        reason "slo", and `Result.slo` has the reason. Earlier prompts of the list are scheduled first.
        """
        many, requests = self._add(prompts, params, control, slo=slo, lora=lora)
        try:
            self._run(requests, progress)
        except BaseException:
            self._cancel(requests)
            raise
        return [self._result(prompt, request) for prompt, request in zip(many, requests, strict=True)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        lora: str | Sequence[str | None] | None = None,
        **template: Any,
    ) -> list[Result]:
        """Return the answers to one or several conversations. A message has `role` and `content`. See
        `chat_prompt`. `lora` names LoRA adapters, as in `generate`."""
        one = not messages or isinstance(messages[0], Mapping)
        many = [messages] if one else list(messages)
        prompts = [self.chat_prompt(each, **template) for each in many]
        return self.generate(prompts, params, progress, lora=lora)

    def transcribe(
        self,
        clips: Any,
        language: str | None = None,
        task: Literal["transcribe", "translate"] = "transcribe",
        timestamps: bool = False,
        params: SamplingParams | None = None,
        control: CacheControl | None = None,
    ) -> list[Transcript]:
        """Return the transcripts of audio clips, for Whisper. The clips run together. A clip is the bytes of a WAV file,
        or (samples, rate), and may have any length.

        Without `language`, such as "en", the language of the generation config applies. If there is none, the language
        is detected. "translate" translates to English. Clips longer than a window (30 seconds) have time stamps in any
        case. `params` applies to each window. The default is greedy, with as many tokens as the model allows. Raises
        ValueError for a model that is not a Whisper.
        """
        model = self.engine.vision
        if not isinstance(model, EncoderDecoder) or model.reads_text:
            raise ValueError(
                f"{type(self.engine.model).__name__} does not transcribe audio: use a Whisper model"
            )
        one = isinstance(clips, bytes | bytearray | memoryview | tuple)
        limit = self.engine.cache.max_tokens if params is None else None
        params = params or SamplingParams(temperature=0)
        if params.samples > 1:
            raise ValueError(
                f"a transcript has one answer, not {params.samples}: set n, best_of and beam_width to 1"
            )
        params = replace(params, logprobs=params.logprobs or 0)
        made = []
        for clip in [clips] if one else clips:
            frames, seconds = clip_frames(self._processor(), clip)
            made.append(Transcription(model, frames, seconds, params, limit, task, language, timestamps))
        open_: dict[int, Request] = {}
        try:
            while True:
                for place, each in enumerate(made):
                    if place not in open_ and (window := each.next()) is not None:
                        open_[place] = self.engine.add(
                            window.prompt, window.params, control, audio=[window.clip]
                        )
                if not open_:
                    return [each.transcript(self.tokenizer) for each in made]
                self.engine.step()
                for place, request in list(open_.items()):
                    if request.finish_reason is not None:
                        made[place].take_request(request, self.engine.eos)
                        del open_[place]
        finally:
            self._cancel(list(open_.values()))

    def chat_prompt(self, messages: Any, **template: Any) -> list[int]:
        """Return the token ids of a conversation, formatted by the tokenizer's chat template. `template` sets
        variables of the template, such as `tools` and `add_generation_prompt` (default True). Special tokens in
        message contents are recognised. Raises ValueError without a chat template or without messages.
        """
        if not messages:
            raise ValueError(
                "messages is empty: give at least one, such as {'role': 'user', 'content': 'Hello'}"
            )
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the model has no chat template: use generate")
        template = {"add_generation_prompt": True, **template, "tokenize": False}
        text = self.tokenizer.apply_chat_template(list(messages), **template)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def default_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters of the model's generation config, with `changes`. Values that it does not have
        are those of `SamplingParams`. Its shortest output, suppressed tokens and bad words apply to all parameters."""
        return self.engine.defaults.params(0, **changes)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Literal["mean", "last"] = "mean",
        progress: bool = False,
        lora: str | Sequence[str | None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of the prompts: [prompts, hidden], each of unit length.

        With "mean", an embedding is the mean of the final norm's output over all tokens. With "last", it is the
        output at the last token. "mean" reads no cached pages, because cached tokens have no hidden states. In both
        cases the prompt's pages are stored in the cache. `lora` names LoRA adapters, as in `generate`.
        """
        params = SamplingParams(max_tokens=1, temperature=0, pooling=pooling)
        _, requests = self._add(prompts, params, lora=lora)
        try:
            self._run(requests, progress)
        except BaseException:
            self._cancel(requests)
            raise
        found = [request.embedding for request in requests]
        if any(one is None for one in found):
            raise RuntimeError(
                "the pool has no pages for one of the prompts: enlarge it, or shorten the prompts"
            )
        return np.stack([one for one in found if one is not None])

    def pin(
        self,
        prompt: str | Sequence[int],
        seconds: float,
        control: CacheControl | None = None,
        lora: str | None = None,
    ) -> Pin:
        """Keep the cached prefix of a prompt in the pool for `seconds`, or until `unpin`. `Pin.length` is the
        length of this prefix in tokens. Nothing is computed, so run the prompt with `generate` first. Pinned pages
        count as in use, so a large pin leaves fewer pages for requests. `lora` is the LoRA adapter of the prompt.
        """
        return self.engine.pin(self._ids(prompt), seconds, control, lora)

    def load_lora(self, name: str, path: str, replace: bool = False) -> None:
        """Load a LoRA adapter from a folder, for later prompts. With `replace`, it replaces another version that has
        the same name. The engine must be configured with `max_loras` or `lora`.

        Raises ValueError if the engine is not configured for adapters, or if the adapter does not fit the model. Also
        raises ValueError if another version has the name and `replace` is not set."""
        self.engine.load_lora(name, path, replace)

    def unload_lora(self, name: str) -> None:
        """Remove a LoRA adapter. If the same version is loaded again, its prompts hit the pages that are still
        cached. Raises ValueError for an unknown name."""
        self.engine.unload_lora(name)

    def unpin(self, pin: Pin) -> None:
        """End a pin early. A second call has no effect."""
        self.engine.cache.unpin(pin)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        control: CacheControl | Sequence[CacheControl] | None = None,
        slo: Objective | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> Iterator[Delta]:
        """Yield deltas as tokens arrive. Deltas of one sample are in order. Deltas of several samples are
        interleaved. The requests start at the first iteration. Leaving the loop cancels them. Raises ValueError for
        `best_of` and beams, which need `generate`. A prompt that cannot meet `slo` ends with the finish reason "slo".
        `lora` names LoRA adapters, as in `generate`.
        """
        _, requests = self._add(prompts, params, control, text=True, slo=slo, lora=lora)
        open_ = [one for request in requests for one in request.family]
        places = {
            id(one): (i, j) for i, request in enumerate(requests) for j, one in enumerate(request.family)
        }
        returned = {id(one): 0 for one in open_}
        try:
            while open_:
                self.engine.step()
                for one in open_:
                    count = one.output_count
                    if count > returned[id(one)] or one.finish_reason is not None:
                        yield self._delta(one, *places[id(one)], returned[id(one)])
                        returned[id(one)] = count
                open_ = [one for one in open_ if one.finish_reason is None]
        finally:
            self._cancel(requests)

    def _delta(self, one: Request, prompt: int, index: int, start: int) -> Delta:
        tokens = one.output[start:]
        logprobs = None if one.params.logprobs is None else self._with_texts(one.logprobs[start:])
        text = "" if one.text is None else one.text.take()
        return Delta(prompt, index, text, tokens, logprobs, one.finish_reason)

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        control: CacheControl | Sequence[CacheControl] | None = None,
        text: bool = False,
        slo: Objective | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> tuple[list[Any], list[Request]]:
        """Add all prompts to the engine. Return the prompts as a list, and their requests. If one prompt is refused,
        raises ValueError and adds none.
        """
        one = isinstance(prompts, str | Mapping) or _is_ids(prompts)
        many: list[Any] = [prompts] if one else list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        controls = (
            [control] * len(many) if control is None or isinstance(control, CacheControl) else list(control)
        )
        names = [lora] * len(many) if lora is None or isinstance(lora, str) else list(lora)
        for what, given in (("sampling parameters", each), ("cache controls", controls), ("adapters", names)):
            if len(given) != len(many):
                raise ValueError(
                    f"{len(given)} {what} do not match {len(many)} prompts: give one for all, or one each"
                )
        if text and any(mine is not None and mine.samples > mine.n for mine in each):
            raise ValueError(refused("best_of, LLM.stream"))
        requests: list[Request] = []
        try:
            for prompt, mine, cached, name in zip(many, each, controls, names, strict=True):
                with_text = text and self.tokenizer is not None
                ids, images, audio = self._read_prompt(prompt)
                decoder = self._decoder_ids(prompt)
                if (images or audio) and self.engine.encoders is not None:
                    images = self._encoded(
                        self.engine.encoders, ids, [*images, *audio], cached or CacheControl()
                    )
                    audio = []
                requests.append(
                    self.engine.add(
                        ids,
                        mine,
                        cached,
                        text=with_text,
                        images=images,
                        audio=audio,
                        slo=slo,
                        lora=name,
                        decoder_prompt=decoder,
                    )
                )
        except BaseException:
            self._cancel(requests)
            raise
        return many, requests

    def _encoded(
        self, encoders: RemoteEncoders, ids: list[int], images: list[Any], control: CacheControl
    ) -> list[Any]:
        """Return the images in the form that the engine accepts. If the engine lacks the embeddings of an image,
        request them from an encode worker, wait for them, and add them to the image."""
        vision = self.engine.vision
        assert vision is not None
        known = [vision.read_image(one, control.tenant, control.read, control.store) for one in images]
        pending = {
            place: encoders.request(known[place])
            for place in self.engine.images_to_request(ids, known, control)
        }
        for place, one in pending.items():
            known[place] = replace(known[place], embeddings=one.result())
        return known

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
                bar.update(task, completed=sum(request.finish_reason is not None for request in requests))

    def _read_prompt(self, prompt: Any) -> tuple[list[int], list[Any], list[Any]]:
        """Return the token ids of a prompt, and the lists of its images and audio clips in the form that the engine
        accepts. The list of images may also contain audio clips."""
        if not isinstance(prompt, Mapping):
            return self._ids(prompt), [], []
        if "prompt" not in prompt or prompt.keys() - {"prompt", "images", "audio", "decoder_prompt"}:
            raise ValueError(
                f"a prompt needs the key 'prompt', and may have 'images', 'audio' and 'decoder_prompt'; got "
                f"{', '.join(map(repr, prompt))}"
            )
        words, images, audio = (
            prompt["prompt"],
            list(prompt.get("images") or ()),
            list(prompt.get("audio") or ()),
        )
        vision = self.engine.vision
        for kind, given in (("images", images), ("audio", audio)):
            reason = Vision.refusal(self.engine.model, kind) if given else None
            if reason is not None:
                raise ValueError(reason)
        if not (images or audio) or vision is None:
            return self._ids(words), [], []
        if isinstance(vision, EncoderDecoder):
            clips = [clip_tensors(self._processor(), vision, clip) for clip in audio]
            return self._decoder_ids({"decoder_prompt": words}), [], clips
        if isinstance(words, str):
            return *encode_image_prompt(self._processor(), vision, words, images, audio), []
        if not all(isinstance(image, Mapping | torch.Tensor) for image in images):
            images = vision.split(self._processor().image_processor(images, return_tensors="pt"))
        if not all(isinstance(clip, Mapping) for clip in audio):
            audio = [clip_tensors(self._processor(), vision, clip) for clip in audio]
        return self._ids(words), images, audio

    def _decoder_ids(self, prompt: Any) -> list[int]:
        """Return the first tokens of the decoder that a prompt sets. The tokenizer adds no special tokens to them."""
        given = prompt.get("decoder_prompt") if isinstance(prompt, Mapping) else None
        if not given or not isinstance(given, str):
            return self._ids(given or ())
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: give decoder_prompt as token ids")
        return list(self.tokenizer(given, add_special_tokens=False)["input_ids"])

    def _processor(self) -> Any:
        if self.processor is None:
            if self._folder is None:
                raise ValueError(
                    "images and audio need the model's processor: pass LLM(model, processor=...)"
                )
            self.processor = load_processor(self._folder)
        return self.processor

    def _ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: give prompts as token ids")
        return list(self.tokenizer(prompt)["input_ids"])

    def _result(self, prompt: Any, request: Request) -> Result:
        outputs = [self._completion(i, one) for i, one in enumerate(request.returned_samples)]
        words = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
        text = words if isinstance(words, str) else None
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = [
                None,
                *self._with_texts([one for one in request.prompt_logprobs if one is not None]),
            ]
        slo = None if request.slo is None else request.slo.report(request.output_count)
        return Result(
            text,
            list(request.prompt),
            outputs,
            request.cached_tokens or 0,
            prompt_logprobs,
            slo,
            request.reused_tokens,
        )

    def _completion(self, index: int, one: Request) -> Completion:
        assert one.finish_reason is not None
        params = one.params
        cumulative = one.cumulative_logprob if params.wants_logprobs else None
        logprobs = None if params.logprobs is None else self._with_texts(one.logprobs)
        return Completion(
            index, self._text(one), one.output, cumulative, logprobs, one.finish_reason, one.stop_reason
        )

    def _text(self, one: Request) -> str:
        if self.tokenizer is None:
            return ""
        if one.text is not None:
            one.text.finish()
            return one.text.text
        tokens, params = one.output, one.params
        ended = tokens[-1:] if one.finish_reason == "stop" else []
        if any(t in params.stop_token_ids or (t in self.engine.eos and not params.ignore_eos) for t in ended):
            tokens = tokens if params.include_stop_str_in_output else tokens[:-1]
        return Detokenizer(self.tokenizer, one.prompt, params.skip_special_tokens).add_all(tokens)

    def _with_texts(self, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Return log-probabilities with the texts of the tokens."""
        if self.tokenizer is None:
            return logprobs
        for token in {token for one in logprobs for token in one if token not in self._token_texts}:
            self._token_texts[token] = str(self.tokenizer.decode([token]))
        return [
            {t: replace(p, decoded_token=self._token_texts[t]) for t, p in one.items()} for one in logprobs
        ]


def _is_ids(prompts: Any) -> bool:
    return len(prompts) > 0 and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__")
