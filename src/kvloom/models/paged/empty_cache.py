"""A cache interface for modeling code that always reports an empty cache. To the model, the packed tokens of a
step therefore look like a new prompt."""

from __future__ import annotations

from typing import Any

__all__ = ["EmptyCache"]


class EmptyCache:
    """The common methods of objects that replace a Hugging Face cache. Subclasses handle writes."""

    is_compileable = False
    layers = ()

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[Any, int]:
        return query_length, 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_linear_cache(self, *_: Any) -> Any:
        return None

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any) -> bool:
        return False
