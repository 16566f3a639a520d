"""Logs on standard error: one line for each record, as JSON or as text, with structured fields.

In text, a traceback follows on lines of its own.
"""

import logging
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

import msgspec

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "text"]
LEVELS: tuple[str, ...] = get_args(LogLevel)
FORMATS: tuple[str, ...] = get_args(LogFormat)

# The structured fields of a record; a caller passes them as `extra=group_fields(…)` to a logger's methods.
FIELDS = ("namespace", "group", "generation", "member", "reason", "seconds")


class _Formatter(logging.Formatter):
    """Base of both formats; `extra_fields` are fields of the process, which every record has."""

    def __init__(self, extra_fields: Mapping[str, object]) -> None:
        super().__init__()
        self._extra_fields = extra_fields

    def fields_of(self, record: logging.LogRecord) -> dict[str, object]:
        own_fields = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        return {**self._extra_fields, **own_fields}


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"at": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **self.fields_of(record)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in self.fields_of(record).items())
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{_time(record)} {record.levelname:7} {record.name}: {record.getMessage()}{fields}{error}"


def configure(
    level: str = "info", log_format: str = "json", extra_fields: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Write logs to standard error from now on; other libraries log warnings and errors only.

    `extra_fields` are in every record, such as the name of the process.
    """
    for setting, value, choices in (("level", level, LEVELS), ("format", log_format, FORMATS)):
        if value not in choices:
            raise ValueError(f"Unknown log {setting} {value!r}; choose one of {', '.join(choices)}")
    formatter = _JsonFormatter(extra_fields) if log_format == "json" else _TextFormatter(extra_fields)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rota").setLevel(level.upper())


def group_fields(namespace: str, group: str, **fields: object) -> dict[str, object]:
    """Return the fields of a record about a group."""
    return {"namespace": namespace, "group": group, **fields}


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
