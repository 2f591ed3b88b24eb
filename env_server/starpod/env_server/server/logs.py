"""Logs on standard error, as readable lines or as one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# Environments and callers write texts that end up in logs, and then in terminals: escape control characters.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class JSONFormatter(logging.Formatter):
    """Log format of one JSON object per record: time, level, logger, message, exception, and every extra field."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Log format of one line per record: time, level and message, followed by the extra fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in _STANDARD)
        return (super().formatMessage(record) + (f"  [{fields}]" if fields else "")).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_CONTROLS)


def configure_logs(style: Literal["text", "json"], level: str) -> None:
    """Send the log records of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
