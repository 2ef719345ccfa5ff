"""AdapterLoads: loads and unloads LoRA adapters while the engine runs. A thread reads the files, so that steps do not
wait.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from kvloom.engine import Engine
from kvloom.models.lora import LoraAdapter, read_adapter

from .messages import AdapterAnswer, AdapterInfo, LoadAdapter, UnloadAdapter

__all__ = ["AdapterLoads", "adapter_infos"]


def adapter_infos(engine: Engine) -> list[AdapterInfo]:
    """Return the adapters that new requests of an engine may use."""
    table = engine.adapters
    if table is None:
        return []
    resident = set(table.resident)
    return [
        AdapterInfo(
            one.name,
            one.adapter.path,
            one.digest,
            one.adapter.rank,
            one.created,
            list(one.adapter.invocation_tokens),
            one.requests,
            one.name in resident,
        )
        for one in table.names.values()
    ]


class AdapterLoads:
    """Loads and unloads the adapters of one engine, in the order of the messages. Not thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: list[tuple[LoadAdapter | UnloadAdapter, Future[LoraAdapter] | None]] = []
        self._threads: ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        """Whether some messages are not processed yet."""
        return bool(self._pending)

    def submit(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Queue a message. For an adapter to load, a thread starts to read its files."""
        read: Future[LoraAdapter] | None = None
        if isinstance(message, LoadAdapter):
            self._threads = self._threads or ThreadPoolExecutor(1, "adapters")
            read = self._threads.submit(read_adapter, message.path)
        self._pending.append((message, read))

    def take(self) -> list[AdapterAnswer]:
        """Process the queued messages in order, up to the first adapter whose files are still being read. Return one
        answer for each processed message. Does not wait.
        """
        answers = []
        while self._pending and (self._pending[0][1] is None or self._pending[0][1].done()):
            message, read = self._pending.pop(0)
            error = ""
            try:
                if isinstance(message, LoadAdapter):
                    assert read is not None
                    self._engine.add_lora(message.name, read.result(), message.replace)
                else:
                    self._engine.unload_lora(message.name)
            except (ValueError, OSError) as failed:
                error = str(failed)
            answers.append(AdapterAnswer(message.number, error, adapter_infos(self._engine)))
        return answers
