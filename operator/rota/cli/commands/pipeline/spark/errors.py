"""Translates errors of Spark and of object stores that a user can fix, each into one sentence."""

import re
from typing import Any

from rota.object_store import StoreError

_S3_OBJECT = r"(?P<place>s3a://[^\s:'`]+)[^\n]*?"  # in errors of Spark's file system for S3
_USER_ERRORS = [  # a pattern in the error text, and the sentence for the user
    (r"OutOfMemoryError|Java heap space", "Spark has too little memory; set ROTA_SPARK_MEMORY to more, such as 4g"),
    (r"rota\.object_store\.interface\.StoreError: (?P<detail>[^\n]*)", "{detail}"),
    (_S3_OBJECT + r"No AWS Credentials provided",
     "{place} cannot be read: Spark found no credentials; its driver and executors need the same variables"),
    (_S3_OBJECT + r"Status Code: (?P<detail>\d+)", "{place} cannot be read: the server answered {detail}"),
    (_S3_OBJECT + r"Unable to execute HTTP request: (?P<detail>[^\n(]*)", "{place} cannot be read: {detail}"),
    (r"Encountered error while reading file (?:file:/*(?=/))?(?P<detail>\S*?/[^\n]*?)\.\s",
     "{detail} cannot be read: the file is damaged or missing; read an older snapshot, or recreate the lake"),
    (r"(?P<detail>(?:Mkdirs failed to create|Parent path is not a directory)[^\n(]*|\[Errno \d+\] [^\n]*)",
     "A folder cannot be written: {detail}; name another one"),
    (r"(?P<detail>[^\n:]*: Permission denied|No space left on device|Read-only file system|Disk quota exceeded)",
     "Spark cannot write: {detail}; free disk space or correct the permissions, or name another folder"),
    (r"JAVA_GATEWAY_EXITED", "Java exited before Spark started; see the reason above. Spark needs Java 17 or later"),
]  # fmt: skip
_MAX_CAUSES = 20


def describe_user_error(error: Exception) -> str | None:
    """Return the sentence for an error of Spark, an object store or a file; None for any other, and for a bug."""
    is_missing_object = isinstance(error, FileNotFoundError) and error.filename is None  # in a bucket
    if is_missing_object or isinstance(error, StoreError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written: {error.strerror}"
    if type(error).__module__.partition(".")[0] not in {"pyspark", "py4j"}:
        return None
    text = "\n".join(_error_texts(error))
    for pattern, sentence in _USER_ERRORS:
        if match := re.search(pattern, text):
            return sentence.format(**{name: value.strip() for name, value in match.groupdict("").items()})
    if type(error).__name__ == "AnalysisException":  # the input lacks what the query needs
        return re.sub(r"^\[[A-Z_.]+\] | SQLSTATE: \w+", "", str(error).partition("\n")[0])
    return None


def _error_texts(error: Exception) -> list[str]:
    """Return the text of an error and of its causes in Java."""
    texts = [str(error)]
    cause: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)  # py4j, PySpark
    while cause is not None and len(texts) < _MAX_CAUSES:
        texts.append(str(cause.toString()))
        cause = cause.getCause()
    return texts
