"""Removes JSON that is nested too deeply for a decoder: Kubernetes stores objects with thousands of levels."""

import re

# A string (with its escapes), or a bracket; brackets within strings are not counted.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


def without_deep_values(text: bytes, max_levels: int) -> bytes:
    """Return the same JSON with `null` in place of each object and list that is nested deeper than `max_levels`."""
    parts: list[bytes] = []
    depth = 0
    start = 0  # where the text to copy starts: after the last value that was replaced
    for token in _TOKEN.finditer(text):
        match text[token.start() : token.start() + 1]:
            case b"{" | b"[":
                depth += 1
                if depth == max_levels + 1:
                    parts += [text[start : token.start()], b"null"]
            case b"}" | b"]":
                if depth == max_levels + 1:
                    start = token.end()
                depth -= 1
    if depth <= max_levels:  # otherwise the text was cut off within a value that is replaced
        parts.append(text[start:])
    return b"".join(parts)
