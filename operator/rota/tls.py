"""TLS from text in memory: the authorities to trust, and a certificate with its private key."""

import hashlib
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[\x00-\x7f]*?-----END CERTIFICATE-----")


class KeyPair(NamedTuple):
    """A certificate and its private key, in PEM."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        """Leave the key out of logs."""
        return "KeyPair(…)"


def certificate_digest(pair: KeyPair) -> str:
    """Return the SHA-256 of the certificate itself, in hexadecimal; its authorities' certificates do not count."""
    match = _CERTIFICATE.search(pair.certificate)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(match[0])).hexdigest() if match else ""


def mounted_version(folder: Path) -> Path:
    """Return the folder with one consistent version of a mounted Secret's files: the kubelet swaps a link to it."""
    link = folder / "..data"
    return link.resolve() if link.is_symlink() else folder


def read_key_pair(folder: Path) -> KeyPair:
    """Read a mounted Secret of type kubernetes.io/tls; raise OSError or UnicodeDecodeError if it cannot be read."""
    version = mounted_version(folder)
    return KeyPair((version / "tls.crt").read_text(), (version / "tls.key").read_text())


def trusting(authorities: str) -> ssl.SSLContext:
    """Return a context that trusts only these certificates in PEM; raise ValueError if the text has none.

    Text around them is ignored, as OpenSSL does with files.
    """
    certificates = "\n".join(_CERTIFICATE.findall(authorities))
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
            context.load_cert_chain(certificate, key, lambda: "")  # without a password OpenSSL asks at the terminal
        except ssl.SSLError as error:
            raise ValueError(error.reason or "they are not in PEM form") from error
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(str(error)) from error


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """Yield the path of a file with this text: `ssl` reads keys from files only. On Linux it is in memory."""
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
