"""HTTP requests to a running server, for `kvloom explain`, `kvloom top` and benchmarks."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener, urlopen

__all__ = ["KEY", "fetch", "open_url"]

SECONDS = 10
UNAUTHORIZED = 401
KEY = "KVLOOM_API_KEY"
"""Name of the environment variable that contains the API key."""


def fetch(url: str, path: str, key: str | None = None) -> dict[str, Any]:
    """Return the JSON of a server's endpoint. Raises ValueError with the server's error message, and OSError if the
    server is unreachable."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with open_url(Request(url + path, headers=headers)) as answer:
            return dict(json.loads(answer.read()))
    except HTTPError as error:
        try:
            message = str(json.loads(error.read())["error"]["message"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{url} returned status {error.code}: is it a kvloom server?") from None
        if error.code == UNAUTHORIZED:
            message = f"{message.partition(':')[0]}: use --api-key, or set ${KEY}"
        raise ValueError(message) from None
    except URLError as error:
        why = getattr(error.reason, "strerror", None) or error.reason
        raise OSError(
            f"no server at {url} ({why}): start `kvloom serve`, or choose another with --url"
        ) from None
    except TimeoutError:
        raise OSError(f"{url} did not respond within {SECONDS} s") from None
    except (HTTPException, json.JSONDecodeError, TypeError):
        raise ValueError(f"{url} is not a kvloom server") from None


def open_url(request: Request, seconds: float = SECONDS) -> Any:
    """Send a request and return the response. Requests to this machine bypass the proxy."""
    host = urlsplit(request.full_url).hostname
    if host in ("localhost", "127.0.0.1", "::1"):
        return build_opener(ProxyHandler({})).open(request, timeout=seconds)
    return urlopen(request, timeout=seconds)
