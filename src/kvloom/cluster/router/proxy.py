"""Sends requests to workers. Chooses a worker, forwards the request and streams the answer back. If the worker fails,
chooses another worker.

| failure                                    | what happens                                                                      |
|--------------------------------------------|-----------------------------------------------------------------------------------|
| a worker is unreachable or refuses (429,   | the router tries the next best worker; if all refuse, the client gets the refusal |
|   502, 503)                                |   of the last worker                                                              |
| no worker can meet the objective           | the router answers 429 with the best prediction, and sends nothing to workers     |
| a prefill worker fails                     | the decode worker computes the tokens whose pages it has not received             |
| a worker dies before its answer            | the router sends the request to another worker                                    |
| a worker dies in a stream                  | another worker continues after the tokens so far; the client sees one stream      |
| no worker is left                          | the request waits until a worker is back                                          |
| too many attempts, or deadline passed      | the client gets the reason: as an error status before the stream has begun, as an |
|                                            | error event afterwards                                                            |
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from kvloom.core import Decision, Histogram, Objective, Prediction, Verdict
from kvloom.serve.errors import ApiError, invalid_key, slo_not_met

from .answer_stream import AnswerStream, DivergedError, WorkerFailedError
from .call import FORWARDED, Call
from .encoders import EncoderChooser, image_hashes
from .fair_queue import FairQueue, QueueFullError
from .fleet import LATENCY_SECONDS, Fleet, ServedModel, Worker, now
from .objectives import admissible, objective_of, predict
from .prompt_keys import PromptReader, roots_of, salt_of
from .replication import ReplicationOptions, Replicator
from .scoring import Choice
from .worker_client import UnreachableError, WorkerConnection

__all__ = ["Proxy", "ProxyOptions"]

log = logging.getLogger("kvloom.router")
Send = Callable[[Any], Awaitable[None]]
STREAMED = ("/v1/completions", "/v1/chat/completions")
"""Endpoints whose streams continue on another worker."""
TRY_ANOTHER = (429, 502, 503)
AWAY = ("engine_loading", "engine_died", "draining", "server_stopping", "unloading")
"""Error codes of a worker that is temporarily unavailable, or that is being replaced."""
KEY_SECONDS = 2.0
"""Seconds in which a worker must answer a question about an API key."""
WAIT_STEP = 0.1
"""Seconds between two attempts to find a worker."""
HAND_OVER_TOKENS = 256
"""A decode worker that lacks fewer prompt tokens than this computes them itself, because this takes only one step."""
LEFT_OUT = (
    "max_completion_tokens",
    "min_tokens",
    "stream_options",
    "best_of",
    "use_beam_search",
    "beam_width",
    "end_session",
    "slo",
)
"""Request fields that are not sent to the prefill worker."""
KEPT_HEADERS = (b"content-type", b"retry-after", b"www-authenticate", b"x-request-id", b"x-kvloom-warning")
"""Headers of a worker's answer that are forwarded to the client."""
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """Limits of a router. At most `inflight` requests per living worker run at the same time. At most `queue` further
    requests wait, and their tenants take turns. `route` is "kv" (by cached prefix and load) or "round-robin".

    A request ends after `deadline_seconds`, or after `attempts` workers have failed. In a stream that has begun, a
    worker that sends nothing for `silent_seconds` counts as failed. While no worker can take a request, the request
    waits up to `wait_seconds` for a worker that returns.
    """

    inflight: int = 256
    queue: int = 10_000
    attempts: int = 4
    deadline_seconds: float = 600.0
    silent_seconds: float = 30.0
    route: str = "kv"
    wait_seconds: float = 30.0


