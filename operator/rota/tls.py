"""TLS contexts from PEM texts instead of files: trusted authorities, and a certificate with its private key.

Also reads a certificate's dates, and mounted Secrets.
"""

import hashlib
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

_CERTIFICATE_PATTERN = re.compile(r"-----BEGIN CERTIFICATE-----[\x00-\x7f]*?-----END CERTIFICATE-----")

# Tags of ASN.1 in a certificate (RFC 5280).
_VERSION_TAG = 0xA0  # tag of the optional field `version`, before the serial number
_UTC_TIME_TAG = 0x17  # YYMMDDhhmmssZ
_GENERALIZED_TIME_TAG = 0x18  # YYYYMMDDhhmmssZ
_LONG_LENGTH = 0x80  # flag in the first length byte: its other bits are the number of length bytes that follow
_FIRST_YEAR_OF_1900S = "50"  # UTCTime has years of two digits: 50 to 99 are 1950 to 1999, 00 to 49 are 2000 to 2049


class KeyPair(NamedTuple):
    """A certificate and its private key, in PEM."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        """Leave the key out of logs."""
        return "KeyPair(…)"


class Validity(NamedTuple):
    """When a certificate is valid, in seconds since 1970."""

    not_before: float
    not_after: float


class _Element(NamedTuple):
    """An element of DER: its content is `data[start:end]`."""

    tag: int
    start: int
    end: int


def certificate_validity(pair: KeyPair) -> Validity | None:
    """Return when the first certificate in the text is valid; None if that cannot be read."""
    match = _CERTIFICATE_PATTERN.search(pair.certificate)
    try:
        return _read_validity(ssl.PEM_cert_to_DER_cert(match[0])) if match else None
    except (ValueError, IndexError):
        return None


def _read_validity(der: bytes) -> Validity:
    """Read the field `validity` of a certificate in DER; raise ValueError or IndexError if it is malformed.

    It is parsed here, since `ssl` reads the dates only of certificates that a peer has shown.
    """
    certificate = _element(der, 0)
    tbs_certificate = _element(der, certificate.start)
    field = _element(der, tbs_certificate.start)
    if field.tag == _VERSION_TAG:
        field = _element(der, field.end)
    for _ in ("signature", "issuer", "validity"):  # after the serial number
        field = _element(der, field.end)
    not_before = _element(der, field.start)
    not_after = _element(der, not_before.end)
    return Validity(_read_time(der, not_before), _read_time(der, not_after))


def _element(der: bytes, offset: int) -> _Element:
    tag = der[offset]
    length = der[offset + 1]
    start = offset + 2
    if length >= _LONG_LENGTH:
        start += length - _LONG_LENGTH
        length = int.from_bytes(der[offset + 2 : start], "big")
    if start + length > len(der):
        raise ValueError("an element ends after the certificate")
    return _Element(tag, start, start + length)


def _read_time(der: bytes, element: _Element) -> float:
    text = der[element.start : element.end].decode("ascii")
    if element.tag == _UTC_TIME_TAG:
        text = ("19" if text[:2] >= _FIRST_YEAR_OF_1900S else "20") + text
    elif element.tag != _GENERALIZED_TIME_TAG:
        raise ValueError("a time is neither UTCTime nor GeneralizedTime")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def certificate_digest(pair: KeyPair) -> str:
    """Return the hexadecimal SHA-256 of the first certificate in the text; of a chain, the others do not count."""
    match = _CERTIFICATE_PATTERN.search(pair.certificate)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(match[0])).hexdigest() if match else ""


def resolve_mounted_folder(folder: Path) -> Path:
    """Return the folder with one consistent version of a mounted Secret's files: the kubelet swaps a link to it."""
    link = folder / "..data"
    return link.resolve() if link.is_symlink() else folder


def read_key_pair(folder: Path) -> KeyPair:
    """Read a mounted Secret of type kubernetes.io/tls; raise OSError or UnicodeDecodeError if it cannot be read."""
    version = resolve_mounted_folder(folder)
    return KeyPair((version / "tls.crt").read_text(), (version / "tls.key").read_text())


def client_context(authorities_pem: str) -> ssl.SSLContext:
    """Return a context that trusts only these certificates in PEM; raise ValueError if the text has none.

    Text around them is ignored, as OpenSSL does with files.
    """
    certificates = "\n".join(_CERTIFICATE_PATTERN.findall(authorities_pem))
    if not certificates:
        raise ValueError("it has no certificate in PEM")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        tls.load_verify_locations(cadata=certificates)
    except ssl.SSLError as error:
        raise ValueError(str(error)) from None
    return tls


def load_key_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Load a certificate into a context; raise ValueError if it cannot be used, or its key is encrypted."""
    with _as_file(pair.certificate) as certificate, _as_file(pair.key) as key:
        try:
            context.load_cert_chain(certificate, key, lambda: "")  # else OpenSSL asks for a password at the terminal
        except ssl.SSLError as error:
            raise ValueError(error.reason or "they are not in PEM form") from error
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(str(error)) from error


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """Yield the path of a file with this text, since `ssl` reads keys from files only.

    On Linux the file is in memory, so the key is never on a disk.
    """
    if not hasattr(os, "memfd_create"):
        with NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            yield file.name
        return
    descriptor = os.memfd_create("tls")
    try:
        with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.write(text)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
