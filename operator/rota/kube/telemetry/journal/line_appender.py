"""Appends whole lines to a file or stream."""

import os


class WriteFailedError(Exception):
    """Lines could not be written; `missing_lines` are missing in the file."""

    def __init__(self, reason: str, missing_lines: bytes) -> None:
        super().__init__(reason)
        self.missing_lines = missing_lines


class LineAppender:
    """Appends whole lines. If a write was cut off within a line, the next append first ends that line."""

    def __init__(self, file_descriptor: int) -> None:
        self.file_descriptor = file_descriptor
        self._is_torn = False

    def append(self, lines: bytes) -> None:
        """Write lines, by one system call if that accepts all bytes; raise WriteFailedError with the failed lines."""
        prefix = b"\n" if self._is_torn else b""  # ends the line that was cut off
        data = prefix + lines
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[os.write(self.file_descriptor, remaining) :]
        except OSError as error:
            written = data[: len(data) - len(remaining)]
            if written:
                self._is_torn = not written.endswith(b"\n")
            # Bytes of `lines` up to the last line that was written as a whole.
            whole_line_bytes = max(written.rfind(b"\n") + 1 - len(prefix), 0)
            raise WriteFailedError(error.strerror or str(error), lines[whole_line_bytes:]) from None
        self._is_torn = False
