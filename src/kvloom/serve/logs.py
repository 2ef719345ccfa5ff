"""The format of the server's log. The log never contains prompts, answers, token ids or keys.

    2026-01-31 12:00:00,000 INFO kvloom.access request method=POST path=/v1/completions status=200 seconds=0.078 …
    {"time": "2026-01-31T12:00:00.000+00:00", "level": "INFO", "logger": "kvloom.access", "message": "request", …}

The loggers are `kvloom.serve` (life cycle), `kvloom.access` (requests) and `kvloom.tiers` (tiers, in the engine
process).
"""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

__all__ = ["FORMATS", "LEVELS", "LogFormat", "configure_logging"]

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str, form: LogFormat) -> None:
    """Log to stderr. `level` is the lowest level of logged messages of kvloom. For messages of other packages, the
    lowest level is warning, or `level` if that is higher. Does not replace handlers that the program has set.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    others = max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()])
    logging.basicConfig(handlers=[handler], level=others)
    logging.getLogger("kvloom").setLevel(level.upper())


class _TextFormatter(logging.Formatter):
    """Writes time, level, logger and message, then the `fields` of the record as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name of the base class
        fields: dict[str, Any] = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{k}={_word(v)}" for k, v in fields.items())])


class _JsonFormatter(logging.Formatter):
    """Writes one JSON object per line: time, level, logger, message, the `fields` of the record, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _word(value: Any) -> str:
    text = str(value)
    return text if re.fullmatch(r"[\w./:,-]+", text, re.ASCII) else msgspec.json.encode(text).decode()
