"""Functions that the Responses API and the Messages API share, to read requests and translate them to chats."""

from __future__ import annotations

from typing import Any

import msgspec

from kvloom.serve.errors import bad_request

from .json_limits import check_structure, check_values, paused_gc
from .request_fields import RequestFields

__all__ = ["copied_fields", "read_object", "text_of_parts"]

NOT_COPIED = {
    "max_tokens",
    "logprobs",
    "n",
    "best_of",
    "use_beam_search",
    "beam_width",
    "response_format",
    "stream_options",
    "read",
}
COPIED = [
    *(name for name in RequestFields.__struct_fields__ if name not in NOT_COPIED),
    *("parallel_tool_calls", "chat_template_kwargs"),
]
"""Fields of chats that the other APIs accept under the same name."""


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises ApiError if the body is not a JSON object."""
    if not body.strip():
        raise bad_request("the request body is empty: send a JSON object")
    check_structure(body)
    try:
        with paused_gc():
            given = msgspec.json.decode(body, type=dict[str, Any])
            check_values([given], "the request body", "")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request body is not a JSON object: {error}") from None
    return given


def copied_fields(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in COPIED if name in given}


def text_of_parts(content: Any, kinds: tuple[str, ...], where: str, param: str) -> str:
    """Return the text of `content`, which is a text or a list of parts. The texts of the parts are joined. Raises
    ApiError for a part whose type is not in `kinds`, and for other content.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: content must be a text or a list of parts", param)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise bad_request(
                f"{where}: content of type {str(kind)[:64]!r} is not supported: send {kinds[0]}", param
            )
        texts.append(part["text"])
    return "".join(texts)
