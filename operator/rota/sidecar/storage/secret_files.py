"""Credentials and TLS files for the brokers, from mounted Secrets; read periodically, since Secrets are renewed.

The next request is signed with the credentials last read; the next connection trusts only the authorities last read,
and presents the client certificate last read. If a file cannot be read, its previous content stays in use: a Secret
that is about to be replaced must not end a consumer.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NamedTuple, NoReturn

from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.sidecar.storage.environment import PodIdentity
from rota.spec import RocketMQ
from rota.tls import (
    KeyPair,
    Validity,
    certificate_validity,
    client_context,
    load_key_pair,
    read_key_pair,
    resolve_mounted_folder,
)

RENEW_INTERVAL_SECONDS = 10.0

_log = logging.getLogger(__name__)


class _TlsFiles(NamedTuple):
    """The contents of the mounted files from which a TLS context is created."""

    authority: str | None
    client: KeyPair | None


class SecretFiles:
    """The mounted Secrets of one pod; files are read when `connection_config` is called."""

    def __init__(self, pod: PodIdentity) -> None:
        self._credentials_folder = pod.credentials_folder
        self._ca_folder = pod.ca_folder
        self._client_folder = pod.client_folder
        self._credentials: Credentials | None = None
        self._tls_files: _TlsFiles | None = None  # the files from which `_tls` was created
        self._tls: ssl.SSLContext | None = None
        self._client_validity: Validity | None = None
        self._logged_problem = ""

    def connection_config(self, rocketmq: RocketMQ) -> ConnectionConfig:
        """Return the connection settings of the brokers; raise ValueError if a file cannot be read."""
        self._credentials = _read_credentials(self._credentials_folder) if self._credentials_folder else None
        self._tls_files = None
        self._tls = None
        self._client_validity = None
        if rocketmq.tls.enabled:
            self._renew_tls()
        tls = self._current_tls if rocketmq.tls.enabled else None
        return ConnectionConfig(
            rocketmq.name_servers, tls, self._current_credentials if self._credentials_folder else None
        )

    def client_validity(self) -> Validity | None:
        """Return the validity of the certificate that is presented to brokers; None without one."""
        return self._client_validity

    def _current_tls(self) -> ssl.SSLContext:
        assert self._tls  # noqa: S101 - set before the configuration was returned
        return self._tls

    def _renew_tls(self) -> None:
        """Load the mounted authority, or the image's if none is mounted; a new context drops a replaced authority."""
        authority = _read_authority(self._ca_folder) if self._ca_folder else None
        client = _read_client(self._client_folder) if self._client_folder else None
        files = _TlsFiles(authority, client)
        if files == self._tls_files:
            return
        context = ssl.create_default_context() if authority is None else _create_context(authority, self._ca_folder)
        if client:
            _load_client(context, client, self._client_folder)
        self._tls = context
        self._tls_files = files
        self._client_validity = certificate_validity(client) if client else None

    def _current_credentials(self) -> Credentials:
        assert self._credentials  # noqa: S101 - read before it was handed out
        return self._credentials

    async def renew_periodically(self) -> NoReturn:
        """Read the files periodically, forever."""
        while True:
            await asyncio.sleep(RENEW_INTERVAL_SECONDS)
            self.renew_files()

    def renew_files(self) -> None:
        """Read all files in use again; a Secret that cannot be read does not keep the other from being renewed."""
        problems = []
        for is_used, renew in ((self._credentials, self._renew_credentials), (self._tls, self._renew_tls)):
            try:
                if is_used:
                    renew()
            except ValueError as error:
                problems.append(str(error))
        message = "; ".join(problems)
        if message and message != self._logged_problem:
            _log.warning("%s; the previous files stay in use", message)
        self._logged_problem = message

    def _renew_credentials(self) -> None:
        self._credentials = _read_credentials(self._credentials_folder)


def _read_credentials(folder: str) -> Credentials:
    try:
        version = resolve_mounted_folder(Path(folder))
        return Credentials(*((version / name).read_text().strip() for name in ("accessKey", "secretKey")))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The credentials in {folder} cannot be read: {error}; correct the Secret") from None


def _read_authority(folder: str) -> str:
    try:
        return Path(folder, "ca.crt").read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_certificate(folder, error) from None


def _create_context(authority: str, folder: str) -> ssl.SSLContext:
    try:
        return client_context(authority)
    except ValueError as error:
        raise _no_certificate(folder, error) from None


def _read_client(folder: str) -> KeyPair:
    try:
        return read_key_pair(Path(folder))
    except (OSError, UnicodeDecodeError) as error:
        raise _no_client_certificate(folder, error) from None


def _load_client(context: ssl.SSLContext, client: KeyPair, folder: str) -> None:
    try:
        load_key_pair(context, client)
    except ValueError as error:
        raise _no_client_certificate(folder, error) from None


def _no_client_certificate(folder: str, error: Exception) -> ValueError:
    return ValueError(f"There is no usable tls.crt and tls.key in {folder}: {error}; correct the Secret")


def _no_certificate(folder: str, error: Exception) -> ValueError:
    return ValueError(f"There is no certificate in {folder}/ca.crt: {error}; add one in PEM format")
