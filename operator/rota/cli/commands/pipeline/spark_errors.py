"""Translates Spark errors that a user can fix into one sentence; any other error is a bug in Rota."""

import re
from typing import Any

_USER_ERRORS = [  # a pattern in the error text, and the sentence for the user
    (r"OutOfMemoryError|Java heap space", "Spark has too little memory; give it more by ROTA_SPARK_MEMORY, such as 4g"),
    (r"Encountered error while reading file (?:file:/*)?(?P<it>/[^\n]*?)\.\s",
     "{it} cannot be read: it is damaged, or something else; make again what it is a part of"),
    (r"CANNOT_LOAD_STATE_STORE|/(?P<it>_checkpoint/state)\b",
     "What the lake's _checkpoint remembers is damaged; make the lake anew, in another folder"),
    (r"(?P<it>(?:Mkdirs failed to create|Parent path is not a directory)[^\n(]*|\[Errno \d+\] [^\n]*)",
     "A folder cannot be written: {it}; name another --to"),
    (r"(?P<it>[^\n:]*: Permission denied|No space left on device|Read-only file system|Disk quota exceeded)",
     "Spark cannot write: {it}; make room for it, or name another --to"),
    (r"\[INVALID_PARTITION_VALUE\] (?P<it>[^\n.]*)",
     "A day's folder has a name that is none: {it}; make the lake anew"),
    (r"JAVA_GATEWAY_EXITED", "Java ended before Spark began, for the reason above; Spark needs Java 17 or later"),
]  # fmt: skip
_MAX_CAUSES = 20


def describe_user_error(error: Exception) -> str | None:
    """Return the sentence for the user; None if only developers can fix the error, or Rota raised it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written: {error.strerror}"
    if type(error).__module__.partition(".")[0] not in {"pyspark", "py4j"}:
        return None
    text = "\n".join(_error_texts(error))
    for pattern, words in _USER_ERRORS:
        if match := re.search(pattern, text):
            return words.format(**{name: value.strip() for name, value in match.groupdict("").items()})
    if type(error).__name__ == "AnalysisException":  # the input lacks what the query needs
        return re.sub(r"^\[[A-Z_.]+\] | SQLSTATE: \w+", "", str(error).partition("\n")[0])
    return None


def _error_texts(error: Exception) -> list[str]:
    """Return the text of an error and of its causes in Java."""
    texts = [str(error)]
    cause: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while cause is not None and len(texts) < _MAX_CAUSES:
        texts.append(str(cause.toString()))
        cause = cause.getCause()
    return texts
