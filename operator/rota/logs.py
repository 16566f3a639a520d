"""Logs on standard error: one line for each record, as JSON or as text, with structured fields."""

import logging
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["json", "text"]
LEVELS: tuple[str, ...] = get_args(Level)
FORMATS: tuple[str, ...] = get_args(Format)

# The structured fields of a record: given as `extra` to a logger's methods.
FIELDS = ("namespace", "group", "generation", "member", "reason", "seconds")


class _Formatter(logging.Formatter):
    """Base of both formats; `always` contains fields that every record gets."""

    def __init__(self, always: Mapping[str, object]) -> None:
        super().__init__()
        self._always = always

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        return {**self._always, **{name: getattr(record, name) for name in FIELDS if hasattr(record, name)}}


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"at": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **self.fields(record)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in self.fields(record).items())
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{_time(record)} {record.levelname:7} {record.name}: {record.getMessage()}{fields}{error}"


def begin(level: str = "info", style: str = "json", always: Mapping[str, object] = MappingProxyType({})) -> None:
    """Write logs to standard error from now on; other libraries log warnings and errors only.

    `always`: fields of every record, such as the name of the process.
    """
    for setting, value, choices in (("level", level, LEVELS), ("format", style, FORMATS)):
        if value not in choices:
            raise ValueError(f"There is no log {setting} {value!r}; choose among {', '.join(choices)}")
    formatter = _JsonFormatter(always) if style == "json" else _TextFormatter(always)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rota").setLevel(level.upper())


def of_group(namespace: str, group: str, **fields: object) -> dict[str, object]:
    """Return the fields of a record about a group."""
    return {"namespace": namespace, "group": group, **fields}


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
