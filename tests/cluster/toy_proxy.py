"""The two calls of a prefill/decode proxy, as vLLM's toy proxy makes them: prefill with one token, then decode."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from tests.serve.running import Running

__all__ = ["handed_over", "handed_over_meanwhile"]


def handed_over(prefill: Running, decode: Running, **fields: Any) -> dict[str, Any]:
    """Prefill, then decode with the `kv_transfer_params` of the answer. Without an answer, decode alone."""
    asked = {**fields, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    try:
        params = prefill.complete(**asked).get("kv_transfer_params")
    except (AssertionError, OSError):
        params = None
    return decode.complete(**fields, kv_transfer_params=params)


def handed_over_meanwhile(prefill: Running, decode: Running, address: str, **fields: Any) -> dict[str, Any]:
    """Both calls at once: the decode worker pulls pages while the prefill worker computes. `address`: of its pages."""
    host, _, port = address.rpartition(":")
    asked = {**fields, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}

    def call() -> None:
        with suppress(AssertionError, OSError):  # the decode worker computes what is missing
            prefill.complete(**asked)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    params = {"do_remote_prefill": True, "remote_host": host, "remote_port": int(port)}
    found = decode.complete(**fields, kv_transfer_params=params)
    thread.join(60)
    return found
