"""Who watches requests: each that begins gets a record, which is counted, traced and recorded when it has ended.

    generation ── begin, first, end ──▶ Observer ──▶ Records (explanations), Metrics, Traces, Recorder
    the engine ── stories, answers  ──▶

Without it requests run just the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvloom.serve.worker.messages import Add, Delta, Story

from .metrics import Metrics
from .request_records import Record, Records
from .trace_recorder import Recorder

if TYPE_CHECKING:
    from .otel_traces import Traces

__all__ = ["Observer"]

log = logging.getLogger("kvloom.serve")


@dataclass(slots=True)
class _Open:
    """A request that has not ended. Its prompts and answers are kept only where traffic is recorded."""

    record: Record
    context: object = None
    messages: dict[int, Add] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)


class Observer:
    """One server's. `traces` and `recorder` are there where they were asked for."""

    def __init__(
        self, metrics: Metrics, traces: Traces | None = None, recorder: Recorder | None = None
    ) -> None:
        self.metrics, self.traces, self.recorder = metrics, traces, recorder
        self.records = Records()
        self._open: dict[int, _Open] = {}
        self._zero = time.monotonic()

    def begin(
        self, id_: str, endpoint: str, messages: list[Add], began: float, headers: Mapping[str, str]
    ) -> Record:
        """Prompts are about to be sent to the engine. `began` is when their request came, on the monotonic clock."""
        first = messages[0]
        record = Record(
            id_,
            first.tenant,
            {message.id: len(message.prompt) for message in messages},
            first.params.n * len(messages),
            first.params.max_tokens,
            first.stream,
            time.time() - (time.monotonic() - began),
            began,
            endpoint,
        )
        if not self.metrics.observe and self.traces is None and self.recorder is None:
            return record
        one = _Open(record, None if self.traces is None else self.traces.context(headers))
        if self.recorder is not None:
            one.messages = {message.id: message for message in messages}
        self._open.update(dict.fromkeys(record.prompts, one))
        self.records.add(record)
        return record

    def tell(self, story: Story) -> None:
        """The engine told how a prompt goes."""
        one = self._open.get(story.id)
        if one is not None and story.began:
            one.record.stories[story.id] = story

    def answer(self, delta: Delta) -> None:
        """A piece of an answer came; the first answer to each prompt is what a recording keeps."""
        one = self._open.get(delta.id)
        if one is not None and one.messages and delta.index == 0:
            one.answers.setdefault(delta.id, []).extend(delta.tokens)

    def end(self, record: Record) -> None:
        """A request has ended, well or not."""
        record.ended = time.monotonic()
        if record.failure is None and not record.finishes and not record.gone:
            record.failure = "interrupted"  # nobody said why: the server is going down, or has a fault
        self.metrics.count(record)
        opened = [self._open.pop(id_, None) for id_ in record.prompts]
        one = opened[0]
        if one is None:
            return
        if self.traces is not None:
            self.traces.tell(record, one.context)
        if self.recorder is not None:
            try:
                self._keep(one, self.recorder)
            except OSError as error:  # a full disk costs the recording, never an answer
                log.warning("recording ends here: %s", error)
                self._drop_recorder()

    def close(self) -> None:
        """Write and send what waits."""
        if self.traces is not None:
            self.traces.close()
        self._drop_recorder()

    def _drop_recorder(self) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            with suppress(OSError):
                recorder.close()

    def _keep(self, one: _Open, recorder: Recorder) -> None:
        """Record names, lengths and times of what the cache has seen of a request."""
        record = one.record
        for id_, message in one.messages.items():
            if id_ in record.stories and message.store and message.read:
                answer = one.answers.get(id_, [])
                recorder.add(
                    record.began - self._zero,
                    message.prompt + answer,
                    len(message.prompt),
                    tenant=message.tenant,
                    adapter=message.salt,
                    session=message.session,
                    ending=record.finish_reason,
                    last_computed=False,
                )
        recorder.flush()
