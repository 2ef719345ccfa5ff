"""Decodes the images and audio clips of requests and expands their placeholders. A separate thread does this, for one tenant after
another."""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from kvloom.engine import Transcription, clip_frames, encode_image_prompt, load_processor
from kvloom.models.paged import Image
from kvloom.models.vision import EncoderDecoder, Vision
from kvloom.serve.images import decode_image

from .messages import Add, ImagePrompt

__all__ = ["ImagePrompts", "ImagesBusyError"]

MAX_WAITING_BYTES = 256 << 20
"""Largest number of encoded bytes of waiting images. Further images are refused until some have been decoded."""


class ImagesBusyError(ValueError):
    """Raised if too many images wait. A later attempt may succeed."""


class ImagePrompts:
    """Prepares requests with images in a thread. The model's image processor is loaded from the folder `model`, unless
    `processor` is given.
    """

    def __init__(self, model: str, vision: Vision, processor: Any = None) -> None:
        self._model, self._vision, self._processor = model, vision, processor
        self._waiting: OrderedDict[str, deque[Add]] = OrderedDict()  # by tenant; the next turn first
        self._waiting_bytes = 0
        self._current: tuple[Add, Future[tuple[Add, list[Image] | Transcription]]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")

    def __bool__(self) -> bool:
        """Whether requests wait or are being prepared."""
        return self._current is not None or bool(self._waiting)

    def submit(self, message: Add) -> None:
        """Queue a request with images. Raises ImagesBusyError if too many requests wait."""
        size = _encoded_bytes(message)
        if self._waiting_bytes + size > MAX_WAITING_BYTES and self._waiting_bytes:
            raise ImagesBusyError(
                f"images of other requests wait with {self._waiting_bytes:,} bytes; the limit is "
                f"{MAX_WAITING_BYTES:,}: try again later"
            )
        self._waiting.setdefault(message.tenant, deque()).append(message)
        self._waiting_bytes += size
        self._start()

    def cancel(self, id_: int) -> None:
        """Drop a request. If a thread is preparing the request, its result is dropped later."""
        for tenant, messages in list(self._waiting.items()):
            for message in [one for one in messages if one.id == id_]:
                messages.remove(message)
                self._waiting_bytes -= _encoded_bytes(message)
            if not messages:
                del self._waiting[tenant]
        if self._current is not None and self._current[0].id == id_:
            self._current = msgspec.structs.replace(self._current[0], id=-1), self._current[1]

    def take(self) -> tuple[Add, list[Image] | Transcription | ValueError] | None:
        """Return a prepared request and its images, or the reason why it is refused. A request with a task has a
        transcription, which makes its prompts. Return None if no request is ready. Does not wait.
        """
        if self._current is None or not self._current[1].done():
            return None
        (message, future), self._current = self._current, None
        self._start()
        if message.id < 0:  # cancelled
            return self.take()
        error = future.exception()
        if error is None:
            return future.result()
        return message, error if isinstance(error, ValueError) else ValueError(f"images: {error}")

    def _start(self) -> None:
        """Start the next request in the thread, if the thread is idle."""
        if self._current is not None or not self._waiting:
            return
        tenant, messages = self._waiting.popitem(last=False)
        message = messages.popleft()
        if messages:
            self._waiting[tenant] = messages
        self._waiting_bytes -= _encoded_bytes(message)
        self._current = message, self._thread.submit(self._prepare, message)

    def _prepare(self, message: Add) -> tuple[Add, list[Image] | Transcription]:
        """Return the request with its expanded prompt, and its images. Return a transcription for a request with a
        task."""
        given = message.image_prompt
        assert given is not None
        self._processor = self._processor or load_processor(self._model)
        if given.task:
            return self._transcription(message, given)
        images = [decode_image(data) for data in given.images]
        special = given.add_special_tokens
        tokens, inputs = encode_image_prompt(
            self._processor, self._vision, given.text, images, given.audio, add_special_tokens=special
        )
        count, params = len(tokens), message.params
        if count > given.max_prompt_tokens:
            raise ValueError(
                f"messages: {count} prompt tokens, with those of the images and audio clips, exceed the limit of "
                f"{given.max_prompt_tokens}: send fewer or smaller ones"
            )
        if given.max_tokens is not None and count + params.max_tokens > given.max_tokens:
            params = replace(params, max_tokens=given.max_tokens - count)
        read = [self._vision.read_image(one, message.tenant, message.read, message.store) for one in inputs]
        return msgspec.structs.replace(message, prompt=tokens, params=params, image_prompt=None), read

    def _transcription(self, message: Add, given: ImagePrompt) -> tuple[Add, Transcription]:
        vision, params = self._vision, replace(message.params, logprobs=message.params.logprobs or 0)
        if not isinstance(vision, EncoderDecoder) or vision.reads_text:
            raise ValueError("this model does not transcribe audio: use a chat with audio clips")
        frames, seconds = clip_frames(self._processor, given.audio[0])
        made = Transcription(
            vision, frames, seconds, params, given.max_tokens, given.task, given.language or None, given.timestamps
        )  # fmt: skip
        return msgspec.structs.replace(message, image_prompt=None), made


def _encoded_bytes(message: Add) -> int:
    given = message.image_prompt
    return 0 if given is None else sum(map(len, (*given.images, *given.audio)))
