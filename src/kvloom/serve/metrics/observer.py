"""Observes requests. Each request gets a record. When the request finishes, the record is counted, traced and written
to the recording.

    generation ── start, finish       ──▶ RequestObserver ──▶ RequestRecords, Metrics, Traces, Recorder
    engine     ── progress, deltas    ──▶

The observer does not affect requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvloom.serve.worker import Add, Delta, RequestProgress

from .metrics import Metrics
from .request_records import RequestRecord, RequestRecords
from .trace_recorder import Recorder

if TYPE_CHECKING:
    from .otel_traces import Traces

__all__ = ["RequestObserver"]

log = logging.getLogger("kvloom.serve")


@dataclass(slots=True)
class _OpenRequest:
    """An open request. `messages` (the prompts) and `answers` (their output tokens) are filled only while traffic is
    recorded. `context` is the trace of the client."""

    record: RequestRecord
    context: object = None
    messages: dict[int, Add] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)


class RequestObserver:
    """Observes the requests of one model. `traces` and `recorder` are None if disabled. Models may share `records`."""

    def __init__(
        self,
        metrics: Metrics,
        traces: Traces | None = None,
        recorder: Recorder | None = None,
        records: RequestRecords | None = None,
    ) -> None:
        self.metrics, self.traces, self.recorder = metrics, traces, recorder
        self.records = RequestRecords() if records is None else records
        self._open: dict[int, _OpenRequest] = {}
        self._started = time.monotonic()

    def start(
        self, id_: str, endpoint: str, messages: list[Add], started: float, headers: Mapping[str, str]
    ) -> RequestRecord:
        """Create and return the record of a request. Call this method when the prompts are sent to the engine.
        `started` is the time at which the request arrived, on the monotonic clock. `headers` may contain the client's
        trace.
        """
        first = messages[0]
        record = RequestRecord(
            id_,
            first.tenant,
            {message.id: len(message.prompt) for message in messages},
            first.params.n * len(messages),
            first.params.max_tokens,
            first.stream,
            time.time() - (time.monotonic() - started),
            started,
            endpoint,
            model=self.metrics.model,
            adapter=first.lora,
        )
        if not self.metrics.is_enabled and self.traces is None and self.recorder is None:
            return record
        one = _OpenRequest(record, None if self.traces is None else self.traces.context(headers))
        if self.recorder is not None:
            # Equal tokens with different images are different pages, which a recording could not distinguish.
            one.messages = {message.id: message for message in messages if message.image_prompt is None}
        self._open.update(dict.fromkeys(record.prompts, one))
        self.records.add(record)
        return record

    def record_progress(self, progress: RequestProgress) -> None:
        """Store the progress of a prompt."""
        one = self._open.get(progress.id)
        if one is not None and progress.started:
            one.record.progress[progress.id] = progress
            if progress.prompt_tokens is not None:
                one.record.prompts[progress.id] = progress.prompt_tokens

    def record_tokens(self, delta: Delta) -> None:
        """Store output tokens for the recording. Only the first answer to each prompt is recorded."""
        one = self._open.get(delta.id)
        if one is not None and one.messages and delta.index == 0:
            one.answers.setdefault(delta.id, []).extend(delta.tokens)

    def finish(self, record: RequestRecord) -> None:
        """Count and trace a request that has succeeded or failed, and write it to the recording."""
        record.finished = time.monotonic()
        if record.error_code is None and not record.finish_reasons and not record.is_disconnected:
            record.error_code = "interrupted"  # no reason given: the server shuts down or has a fault
        self.metrics.count(record)
        open_url = [self._open.pop(id_, None) for id_ in record.prompts]
        one = open_url[0]
        if one is None:
            return
        if self.traces is not None:
            self.traces.send(record, one.context)
        if self.recorder is not None:
            try:
                self._write_recording(one, self.recorder)
            except OSError as error:  # a full disk ends the recording, not the request
                log.warning("recording stopped: %s", error)
                self._drop_recorder()

    def close(self) -> None:
        """Flush traces and the recording."""
        if self.traces is not None:
            self.traces.close()
        self._drop_recorder()

    def _drop_recorder(self) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            with suppress(OSError):
                recorder.close()

    def _write_recording(self, one: _OpenRequest, recorder: Recorder) -> None:
        """Write block hashes, lengths and times of a request to the recording."""
        record = one.record
        for id_, message in one.messages.items():
            if id_ in record.progress and message.store and message.read:
                answer = one.answers.get(id_, [])
                recorder.add(
                    record.started - self._started,
                    message.prompt + answer,
                    len(message.prompt),
                    tenant=message.tenant,
                    salt=message.salt,
                    adapter=message.lora or "",
                    session=message.session,
                    ending=record.finish_reason,
                    last_computed=False,
                    public_tokens=message.public_tokens,
                )
        recorder.flush()
