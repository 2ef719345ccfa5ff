"""The router's HTTP application.

/v1/…                            forwarded to the best worker
/v1/models, /health, /version    answered by the router itself
/metrics, /workers               metrics of the router; the workers and their state
/dashboard, /kvloom/state        the fleet page, and its data
/register, /unregister, /query   the indexer API of Mooncake's RFC 1403, for other gateways
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import lru_cache
from importlib import metadata
from typing import Any

import msgspec

from kvloom.serve.api import check_structure, is_loopback
from kvloom.serve.auth import BodyLimiter, HeldBody
from kvloom.serve.dashboard import HEADERS, file_type, page_files
from kvloom.serve.errors import ApiError, bad_request, not_found

from .call import Call
from .fleet import Fleet, Offer
from .fleet_state import FleetState
from .proxy import Proxy

__all__ = ["RouterApplication"]

log = logging.getLogger("kvloom.router")
Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]
FORWARDED_PATHS = ("/v1/", "/tokenize", "/detokenize")
COUNTED_PATHS = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/models",
    )
)
"""Paths with their own counter of requests. Clients may send any other path, so all others share one counter."""
DEAD_STATUS = 503
PAGE_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class RouterApplication:
    """An ASGI application over one fleet.

    - Unless `is_public`, it serves only requests whose headers Host and Origin have loopback names.
    - If `admin_key` is not None, the list of workers, the data of the dashboard and the indexer API require this key.
      With `metrics_need_key`, the metrics require it, too.
    - `max_body` limits the bytes of a request body. A body must arrive within `request_seconds`.
    - `body_memory` limits the bytes of all bodies in memory. A body counts until its answer has ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        proxy: Proxy,
        admin_key: str | None = None,
        max_body: int = 64 << 20,
        is_public: bool = False,
        body_memory: int = 2 << 30,
        request_seconds: float = 30.0,
        metrics_need_key: bool = False,
    ) -> None:
        self._metrics_need_key = metrics_need_key
        self.fleet, self.proxy, self.state = fleet, proxy, FleetState(fleet, proxy)
        self._bodies, self._request_seconds = BodyLimiter(body_memory), request_seconds
        self._files = page_files()
        self._admin_key, self._max_body, self._is_public = admin_key, max_body, is_public

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        status = [0]

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            self._check_host(headers)
            if method == "POST" and path.startswith(FORWARDED_PATHS):
                await self._forward(path, headers, receive, counted)
            else:
                await self._own(method, path, headers, receive, counted)
        except ApiError as error:
            if not status[0]:
                await _respond(counted, error.status, error.body, error.headers)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s %s failed", method, path)
            if not status[0]:
                await _respond(counted, 500, ApiError(500, "internal error; see the router's log").body)
        key = (path if path in COUNTED_PATHS else "other", status[0])
        self.proxy.counts.requests[key] = self.proxy.counts.requests.get(key, 0) + 1

    def _check_host(self, headers: dict[str, str]) -> None:
        """On a router that is not public, refuse requests whose header Host or Origin has no loopback name. Otherwise
        a web page could use the router through a browser on this machine."""
        if self._is_public:
            return
        for name in (
            headers.get("host", "localhost"),
            headers.get("origin", "http://localhost").partition("://")[2],
        ):
            if not _is_loopback(name):
                raise ApiError(
                    403, f"{name!r} is not a loopback name: start the router with --admin-key and --host"
                )

    def _require_admin(self, headers: dict[str, str]) -> None:
        if self._admin_key is not None and not self._is_admin(headers):
            raise ApiError(401, "the router's admin key is required: send it as `Authorization: Bearer KEY`")

    def _is_admin(self, headers: dict[str, str]) -> bool:
        """Return whether a request has the admin key."""
        given = headers.get("authorization", "").removeprefix("Bearer ")
        return self._admin_key is not None and hmac.compare_digest(given.encode(), self._admin_key.encode())

    async def _forward(self, path: str, headers: dict[str, str], receive: Receive, send: Send) -> None:
        with self._bodies.hold() as held:
            raw = await self._body(receive, held)
            await self._forward_body(Call(path, headers, _json_object(raw), raw), receive, send)

    async def _forward_body(self, call: Call, receive: Receive, send: Send) -> None:
        """Forward a call. Ends if the client disconnects."""
        task = asyncio.current_task()
        assert task is not None
        gone = [False]

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone[0] = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await self.proxy.serve(call, send)
        except asyncio.CancelledError:
            if not gone[0]:
                raise
            task.uncancel()  # the client is gone
        finally:
            watcher.cancel()

    async def _own(
        self, method: str, path: str, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        if method == "GET" and path == "/health":
            alive = sum(worker.answers for worker in self.fleet.workers.values() if worker.url)
            status = 200 if alive else DEAD_STATUS
            await _json(send, {"status": "ok" if alive else "no worker", "workers": alive}, status)
        elif method == "GET" and path == "/version":
            await _json(send, {"version": metadata.version("kvloom")})
        elif method == "GET" and path == "/v1/models":
            if not self._is_admin(headers):
                await self.proxy.check_key(headers)
            await _json(send, {"object": "list", "data": self._models()})
        elif method == "GET" and path == "/metrics":
            if self._metrics_need_key:
                self._require_admin(headers)
            body = "".join(_metrics(self.fleet, self.proxy)).encode()
            await _respond(send, 200, body, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])
        elif method == "GET" and path == "/workers":
            self._require_admin(headers)
            await _json(send, {"workers": [_worker(self.fleet, name) for name in self.fleet.workers]})
        elif method == "GET" and path == "/kvloom/state":
            self._require_admin(headers)
            kept = [(b"content-type", b"application/json"), (b"cache-control", b"no-store"), *PAGE_HEADERS]
            await _respond(send, 200, msgspec.json.encode(self.state.to_dict()), kept)
        elif method == "GET" and path in ("/", "/dashboard/"):
            await _respond(send, 307, b"", [(b"location", b"/dashboard"), *PAGE_HEADERS])
        elif method == "GET" and (path == "/dashboard" or path.removeprefix("/dashboard/") in self._files):
            name = "fleet.html" if path == "/dashboard" else path.removeprefix("/dashboard/")
            kind = [(b"content-type", file_type(name).encode()), (b"cache-control", b"no-cache")]
            await _respond(send, 200, self._files[name], [*kind, *PAGE_HEADERS])
        elif method == "POST" and path in ("/register", "/unregister", "/query"):
            self._require_admin(headers)
            answers = {"/register": self._register, "/unregister": self._unregister, "/query": self._query}
            with self._bodies.hold() as held:
                asked = _json_object(await self._body(receive, held))
                await answers[path](asked, send)
        else:
            raise not_found(method, path)

    def _models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [
            {"id": name, "object": "model", "owned_by": "kvloom", "workers": len(self.fleet.candidates(name))}
            for name in self.fleet.models
        ]
        for model in self.fleet.models:
            offers = [
                worker.models[model] for worker in self.fleet.workers.values() if model in worker.models
            ]
            for adapter in dict.fromkeys(name for offer in offers for name in offer.adapters):
                workers = len(self.fleet.candidates(model, adapter))
                entry = {"id": adapter, "object": "model", "owned_by": "kvloom", "parent": model}
                found.append({**entry, "workers": workers})
        return found

    async def _register(self, body: dict[str, Any], send: Send) -> None:
        """Add a worker if `body` has the field `url`. Otherwise add an instance, as RFC 1403 describes. The router
        follows the events of this instance at the address in `endpoint`, but sends no requests to it.
        """
        url, endpoint = body.get("url"), body.get("endpoint")
        name = str(body.get("instance_id") or url or endpoint or "")
        if not name or not (isinstance(url, str) or isinstance(endpoint, str)):
            raise bad_request(
                "send url (a worker's HTTP address) or endpoint (the ZMQ address of its events)", "url"
            )
        model = body.get("model_name") or body.get("modelname") or body.get("model")
        if url is not None and not (isinstance(url, str) and url.startswith(("http://", "https://"))):
            raise bad_request(f"url {url!r:.100} must start with http:// or https://", "url")
        if endpoint is not None and not isinstance(model, str):
            raise bad_request("endpoint needs model_name", "model_name")
        for field in ("endpoint", "replay_endpoint"):
            given = body.get(field)
            if given is not None and not (isinstance(given, str) and given.startswith(("tcp://", "ipc://"))):
                raise bad_request(
                    f"{field} {given!r:.100} is not a ZMQ address: use one like tcp://127.0.0.1:5557", field
                )
        if not isinstance(body.get("hash_model"), str | None):
            raise bad_request("hash_model must be a text", "hash_model")
        if isinstance(model, str):
            hash_model = body.get("hash_model")
            offer = Offer(hash_model, events=endpoint, replay=body.get("replay_endpoint"))
            self.fleet.register(name, (url or "").rstrip("/"), model, offer)
        else:
            self.fleet.add(str(url).rstrip("/"), name)
        await _json(send, {"status": "ok", "instance_id": name}, 201)

    async def _unregister(self, body: dict[str, Any], send: Send) -> None:
        name = str(body.get("instance_id") or body.get("url") or body.get("endpoint") or "")
        if not await self.fleet.remove(name.rstrip("/") if name.startswith("http") else name):
            raise ApiError(404, f"no worker {name!r} is registered", "instance_id")
        await _json(send, {"status": "ok", "instance_id": name})

    async def _query(self, body: dict[str, Any], send: Send) -> None:
        """Return how many tokens of a prompt each instance (worker) has cached, by medium."""
        from .prompt_keys import PromptKeys, roots_of

        model = body.get("model_name") or body.get("modelname") or body.get("model")
        tokens = body.get("token_ids") or body.get("tokens")
        adapter = None
        if isinstance(model, str) and model not in self.fleet.models:
            base = self.fleet.base_of(model)
            model, adapter = (model, None) if base is None else (base, model)
        if not isinstance(model, str) or model not in self.fleet.models:
            raise ApiError(404, f"model {model!r:.100} is not served here", "model_name", "model_not_found")
        try:
            from kvloom.core import token_bytes

            keys = PromptKeys(token_bytes(tokens or []), [], len(tokens or []))
        except (ValueError, TypeError, OverflowError) as error:
            raise bad_request(f"token_ids: {error}", "token_ids") from None
        served = self.fleet.models[model]
        names = [name for name in served.index.workers if name in self.fleet.workers]
        tenant, salt = (
            str(body.get("tenant_id") or body.get("tenant") or ""),
            str(body.get("cache_salt") or ""),
        )
        instances: dict[str, Any] = {}
        roots = roots_of(self.fleet, model, names, tenant, salt, False, adapter)
        for root, mine in roots.items():
            lengths = served.index.lengths(keys.hashes(root))
            for name in mine:
                gpu, cpu, disk, store = lengths[name]
                instances[name] = {
                    "longest_matched": store, "gpu": gpu, "cpu": cpu, "disk": disk, "store": store, "dp": {"0": gpu},
                }  # fmt: skip
        scores = {name: {"0": one["gpu"]} for name, one in instances.items()}
        await _json(send, {"scores": scores, "frequencies": [], "instances": instances})

    async def _body(self, receive: Receive, held: HeldBody) -> bytes:
        """Return the body of a request. Counts each part that arrives in `held`. Raises ApiError for too many bytes, or
        for a slow client."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._request_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(408, "the client disconnected before its request was complete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    held.add(len(parts[-1]))
                    if size > self._max_body:
                        raise ApiError(
                            413, f"the body exceeds {self._max_body:,} bytes: send less, or raise --max-body"
                        )
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408, f"the request body did not arrive within {self._request_seconds:g} seconds"
            ) from None


@lru_cache(maxsize=1024)
def _is_loopback(name: str) -> bool:
    """Return whether a host name, with or without a port, belongs to this machine."""
    host, _, port = name.rpartition(":")
    return is_loopback((host if port.isdigit() else name).strip("[]"))


def _json_object(raw: bytes) -> dict[str, Any]:
    check_structure(raw)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object")
    return body


def _worker(fleet: Fleet, name: str) -> dict[str, Any]:
    worker = fleet.workers[name]
    models = {}
    for model in worker.models:
        load = fleet.models[model].scorer.loads.get(name)
        following = worker.subscribers.get(model)
        models[model] = {
            "requests": 0 if load is None else len(load.requests),
            "waiting": 0 if load is None else load.waiting,
            "tokens": 0 if load is None else load.tokens,
            "events": None if following is None else msgspec.to_builtins(following[0].counts),
        }
    encodes = {"encodes": list(worker.encodes)} if worker.encodes else {}
    return {"name": name, "url": worker.url, "alive": worker.is_alive, "models": models, **encodes}


def _metrics(fleet: Fleet, proxy: Proxy) -> Iterator[str]:
    counts = proxy.counts
    yield "# TYPE kvloom_router_requests_total counter\n"
    for (path, status), count in sorted(counts.requests.items()):
        yield f'kvloom_router_requests_total{{path="{_escaped(path)}",status="{status}"}} {count}\n'
    totals = {
        "failovers": counts.failovers,
        "continued_streams": counts.continued_streams,
        "diverged_streams": counts.diverged_streams,
        "prompt_tokens": counts.prompt_tokens,
        "expected_hit_tokens": counts.expected_hit_tokens,
        "hand_overs": counts.hand_overs,
        "named_encoders": counts.named_encoders,
        "slo_refused": counts.slo_refused,
        "copied_prefixes": proxy.replicator.copied,
        "failed_copies": proxy.replicator.failed,
        "untokenised_prompts": proxy.reader.fallbacks,
        "worker_deaths": fleet.deaths,
    }
    for name, value in totals.items():
        yield f"# TYPE kvloom_router_{name}_total counter\nkvloom_router_{name}_total {value}\n"
    for name, histogram in (("ttft", counts.ttft), ("overhead", counts.overhead)):
        yield f"# TYPE kvloom_router_{name}_seconds histogram\n"
        reached = 0
        for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            reached += count
            yield f'kvloom_router_{name}_seconds_bucket{{le="{bound}"}} {reached}\n'
        yield f"kvloom_router_{name}_seconds_sum {histogram.total}\nkvloom_router_{name}_seconds_count {reached}\n"
    yield f"# TYPE kvloom_router_waiting gauge\nkvloom_router_waiting {proxy.queue.waiting}\n"
    yield f"# TYPE kvloom_router_running gauge\nkvloom_router_running {proxy.queue.running}\n"
    yield "# TYPE kvloom_router_worker_alive gauge\n"
    for worker in fleet.workers.values():
        yield f'kvloom_router_worker_alive{{worker="{_escaped(worker.name)}"}} {int(worker.is_alive)}\n'
    yield "# TYPE kvloom_router_index_blocks gauge\n"
    for model, served in fleet.models.items():
        yield f'kvloom_router_index_blocks{{model="{_escaped(model)}"}} {len(served.index)}\n'
    yield "# TYPE kvloom_router_events_total counter\n"
    for worker in fleet.workers.values():
        for model, (subscriber, _) in worker.subscribers.items():
            labels = f'worker="{_escaped(worker.name)}",model="{_escaped(model)}"'
            for name in ("events", "gaps", "replays", "snapshots"):
                value = getattr(subscriber.counts, name)
                yield f'kvloom_router_events_total{{{labels},kind="{name}"}} {value}\n'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


async def _json(send: Send, data: Any, status: int = 200) -> None:
    await _respond(send, status, msgspec.json.encode(data))


async def _respond(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = headers or [(b"content-type", b"application/json")]
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})
