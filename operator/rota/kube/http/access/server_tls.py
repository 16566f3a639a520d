"""TLS of the page's port: its certificate, and the CA by which the cluster's client certificates are verified.

The code calls that CA the client authority. The API server publishes it in a ConfigMap, and may replace it.
"""

import asyncio
import datetime as dt
import ipaddress
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.paths import object_path
from rota.tls import KeyPair, certificate_digest, load_key_pair, read_key_pair

REFRESH_SECONDS = 60.0
VALIDITY = dt.timedelta(days=3650)  # of a self-signed certificate; each process creates a new one

_log = logging.getLogger(__name__)


class _Authentication(msgspec.Struct):
    """The ConfigMap in which the API server publishes how it authenticates."""

    data: dict[str, str] = {}


def read_page_certificate(folder: Path) -> KeyPair:
    """Read the Secret in the folder that --page-tls names; raise ValueError if it cannot be used."""
    try:
        pair = read_key_pair(folder)
        server_context(pair, client_authority="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"--page-tls {folder} has no usable tls.crt and tls.key: {reason}; correct them") from error
    return pair


def self_signed(names: Sequence[str]) -> KeyPair:
    """Return a new certificate for these host names and addresses, signed by its own key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rota")])
    alternative_names = list(map(_alternative_name, names))
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectAlternativeName(alternative_names), critical=False)
        .sign(key, hashes.SHA256())
    )
    no_encryption = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    key_bytes = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_encryption)
    return KeyPair(certificate.public_bytes(pem).decode(), key_bytes.decode())


def server_context(pair: KeyPair, client_authority: str) -> ssl.SSLContext:
    """Return a TLS context; with an authority (CA), it accepts client certificates that this authority signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_key_pair(context, pair)
    if client_authority:
        context.load_verify_locations(cadata=client_authority)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


class ServerTls:
    """Keeps the TLS context for new connections, and renews it when certificates change."""

    def __init__(self, api: Api, names: Sequence[str], folder: Path | None = None) -> None:
        """`folder` holds tls.crt and tls.key; without one the certificate is self-signed."""
        self._api = api
        self._folder = folder
        self._pair = read_page_certificate(folder) if folder else self_signed(names)
        self._client_authority = ""
        self._problem = ""
        self._context = server_context(self._pair, self._client_authority)
        self._current_contexts = WeakSet([self._context])  # contexts with the current client authority

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self._context

    def has_current_authority(self, context: ssl.SSLContext) -> bool:
        """Whether a context trusts the current client authority.

        On a connection with an earlier context, the client's certificate was verified with a CA that has been replaced.
        """
        return context in self._current_contexts

    def digest(self) -> str:
        """Return the SHA-256 of the certificate for new connections, in hexadecimal."""
        return certificate_digest(self._pair)

    async def run(self) -> None:
        """Reload the certificate and the cluster's CA periodically, forever."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Reload the certificate and the CA. If either cannot be read, keep the context and log the problem once."""
        try:
            pair = await asyncio.to_thread(read_page_certificate, self._folder) if self._folder else self._pair
            authority = await self._read_client_authority()
            if (pair, authority) != (self._pair, self._client_authority):
                self._context = server_context(pair, authority)
                if authority != self._client_authority:
                    self._current_contexts.clear()  # they trust the replaced authority
                self._current_contexts.add(self._context)
                self._pair = pair
                self._client_authority = authority
            self._problem = ""
        except (ApiError, NoResponseError, ValueError, OSError) as error:
            if self._problem != str(error):
                _log.warning("The page's TLS settings could not be reloaded; keeping the previous ones: %s", error)
            self._problem = str(error)

    async def _read_client_authority(self) -> str:
        path = object_path("configmaps", "kube-system", "extension-apiserver-authentication")
        return (await self._api.get(path, _Authentication)).data.get("client-ca-file", "")


def _alternative_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
