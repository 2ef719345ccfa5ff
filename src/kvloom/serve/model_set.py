"""ModelSet: starts, watches and unloads the models of a server. Each model has its own engine process.

    add ──▶ engine process and tokenizer load ──▶ ready, `on_ready` is called
    unload ──▶ no new requests; open ones may finish within `drain_seconds` ──▶ the engine process ends

If a model of the command line cannot be loaded, the server ends. If a model that was added through the API cannot be
loaded, /v1/models lists it as failed, with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvloom.engine import check_engine, engine_config

from .api import (
    AnswerFormats,
    PromptEncoder,
    ServedModel,
    ServerContext,
    allowed_folder,
    engine_error,
    load_tokenizer,
)
from .errors import ApiError, bad_request, cut_off, unloading
from .metrics import Metrics, Recorder, RequestObserver
from .server_options import ChatOptions, ModelOptions, ServerOptions, shared_start
from .worker import EngineClient, PoolBroker, Ready, Start, StartError

if TYPE_CHECKING:
    from .metrics import Traces

__all__ = ["ModelSet"]

log = logging.getLogger("kvloom.serve")

POLL_SECONDS = 0.05
RESERVE_SECONDS = 30.0
"""Longest time in seconds to wait until running requests free the memory for a new model."""


class ModelSet:
    """The models of one server. `context.models` contains them by name. `fault` is a future. If a model of the command
    line or a background task fails, `fault` gets the error, and the server ends.
    """

    def __init__(
        self, options: ServerOptions, context: ServerContext, on_ready: Callable[[ServedModel], None]
    ) -> None:
        self._options, self._context, self._on_ready = options, context, on_ready
        self._tasks: dict[ServedModel, asyncio.Task[None]] = {}
        self._unloads: set[asyncio.Task[None]] = set()
        self._loaded: dict[ServedModel, asyncio.Event] = {}
        self.broker = None if options.memory is None else PoolBroker(options.memory, self._engines)
        """Divides the memory that models share. None means that each pool keeps its own memory."""
        self._loading = asyncio.Lock()
        self._tokenizers = (
            asyncio.Lock()
        )  # two threads cannot import transformers or compile a template at once
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, model: ModelOptions, is_added: bool = False) -> ServedModel:
        """Start to load a model and return it. `is_added` is True if a client requested the model through the API, and
        False for a model of the command line.
        """
        options, name = self._options, model.served_name
        prefix = f"{name}: " if options.has_many else ""
        engine = EngineClient(
            model.start,
            lambda line: log.warning("%s%s", prefix, line),
            lambda facts: self._engine_ready(served, facts),
            options.watchdog,
            explain=engine_error,
        )
        recorder, file = None, options.record_file(name)
        if file is not None:
            recorder = Recorder(file, block_tokens=16, model=name)
        observer = RequestObserver(
            Metrics(engine, name, model.start.observe),
            _traces(options, name),
            recorder,
            self._context.records,
        )
        engine.on_progress = observer.record_progress
        if recorder is not None:
            engine.on_delta = observer.record_tokens
        created = int(time.time())
        served = ServedModel(name, model.start.model, created, engine, observer, is_added=is_added)
        self._context.models[name] = served
        self._loaded[served] = asyncio.Event()
        chat = model.chat or options.chat
        self._tasks[served] = task = asyncio.create_task(self._run(served, chat, Path(served.path).exists()))
        task.add_done_callback(partial(self._ended, served))
        return served

    async def load(self, asked: str, name: str | None) -> ServedModel:
        """Start to load the model in the folder `asked`, in addition to the served models. The folder must be below one
        of the --model-dir folders. Raises ApiError if the model is refused.
        """
        options = self._options
        if self.broker is None or not options.model_folders:
            raise ApiError(
                403, "loading models is disabled: start the server with --memory SIZE and --model-dir DIR"
            )
        folder = await asyncio.to_thread(allowed_folder, asked, options.model_folders, "model", "--model-dir")
        first = options.models[0].start
        # The models of the command line use these ports.
        taken = dict.fromkeys(("kv_events", "kv_events_replay", "kv_events_key"))
        adapters = {"lora": [], "max_loras": 0, "max_lora_rank": None, "lora_targets": []}
        settings = {**first.settings, **taken, **adapters}
        start = msgspec.structs.replace(
            first, model=str(folder), cpu_dtype="auto", progress=False, settings=settings
        )
        name = name or folder.name
        async with self._loading:
            known = self._context.models.get(name)
            if known is not None and not known.error:
                raise ApiError(409, f"model {name!r} is served already: give another name", "name", "exists")
            if known is not None:
                await self._unload(known)
            try:
                await asyncio.to_thread(_check, start)
            except (ValueError, OSError) as error:
                raise bad_request(f"model {asked!r} cannot be loaded: {error}", "model") from None
            try:
                share = await self.broker.reserve(RESERVE_SECONDS)
            except TimeoutError:
                raise ApiError(
                    503, f"requests of other models use the memory for {RESERVE_SECONDS:g} s; try again",
                    code="memory_in_use", retry_after=10,
                ) from None  # fmt: skip
            try:
                model = ModelOptions(shared_start(start, self.broker.budget, share), name)
                return self.add(model, is_added=True)
            finally:
                self.broker.release()

    def _engines(self) -> dict[str, EngineClient]:
        """Return the engines that have a pool or will have one. These are the engines of all models that did not fail
        to load."""
        models = self._context.models
        return {name: served.engine for name, served in models.items() if not served.error}

    def unload(self, served: ServedModel) -> None:
        """Refuse new requests for a model, wait for open requests, then end its engine process."""
        if not served.is_unloading:
            served.is_unloading = True
            task = asyncio.create_task(self._unload(served))
            self._unloads.add(task)
            task.add_done_callback(self._unloads.discard)

    async def close(self) -> None:
        """End all engine processes. Call `fail_all` first."""
        for served in self._context.models.values():
            served.engine.close()
        await asyncio.gather(*self._tasks.values(), *self._unloads, return_exceptions=True)
        for served in self._context.models.values():
            await asyncio.to_thread(served.observer.close)

    def fail_all(self) -> None:
        """End every open request with an error, because the server stops."""
        for served in self._context.models.values():
            served.engine.fail_all(cut_off())

    async def _run(self, served: ServedModel, chat: ChatOptions, is_local: bool) -> None:
        await asyncio.gather(served.engine.run(), self._load_tokenizer(served, chat, is_local))

    async def _load_tokenizer(self, served: ServedModel, chat: ChatOptions, is_local: bool) -> None:
        options = self._options
        if not is_local:  # the engine downloads the model, or reports the error
            await self._loaded[served].wait()
        async with self._tokenizers:
            found = await asyncio.to_thread(load_tokenizer, served.path, chat.template)
            served.answers = AnswerFormats.of(found, chat.tool_call_parser, chat.reasoning_parser)
            served.encoder = await asyncio.to_thread(
                PromptEncoder, found, options.limits.template_seconds, options.allow_chat_template
            )
        if served.engine.is_ready:
            self._on_ready(served)

    def _engine_ready(self, served: ServedModel, facts: Ready) -> None:
        again = self._loaded[served].is_set()
        self._loaded[served].set()
        if served.observer.recorder is not None:
            served.observer.recorder.bytes_per_token = facts.bytes_per_token
        if again:
            prefix = f"{served.name}: " if self._options.has_many else ""
            log.warning(
                "%sengine restarted as process %s in %.1f s", prefix, served.engine.pid, facts.load_seconds
            )
        elif served.encoder is not None:
            self._on_ready(served)

    def _ended(self, served: ServedModel, task: asyncio.Task[None]) -> None:
        """Handle the end of the task that runs a model. If a model that was added through the API could not be loaded,
        mark the model as failed. Any other error ends the server, unless the model is being unloaded.
        """
        failed = None if task.cancelled() else task.exception()
        if failed is None or served.is_unloading:
            return
        if served.is_added and isinstance(failed, StartError | OSError | ValueError):
            served.error = str(failed)
            log.error("%s: %s", served.name, failed)
            served.engine.close()
        else:
            self.report_fault(task)

    def report_fault(self, task: asyncio.Task[None]) -> None:
        """If a background task has failed, set `fault` to its error, which ends the server."""
        failed = None if task.cancelled() else task.exception()
        if failed is not None and not self.fault.done():
            self.fault.set_exception(failed)

    async def _unload(self, served: ServedModel) -> None:
        for _ in range(int(self._options.drain_seconds / POLL_SECONDS)):
            if not served.engine.has_open:
                break
            await asyncio.sleep(POLL_SECONDS)
        served.engine.fail_all(unloading(served.name))
        served.engine.close()
        await asyncio.gather(self._tasks.pop(served), return_exceptions=True)
        await asyncio.to_thread(served.observer.close)
        self._context.models.pop(served.name, None)
        self._loaded.pop(served)
        log.info("unloaded: %s", served.name)


def _check(start: Start) -> None:
    config = engine_config(**start.settings)
    check_engine(start.model, config, load_format=start.load_format, dtype=start.dtype, device=start.device)


def _traces(options: ServerOptions, model: str) -> Traces | None:
    if options.otlp is None:
        return None
    from .metrics import Traces

    return Traces(options.otlp, model)
