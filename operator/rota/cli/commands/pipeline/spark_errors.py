"""What Spark complains of, in one sentence, where a user can mend it; where not, it is a mistake of ours."""

import re
from typing import Any

_MENDED = [  # what stands in a complaint, and what is said of it
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
_MOST_CAUSES = 20


def sentence(error: Exception) -> str | None:
    """Return what is to be mended, or nothing where nobody but we can, or where it is said already."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written: {error.strerror}"
    if type(error).__module__.partition(".")[0] not in {"pyspark", "py4j"}:
        return None
    told = "\n".join(_causes(error))
    for pattern, words in _MENDED:
        if found := re.search(pattern, told):
            return words.format(**{name: text.strip() for name, text in found.groupdict("").items()})
    if type(error).__name__ == "AnalysisException":  # what was given does not hold what it should
        return re.sub(r"^\[[A-Z_.]+\] | SQLSTATE: \w+", "", str(error).partition("\n")[0])
    return None


def _causes(error: Exception) -> list[str]:
    """Return what an error says, and what it comes from in Java."""
    told = [str(error)]
    it: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while it is not None and len(told) < _MOST_CAUSES:
        told.append(str(it.toString()))
        it = it.getCause()
    return told
