"""The HTTP client that forwards requests to workers: POST over connections that stay open, parsed by httptools.

A router spends most of its time per request in its HTTP client. This client has only the functions that forwarding
needs, and takes about a fifth of the time of a general client. A general client (aiohttp) sends all other requests.

    post ──▶ idle connection, or a new one ──▶ WorkerConnection: status, headers, read_any … ──▶ release ──▶ idle
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

__all__ = ["UnreachableError", "WorkerClient", "WorkerConnection"]

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 20.0
"""A connection that was idle for more than this many seconds is not used again."""
END_SECONDS = 0.5
"""After `release`, a connection stays open if the end of the answer arrives within this many seconds. Otherwise it is
closed.
"""
MAX_BUFFERED = 1 << 18
"""Largest number of received bytes of an answer that may wait until the client reads them. While more bytes wait, no
data is read from the connection."""


class UnreachableError(ConnectionError):
    """Raised if a worker accepts no connection."""


@dataclass(slots=True, eq=False)
class _Place:
    """The address of a worker, and the idle connections to it. `context` has the TLS settings, and `prefix` is the path
    of the worker's URL."""

    host: str
    port: int
    context: ssl.SSLContext | None
    prefix: str
    name: str
    """Value of the header `host`."""
    idle: list[WorkerConnection] = field(default_factory=list)


class WorkerConnection(asyncio.Protocol):
    """A connection to a worker, and the answer that arrives on it. The caller must call `release` or `close` at the
    end."""

    _transport: asyncio.Transport

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._body: list[bytes] = []
        self._size, self._deadline = 0, 0.0
        self._is_paused = self._is_released = self._stays_open = False
        self.is_closed = False
        self.is_complete = True
        """Whether the end of the answer has arrived."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the answer; names are in lower case."""
        self.idle_since = 0.0

    async def start(self, request: bytes, deadline: float) -> None:
        """Send a request, and wait for the status and headers. Raises ConnectionError if the connection breaks.
        Raises TimeoutError if this call or a later read has to wait beyond `deadline`, a time of the event loop."""
        self._deadline = deadline
        self.status, self.headers, self._body, self._size = 0, [], [], 0
        self.is_complete = self._is_released = False
        self._transport.write(request)
        while not self.status:
            if self.is_closed:
                raise ConnectionResetError("the worker closed the connection before its answer")
            await self._wait()

    async def read_any(self) -> bytes:
        """Return the data that has arrived. Waits if there is no data. Return b"" at the end of the answer. Raises
        ConnectionError if the connection breaks before the end."""
        while not self._body:
            if self.is_complete:
                return b""
            if self.is_closed:
                raise ConnectionResetError("the worker closed the connection in its answer")
            await self._wait()
        return self.take()

    async def read(self) -> bytes:
        """Return the rest of the answer."""
        parts = []
        while data := await self.read_any():
            parts.append(data)
        return b"".join(parts)

    def take(self) -> bytes:
        """Return the data that has arrived. Does not wait."""
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body, self._size = [], 0
        if self._is_paused and not self.is_closed:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        """Make the connection available for other requests. If the end of the answer has not arrived, wait for it up to
        END_SECONDS in the background.
        """
        self._is_released = True
        self.take()
        if self.is_complete:
            self._rest()
        else:
            asyncio.get_running_loop().call_later(END_SECONDS, self._close_unless_complete, self.headers)

    def close(self) -> None:
        """Close the connection. The worker then aborts the request."""
        self._transport.abort()

    def _close_unless_complete(self, headers: object) -> None:
        if self.headers is headers and not self.is_complete:  # still the same answer
            self.close()

    def _rest(self) -> None:
        if self.is_closed or not self._stays_open:
            self.close()
            return
        self.idle_since = asyncio.get_running_loop().time()
        self._place.idle.append(self)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- called by the event loop -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.is_closed = True
            self._transport.abort()
        if self._size > MAX_BUFFERED and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if self in self._place.idle:
            self._place.idle.remove(self)
        names = {name for name, _ in self.headers}
        if error is None and self.status and not names & {b"content-length", b"transfer-encoding"}:
            self.is_complete = True  # such an answer ends with its connection
        self._wake()

    # -- called by the parser -----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status, self._stays_open = status, self._parser.should_keep_alive()
        else:
            self.headers = []

    def on_body(self, body: bytes) -> None:
        if not self._is_released:
            self._body.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        if self.status and not self.is_complete:
            self.is_complete = True
            if self._is_released:
                self._rest()


class WorkerClient:
    """Sends POST requests to workers. `tls` has the TLS settings for `https:` workers; the default trusts the
    authorities of the system. Must be used by one event loop."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._places: dict[str, _Place] = {}

    async def post(
        self, url: str, path: str, headers: Mapping[str, str], data: bytes, seconds: float
    ) -> WorkerConnection:
        """Send a request to the worker at `url`, and return the connection when status and headers have arrived. The
        whole answer must arrive within `seconds`. Otherwise this call or a later read raises TimeoutError.

        An idle connection may break at any time. The request is then sent again on another connection. Raises
        UnreachableError if the worker accepts no connection, and ConnectionError if a new connection breaks.
        """
        place = self._places.get(url)
        if place is None:
            place = self._places[url] = _place(url, self._tls)
        lines = [
            f"POST {place.prefix}{_quoted(path)} HTTP/1.1\r\nhost: {place.name}\r\ncontent-length: {len(data)}\r\n"
        ]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        request = "".join([*lines, "\r\n"]).encode("latin-1") + data
        now = asyncio.get_running_loop().time()
        while place.idle:
            connection = place.idle.pop()
            if connection.is_closed or connection.idle_since < now - IDLE_SECONDS:
                connection.close()
            elif await _started(connection, request, now + seconds):
                return connection
        connection = await self._connect(place, min(CONNECT_SECONDS, seconds))
        if not await _started(connection, request, now + seconds):
            raise ConnectionResetError("the worker closed the connection before its answer")
        return connection

    async def _connect(self, place: _Place, seconds: float) -> WorkerConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: WorkerConnection(place), place.host, place.port, ssl=place.context
                )
        except TimeoutError:
            raise
        except OSError as error:
            raise UnreachableError(f"{place.name}: {error}") from None
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for place in self._places.values():
            for connection in list(place.idle):
                connection.close()


async def _started(connection: WorkerConnection, request: bytes, deadline: float) -> bool:
    """Send a request on a connection, and wait for the headers of the answer. If the connection breaks before they
    arrive, close it and return False.
    """
    try:
        await connection.start(request, deadline)
    except ConnectionError:
        connection.close()
        return False
    except BaseException:
        connection.close()
        raise
    return True


def _place(url: str, tls: ssl.SSLContext | None) -> _Place:
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if is_secure else 80)
    context = (tls or ssl.create_default_context()) if is_secure else None
    return _Place(host, port, context, quote(parts.path), parts.netloc.rpartition("@")[2])


@lru_cache(maxsize=256)
def _quoted(path: str) -> str:
    """Return a path with all special characters escaped, as a request line requires. The server has decoded the path of
    the client's request, so it may contain any character.
    """
    return quote(path)