@dataclass(slots=True)
class Counts:
    """The counters of a router.

    - `requests` counts answers by path and status.
    - `diverged_streams` counts streams that ended because a second worker generated another text.
    - `overhead` has the times from the arrival of a request until it is sent to a worker.
    - `ttft` has the times to first token of streams.
    """

    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    failovers: int = 0
    continued_streams: int = 0
    diverged_streams: int = 0
    prompt_tokens: int = 0
    expected_hit_tokens: int = 0
    hand_overs: int = 0
    """Number of requests whose prompt a prefill worker computed."""
    named_encoders: int = 0
    """Number of requests with images for which an encode worker was chosen."""
    slo_refused: int = 0
    """Number of requests that were refused because no worker could meet their objective."""
    overhead: Histogram = field(default_factory=lambda: Histogram(LATENCY_SECONDS))
    ttft: Histogram = field(default_factory=lambda: Histogram(LATENCY_SECONDS))


class _AbortedError(Exception):
    """Raised if the worker of an attempt died."""


class _UnreachableError(_AbortedError):
    """Raised if the worker of an attempt accepted no connection. The request itself cannot be the cause of this
    failure."""


class Proxy:
    """Forwards the calls of clients to the workers of a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        reader: PromptReader,
        options: ProxyOptions | None = None,
        replication: ReplicationOptions | None = None,
    ) -> None:
        self.fleet, self.reader, self.options = fleet, reader, options or ProxyOptions()
        self.replicator = Replicator(fleet, replication)
        self.queue = FairQueue(self.options.inflight, self.options.queue)
        self.encoders = EncoderChooser()
        self.counts = Counts()
        self._tenants: dict[str, str] = {}
        self._turn = 0

    async def serve(self, call: Call, send: Send) -> None:
        """Answer a call. Raises ApiError only before the first byte is sent to the client."""
        call.model, call.adapter = await self._find_model(call)
        call.tenant = await self._tenant(call)
        call.keys = await self.reader.read(
            call.body, {n: v for n, v in call.headers.items() if n in FORWARDED}, call.tenant
        )
        alive = len(self.fleet.candidates(call.model, call.adapter))
        self.queue.resize(self.options.inflight * max(1, alive))
        try:
            async with asyncio.timeout(max(0.0, call.at + self.options.deadline_seconds - now())):
                await self.queue.enter(call.tenant, call.keys.length)
        except QueueFullError:
            raise ApiError(503, f"{self.options.queue} requests wait already: try again later", code="queue_full", retry_after=1) from None  # fmt: skip
        except TimeoutError:
            raise ApiError(
                503, "no worker had a place before the deadline", code="deadline", retry_after=1
            ) from None
        try:
            if call.is_stream and call.path in STREAMED:
                await self._stream(call, send)
            else:
                await self._whole(call, send)
        finally:
            self.queue.leave(call.tenant)

    async def _find_model(self, call: Call) -> tuple[str, str | None]:
        """Return the model of a call, and its LoRA adapter or None. Waits while no worker is alive, because the router
        or the workers may have just started.
        """
        limit = min(self.options.wait_seconds, self.options.deadline_seconds)
        for _ in range(int(limit / WAIT_STEP)):
            workers = self.fleet.workers.values()
            if not workers or any(worker.answers for worker in workers):
                break
            await asyncio.sleep(WAIT_STEP)
        return self._model(call)

    def _model(self, call: Call) -> tuple[str, str | None]:
        asked = call.body.get("model")
        models = self.fleet.models
        if asked is None and len(models) == 1:
            return next(iter(models)), None
        if isinstance(asked, str) and asked in models:
            return asked, None
        if isinstance(asked, str) and (base := self.fleet.base_of(asked)) is not None:
            return base, asked
        if not any(worker.answers for worker in self.fleet.workers.values()):
            raise ApiError(
                503, "no worker is alive: start one, or register it", code="no_worker", retry_after=1
            )
        names = ", ".join(sorted(models)) or "none yet"
        raise ApiError(
            404, f"model {asked!r:.100} is not served here; models: {names}", "model", "model_not_found"
        )

    async def _tenant(self, call: Call) -> str:
        """Return the tenant that salts the block hashes of a call. This is the tenant of its API key or, without a key,
        the tenant that the request names. If the router has not seen the key before, it asks a worker for the tenant.
        """
        key, other = call.headers.get("authorization"), call.headers.get("x-api-key")
        if key is None and other is not None:
            key = f"Bearer {other}"
        named = call.body.get("tenant")
        if key is None:
            return named if isinstance(named, str) else ""
        if key not in self._tenants:
            if len(self._tenants) > 10_000:
                self._tenants.clear()
            found = None
            for worker in self.fleet.workers.values():
                if worker.answers and worker.is_kvloom:
                    try:
                        async with self.fleet.session.get(
                            f"{worker.url}/kvloom/worker", headers={"authorization": key}, timeout=aiohttp.ClientTimeout(total=KEY_SECONDS)
                        ) as answer:  # fmt: skip
                            if answer.status == 200:
                                found = msgspec.json.decode(await answer.read()).get("tenant") or ""
                                break
                            return ""
                    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                        return ""
            if found is None:  # no worker can be asked now
                return ""
            self._tenants[key] = found
        return self._tenants[key] or (named if isinstance(named, str) else "")

    async def check_key(self, headers: dict[str, str]) -> None:
        """Ask a living worker whether the API key in a request's headers allows to list models, because only workers
        have the keys. Raises ApiError if the worker refuses, or if no worker answers."""
        sent = {name: value for name, value in headers.items() if name in FORWARDED}
        for worker in self.fleet.workers.values():
            if not worker.answers or not worker.url:
                continue
            try:
                async with self.fleet.session.get(
                    f"{worker.url}/v1/models", headers=sent, timeout=aiohttp.ClientTimeout(total=KEY_SECONDS)
                ) as answer:
                    if answer.status in (401, 403):
                        raise invalid_key(not sent.keys().isdisjoint(("authorization", "x-api-key")))
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, OSError):
                continue
        raise ApiError(503, "no worker is alive: start one, or register it", code="no_worker", retry_after=1)

    # -- the choice ---------------------------------------------------------------------------------

    async def _next(self, call: Call) -> tuple[Worker, Choice]:
        """Choose a worker for a call. If no worker is alive, or the call has failed on all living workers, try all
        workers again after a short pause. Raises ApiError after `wait_seconds`, at the deadline of the call, or if a
        living worker refused the call because it had too much work.
        """
        until = call.at + self.options.deadline_seconds
        while True:
            try:
                return self.choose(call)
            except ApiError as error:
                if (
                    error.code != "no_worker"
                    or call.refused
                    or call.waited >= self.options.wait_seconds
                    or now() >= until
                ):
                    raise
            await asyncio.sleep(WAIT_STEP)
            call.waited += WAIT_STEP
            call.tried.clear()

    def choose(self, call: Call) -> tuple[Worker, Choice]:
        """Choose the best worker to which this call was not sent yet. Raises ApiError if there is none."""
        served = self.fleet.models[call.model]
        candidates = self.fleet.candidates(call.model, call.adapter)
        names = [name for name in candidates if name not in call.tried]
        if not names:
            why = "no worker is alive" if not call.tried else f"{len(call.tried)} workers failed"
            raise ApiError(
                503, f"{why} for model {call.model!r}: try again later", code="no_worker", retry_after=1
            )
        assert call.keys is not None
        if self.options.route == "round-robin":
            self._turn += 1
            name = names[self._turn % len(names)]
            return self.fleet.workers[name], Choice(name, 0.0, 0, 0)
        call.lengths = lengths = self._lengths(call, served, names)
        names = self._within_objective(call, served, names, lengths)
        for name in names:
            worker = self.fleet.workers[name]
            load = served.scorer.loads[name]
            load.foreign = worker.foreign_requests
        choice = served.scorer.choose(call.keys.length, lengths, names, now(), call.session, call.adapter)
        assert choice is not None
        return self.fleet.workers[choice.worker], choice

    def _within_objective(
        self, call: Call, served: ServedModel, names: list[str], lengths: dict[str, tuple[int, ...]]
    ) -> list[str]:
        """Return the workers that may meet the objective of a call. If there are none, raise ApiError 429 with the best
        prediction. A call that was already sent to a worker is not refused: in this case, return all workers.
        """
        assert call.keys is not None
        found: list[str] = []
        best: tuple[Decision, Prediction, Objective] | None = None
        for name in names:
            offer = self.fleet.workers[name].models[call.model]
            objective = objective_of(call.body, offer.objective)
            prediction = None
            if objective:
                cached = lengths.get(name, (0,))[-1]
                prediction = self._prediction(call, served, name, cached)
            decision = admissible(objective, prediction, now() - call.at)
            if decision.verdict is not Verdict.REFUSE:
                found.append(name)
            elif prediction is not None and (best is None or prediction.ttft < best[1].ttft):
                best = decision, prediction, objective
        if found or best is None or call.tried:
            return found or names
        self.counts.slo_refused += 1
        decision, prediction, objective = best
        raise slo_not_met(
            f"{decision.message} (the best of {len(names)} workers)",
            {
                "ttft_ms": objective.ttft_ms,
                "tbt_ms": objective.tbt_ms,
                "deadline_ms": None,
                "predicted_ttft_ms": round(1e3 * prediction.ttft, 3),
                "predicted_tbt_ms": round(1e3 * prediction.tbt, 3),
                "retry_after_s": decision.retry_after,
            },
        )

    def _prediction(self, call: Call, served: ServedModel, name: str, cached: int) -> Prediction | None:
        """Predict the times of a call on a worker. If a prefill worker computes the prompt, the TTFT is predicted
        for the prefill worker."""
        assert call.keys is not None

        def of(worker: str, known: int) -> Prediction | None:
            offer = self.fleet.workers[worker].models[call.model]
            return predict(
                served.scorer.loads[worker], offer.step_times, offer.token_budget, length, known, now()
            )

        length = call.keys.length
        names = self.fleet.prefill_workers(call.model, call.adapter)
        is_handed_over = self.fleet.workers[name].models[call.model].role == "decode" and names
        if not is_handed_over or length - cached < HAND_OVER_TOKENS:
            return of(name, cached)
        lengths = self._lengths(call, served, names)
        firsts = [of(one, lengths.get(one, (0,))[-1]) for one in names]
        decode = of(name, length - 1)
        if decode is None or any(one is None for one in firsts):
            return None
        first = min((one for one in firsts if one is not None), key=lambda one: one.ttft)
        return replace(decode, ttft=first.ttft, idle_ttft=first.idle_ttft)

    def _lengths(self, call: Call, served: ServedModel, names: list[str]) -> dict[str, tuple[int, ...]]:
        """Return, for each worker, how many tokens of the prompt the worker has cached, as one number per medium.
        Also stores the hashes of the prompt in `call`.
        """
        keys = call.keys
        assert keys is not None
        if keys.tokens is None:
            call.hashes = dict.fromkeys(names, keys.text)
            return served.texts.lengths(keys.text) if keys.text else {}
        lossy = call.body.get("lossy") is True
        roots = roots_of(self.fleet, call.model, names, call.tenant, salt_of(call.body), lossy, call.adapter)
        found: dict[str, tuple[int, ...]] = {}
        for root, mine in roots.items():
            hashes = keys.hashes(root)
            lengths = served.index.lengths(hashes)
            for name in mine:
                call.hashes[name] = hashes
                found[name] = lengths[name]
        return found

    def _begin(self, call: Call, worker: Worker, choice: Choice) -> None:
        """Record that a call is sent to a worker."""
        served, keys = self.fleet.models[call.model], call.keys
        assert keys is not None
        call.tried.add(worker.name)
        load = served.scorer.loads.get(worker.name)
        if load is not None:
            load.sent(call, keys.length - choice.cached, keys.length, now())
            if call.adapter is not None:
                load.adapters.add(call.adapter)
        hashes = call.hashes.get(worker.name, [])
        (served.index if keys.tokens is not None else served.texts).expect(worker.name, hashes)
        if choice.cached and keys.tokens is not None:
            self.replicator.observe(call, choice.cached, hashes, call.lengths)
        for counts in (self.counts, worker.sent):
            counts.prompt_tokens += keys.length
            counts.expected_hit_tokens += choice.cached
        worker.sent.requests += 1

    def _first_token(self, call: Call, worker: Worker) -> None:
        served = self.fleet.models[call.model]
        load = served.scorer.loads.get(worker.name)
        if load is not None:
            load.first_token(call, now())
        self._encoded(call)
        hashes = call.hashes.pop(worker.name, [])
        if call.keys is not None and call.keys.tokens is not None:
            served.index.arrived(worker.name, hashes)

    def _failed(self, call: Call, worker: Worker, error: Exception) -> None:
        """Count a failed attempt of a call. The caller ends a call after too many failures, because the call itself may
        be their cause. An attempt at a worker that accepted no connection is not counted as a failure of the call.
        """
        self.counts.failovers += 1
        worker.sent.failures += 1
        call.failures += not isinstance(error, _UnreachableError)

    def _end(self, call: Call, worker: Worker) -> None:
        self._encoded(call)
        served = self.fleet.models[call.model]
        without_token = call.hashes.pop(worker.name, [])
        for index in (served.index, served.texts):
            index.unexpect(worker.name, without_token)
        load = served.scorer.loads.get(worker.name)
        if load is not None:
            load.ended(call, now())

    # -- hand-over ------------------------------------------------------------------------------------

    def _hand_over(
        self, call: Call, worker: Worker, choice: Choice
    ) -> tuple[dict[str, Any], list[asyncio.Task[None]]]:
        """If the decode worker lacks many prompt tokens, make a prefill worker compute the prompt.

        Return two values. The first is a dictionary of fields to add to the decode worker's request: the prefill
        worker from which it pulls pages, and an encode worker for images. The second is a list with the task that waits
        for the prefill worker. The list is empty if the decode worker computes the prompt itself.
        """
        if "kv_transfer_params" in call.body or call.path not in STREAMED:
            return {}, []
        encode = self._named_encoder(call, worker)
        alone = {"kv_transfer_params": encode} if encode else {}
        keys, served = call.keys, self.fleet.models[call.model]
        assert keys is not None
        offer = worker.models.get(call.model)
        missing = keys.length - choice.cached
        if offer is None or offer.role != "decode" or missing < HAND_OVER_TOKENS:
            return alone, []
        names = self.fleet.prefill_workers(call.model, call.adapter)
        found = (
            served.scorer.choose(
                keys.length, self._lengths(call, served, names), names, now(), adapter=call.adapter
            )
            if names
            else None
        )
        if found is None:
            return alone, []
        prefill = self.fleet.workers[found.worker]
        host, _, port = (prefill.models[call.model].peer or "").rpartition(":")
        self.counts.hand_overs += 1
        prefill.sent.prefills[worker.name] = prefill.sent.prefills.get(worker.name, 0) + 1
        task = asyncio.create_task(self._prefill(call, prefill, keys.length - found.cached))
        params = {"do_remote_prefill": True, "remote_host": host, "remote_port": int(port), **encode}
        return {"kv_transfer_params": params}, [task]

    def _named_encoder(self, call: Call, worker: Worker) -> dict[str, Any]:
        """Return the fields that name an encode worker for the images of a call. Return an empty dictionary if the
        call has no images, or if the worker cannot ask any living encode worker."""
        offer = worker.models.get(call.model)
        names = [] if offer is None else self.fleet.encode_workers(call.model, offer.encoders)
        images = image_hashes(call.body, call.tenant) if names else []
        name = self.encoders.choose(images, names)
        if name is None:
            return {}
        encoder = self.fleet.workers[name]
        self.counts.named_encoders += 1
        call.encoders.append((name, len(images)))
        encoder.sent.prefills[worker.name] = encoder.sent.prefills.get(worker.name, 0) + 1
        host, _, port = (encoder.encodes[call.model].peer or "").rpartition(":")
        return {"encode_host": host.strip("[]"), "encode_port": int(port)}

    def _encoded(self, call: Call) -> None:
        """Record that the images of a call are encoded, or not needed any more."""
        for name, count in call.encoders:
            self.encoders.ended(name, count)
        call.encoders.clear()

    async def _prefill(self, call: Call, worker: Worker, compute: int) -> None:
        """Compute the prompt of a call on a prefill worker. If this fails, the decode worker computes the missing
        tokens."""
        assert call.keys is not None
        served, key = self.fleet.models[call.model], object()
        load, hashes = served.scorer.loads[worker.name], call.hashes.get(worker.name, [])
        body = {name: value for name, value in call.body.items() if name not in LEFT_OUT}
        body |= {
            "max_tokens": 1,
            "n": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, **self._named_encoder(call, worker)},
        }
        headers = {name: value for name, value in call.headers.items() if name in FORWARDED}
        timeout = aiohttp.ClientTimeout(total=self.options.deadline_seconds, sock_connect=5.0)
        load.sent(key, compute, call.keys.length, now())
        try:
            async with self.fleet.session.post(
                worker.url + call.path, data=msgspec.json.encode(body), headers=headers, timeout=timeout
            ) as answer:
                await answer.read()
            if answer.status == 200 and call.keys.tokens is not None:
                served.index.arrived(worker.name, hashes)
            elif answer.status != 200:
                log.warning("prefill worker %s returned status %d", worker.name, answer.status)
        except (aiohttp.ClientError, OSError) as error:
            if not isinstance(error, TimeoutError):
                self.fleet.failed(worker, f"{type(error).__name__}: {error}")
        finally:
            load.ended(key, now())

    # -- whole answers --------------------------------------------------------------------------------

    async def _whole(self, call: Call, send: Send) -> None:
        """Forward a call that is not a stream, and send the answer to the client unchanged. If a worker fails before
        the answer has begun, the next worker is tried.
        """
        last: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
        while call.failures < self.options.attempts:
            try:
                worker, choice = await self._next(call)
            except ApiError:
                if last is not None:
                    break
                raise
            self._begin(call, worker, choice)
            has_begun = False
            more, tasks = self._hand_over(call, worker, choice)
            try:
                attempt = _Attempt(self, call, worker, call.with_fields(more), send)
                async with attempt as answer:
                    if answer.status in TRY_ANOTHER:
                        last = answer.status, _headers(answer), await answer.read()
                        call.refused |= not _is_away(last[2])
                        continue
                    if not call.is_stream:
                        body = await answer.read()
                        self.queue.served(call.tenant, _generated_tokens(body))
                        self._first_token(call, worker)
                        await _respond(attempt.send, answer.status, _headers(answer), body)
                        return
                    has_begun = True
                    self._first_token(call, worker)
                    await attempt.send(
                        {"type": "http.response.start", "status": answer.status, "headers": _headers(answer)}
                    )
                    while data := await answer.read_any():
                        await attempt.send({"type": "http.response.body", "body": data, "more_body": True})
                        attempt.check()
                    await attempt.send({"type": "http.response.body", "body": b""})
                    return
            except _AbortedError as error:
                self._failed(call, worker, error)
                if has_begun:  # other workers cannot continue the streams of this endpoint
                    failed = ApiError(502, f"the worker failed in the answer: {error}", code="worker_failed")
                    await send(
                        {
                            "type": "http.response.body",
                            "body": b"event: error\ndata: " + failed.body + b"\n\n",
                        }
                    )
                    return
            finally:
                self._end(call, worker)
                for task in tasks:
                    task.cancel()
        if last is not None:
            await _respond(send, *last)
            return
        raise ApiError(
            502, f"{len(call.tried)} workers failed: try again later", code="worker_failed", retry_after=1
        )

    # -- streams ------------------------------------------------------------------------------------------

    async def _stream(self, call: Call, send: Send) -> None:
        """Stream an answer. If a worker dies, another worker continues the stream."""
        body = call.body
        stream = AnswerStream(hides_tokens=body.get("return_token_ids") is not True)
        seed: dict[str, Any] = {}
        if body.get("seed") is None and body.get("temperature") != 0:
            seed["seed"] = secrets.randbits(62)  # so that another worker samples the same tokens
        until = call.at + self.options.deadline_seconds
        why = ""
        while call.failures < self.options.attempts:
            try:
                worker, choice = await self._next(call)
            except ApiError as error:
                if not stream.has_begun:
                    raise
                why = error.message
                break
            self._begin(call, worker, choice)
            more, tasks = ({}, []) if stream.has_begun else self._hand_over(call, worker, choice)
            try:
                refused = await self._stream_from(call, worker, stream, {**seed, **more}, send, until)
                if refused is None:
                    return
                call.refused |= not _is_away(refused[2])
                why = f"the worker returned status {refused[0]}"
                if not stream.has_begun and call.refused and not self._others(call):
                    await _respond(send, *refused)
                    return
            except (_AbortedError, WorkerFailedError) as error:
                self._failed(call, worker, error)
                why = str(error)
            except DivergedError as error:
                self.counts.diverged_streams += 1
                why = f"the answer cannot be continued: {error}"
                break
            finally:
                self._end(call, worker)
                for task in tasks:
                    task.cancel()
            if now() > until:
                why = f"the deadline of {self.options.deadline_seconds:g} s has passed; {why}"
                break
        failed = ApiError(502, f"the answer ended early: {why}", code="worker_failed", retry_after=1)
        if not stream.has_begun:
            raise failed
        await send({"type": "http.response.body", "body": b"data: " + failed.body + b"\n\ndata: [DONE]\n\n"})

    def _others(self, call: Call) -> bool:
        return any(name not in call.tried for name in self.fleet.candidates(call.model, call.adapter))

    async def _stream_from(
        self, call: Call, worker: Worker, stream: AnswerStream, more: dict[str, Any], send: Send, until: float
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        """Stream an answer from one worker to the client, until the time `until`. The fields `more` are added to the
        request.

        Return None at the end of the answer. If the worker refuses, returns its status, headers and body.
        """
        body = call.body
        has_one = body.get("n") in (None, 1) and not body.get("logprobs")
        if worker.is_kvloom:
            if body.get("return_token_ids") is not True:
                more["return_token_ids"] = True
            if stream.tokens and has_one:
                more["resume_token_ids"] = [*(body.get("resume_token_ids") or []), *stream.tokens]
        is_continued = stream.has_begun
        if is_continued:
            self.counts.continued_streams += 1
            stream.restart()
        attempt = _Attempt(self, call, worker, call.with_fields(more), send)
        async with attempt as answer:
            if answer.status in TRY_ANOTHER or (is_continued and answer.status != 200):
                return answer.status, _headers(answer), await answer.read()
            if answer.status != 200:
                await _respond(attempt.send, answer.status, _headers(answer), await answer.read())
                return None
            load = self.fleet.models[call.model].scorer.loads.get(worker.name)
            while not stream.is_done:
                attempt.check()
                data = answer.take()
                if not data:
                    limit = self.options.silent_seconds if stream.has_begun else until - now()
                    try:
                        async with asyncio.timeout(max(0.0, min(limit, until - now()))):
                            data = await answer.read_any()
                    except TimeoutError:
                        raise _AbortedError(f"no data for {limit:.0f} s") from None
                if not data:
                    raise _AbortedError("the worker closed the stream before its end")
                has_begun = stream.has_begun
                passed, count = stream.feed(data)
                if not passed:
                    continue
                if not has_begun:
                    for counts in (self.counts, worker.sent):
                        counts.ttft.add(now() - call.at)
                    await attempt.send(
                        {
                            "type": "http.response.start",
                            "status": 200,
                            "headers": [*EVENTS, _worker_header(worker)],
                        }
                    )
                if count:
                    self._first_token(call, worker)
                    self.queue.served(call.tenant, count)
                    if load is not None:
                        load.grew(call, count)
                await attempt.send(
                    {"type": "http.response.body", "body": passed, "more_body": not stream.is_done}
                )
                stream.check()
            return None


class _Attempt:
    """One POST to a worker. Raises _AbortedError if the worker dies. Reports the death of the worker to the fleet.

    `send` sends a message to the client. The death of the worker does not interrupt it. Otherwise the client would lack
    this part of the answer, although the next worker continues after it.
    """

    def __init__(self, proxy: Proxy, call: Call, worker: Worker, data: bytes, send: Send) -> None:
        self._proxy, self._call, self._worker, self._data = proxy, call, worker, data
        self._send = send
        self._answer: WorkerConnection | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        """Number of earlier requests to cancel the task."""
        self._died = self._is_sending = self._has_cancelled = False

    def _abort(self) -> None:
        self._died = True
        if self._task is not None and not self._is_sending and not self._has_cancelled:
            self._has_cancelled = True
            self._task.cancel()

    async def send(self, message: Any) -> None:
        """Send a message to the client."""
        self._is_sending = True
        try:
            await self._send(message)
        finally:
            self._is_sending = False

    def check(self) -> None:
        """Raise _AbortedError if the worker died while a message was sent to the client."""
        if self._died:
            raise _AbortedError("the worker died")

    async def __aenter__(self) -> WorkerConnection:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._worker.streams[self._abort] = None
        call, proxy = self._call, self._proxy
        headers = {name: value for name, value in call.headers.items() if name in FORWARDED}
        left = max(0.1, call.at + proxy.options.deadline_seconds - now())
        proxy.counts.overhead.add(now() - call.at)
        try:
            self._answer = await proxy.fleet.client.post(
                self._worker.url, call.path, headers, self._data, left
            )
        except BaseException as error:
            self._worker.streams.pop(self._abort, None)
            self._translate(error)
            raise
        return self._answer

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._worker.streams.pop(self._abort, None)
        if self._answer is not None:
            if error is None:
                self._answer.release()
            else:
                self._answer.close()
        if error is not None:
            self._translate(error)

    def _translate(self, error: BaseException) -> None:
        """Raise _AbortedError if `error` means that the worker is gone."""
        if isinstance(error, asyncio.CancelledError) and self._has_cancelled and self._task is not None:
            self._has_cancelled = False
            if self._task.uncancel() <= self._cancelling:  # otherwise the client is gone, too
                raise _AbortedError("the worker died") from None
        if isinstance(error, UnreachableError):
            self._proxy.fleet.failed(self._worker, f"{type(error).__name__}: {error}")
            raise _UnreachableError("the worker accepts no connection") from None
        if isinstance(error, TimeoutError):
            raise _AbortedError("the worker did not answer in time") from None
        if isinstance(error, OSError):
            self._proxy.fleet.failed(self._worker, f"{type(error).__name__}: {error}")
            raise _AbortedError(f"the connection to the worker broke ({type(error).__name__})") from None


def _is_away(body: bytes) -> bool:
    """Whether the error in the body of a worker's response means that the worker is temporarily away: it is loading
    its model, restarting, stopping or draining."""
    try:
        return msgspec.json.decode(body)["error"]["code"] in AWAY
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def _generated_tokens(body: bytes) -> int:
    """Return the number of generated tokens that a whole answer states, or 0."""
    try:
        usage = msgspec.json.decode(body, type=_Answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0
    return 0 if usage is None else max(0, usage.completion_tokens + usage.output_tokens)


def _headers(answer: WorkerConnection) -> list[tuple[bytes, bytes]]:
    return [one for one in answer.headers if one[0] in KEPT_HEADERS]


def _worker_header(worker: Worker) -> tuple[bytes, bytes]:
    return b"x-kvloom-worker", worker.name.encode("ascii", "replace")


async def _respond(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})
