"""Logs: one line an event, for people or as JSON for programs. Always on stderr."""

import json
import logging
import sys
import time
from typing import Literal, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(
    service: str, log_format: Literal["text", "json"] = "text", level: str = "INFO", stream: TextIO | None = None
) -> None:
    """Sets up the root logger of this process; ``extra`` fields of a record come out as key=value or JSON members."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class TextFormatter(logging.Formatter):
    """``12:34:56.789 INFO gateway baton_gateway.main: message key=value``"""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname} {self._service} {record.name}: "
            f"{record.getMessage()}{fields}"
        )
        return line + _traceback(self, record)


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if traceback := _traceback(self, record):
            entry["traceback"] = traceback.strip()
        return json.dumps(entry, default=str, ensure_ascii=False)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
