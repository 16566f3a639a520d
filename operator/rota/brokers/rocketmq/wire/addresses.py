"""Addresses of name servers and brokers, such as broker-0:10911 or [fd00::1]:9876."""

import re

_MAX_PORT = 2**16 - 1
_ADDRESS = re.compile(r"(?:\[([^\s\[\];,]+)\]|([^\s\[\];,]+)):([0-9]{1,5})")


def split_address(text: str) -> tuple[str, int] | None:
    """Return host and port of an address, or None if the text is no address."""
    match = _ADDRESS.fullmatch(text)
    if not match or int(match[3]) > _MAX_PORT:
        return None
    return match[1] or match[2], int(match[3])
