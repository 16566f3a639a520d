"""Credentials and TLS files for the brokers, from mounted Secrets; read periodically, since Secrets are renewed.

The next request is signed with the credentials last read; the next connection trusts only the authorities last read,
and presents the client certificate last read. If a file cannot be read, its previous content stays in use: a Secret
that is about to be replaced must not end a consumer.
"""

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
    """The mounted Secrets of one pod; first read by `connection_config`, then again by `renew_periodically`."""

    def __init__(self, pod: PodIdentity) -> None:
        self._credentials_folder = pod.credentials_folder  # a folder is empty if its Secret is not mounted
        self._ca_folder = pod.ca_folder
        self._client_folder = pod.client_folder
        self._credentials: Credentials | None = None
        self._tls_files: _TlsFiles | None = None  # the files from which `_tls` was created
        self._tls: ssl.SSLContext | None = None  # only if the settings in force enable TLS
        self._client_validity: Validity | None = None
        self._logged_problem = ""

    def connection_config(self, rocketmq: RocketMQ) -> ConnectionConfig:
        """Load the files and return the connection settings of the brokers; raise ValueError if one cannot be read.

        The settings have functions instead of values: the client calls them for each connection and request, and so
        uses what was read last.
        """
        self._credentials = _read_credentials(self._credentials_folder) if self._credentials_folder else None
        # Forget the files of the previous configuration: here, unlike at a renewal, an unreadable file is an error.
        self._tls_files = None
        self._tls = None
        self._client_validity = None
        if rocketmq.tls.enabled:
            self._load_tls()
        return ConnectionConfig(
            rocketmq.name_servers,
            self._current_tls if rocketmq.tls.enabled else None,
            self._current_credentials if self._credentials else None,
        )

    def client_validity(self) -> Validity | None:
        """Return the validity of the certificate that is presented to brokers; None without one."""
        return self._client_validity

    def _current_tls(self) -> ssl.SSLContext:
        assert self._tls  # noqa: S101 - set before `connection_config` returned this method
        return self._tls

    def _load_tls(self) -> None:
        """Create a TLS context that trusts the mounted CA or, without one, the CAs of the container's image.

        If no file has changed, the present context is kept. A changed CA needs a new context: an existing one would go
        on trusting the previous CA.
        """
        authority = None
        if self._ca_folder:
            with _explain_authority_error(self._ca_folder):  # a single file: `resolve_mounted_folder` is not needed
                authority = Path(self._ca_folder, "ca.crt").read_text()
        client = None
        if self._client_folder:
            with _explain_client_error(self._client_folder):
                client = read_key_pair(Path(self._client_folder))
        files = _TlsFiles(authority, client)
        if files == self._tls_files:
            return
        with _explain_authority_error(self._ca_folder):
            context = client_context(authority) if authority is not None else ssl.create_default_context()
        if client:
            with _explain_client_error(self._client_folder):
                load_key_pair(context, client)
        self._tls = context
        self._tls_files = files
        self._client_validity = certificate_validity(client) if client else None

    def _current_credentials(self) -> Credentials:
        assert self._credentials  # noqa: S101 - read before `connection_config` returned this method
        return self._credentials

    async def renew_periodically(self) -> NoReturn:
        """Read the files periodically, forever."""
        while True:
            await asyncio.sleep(RENEW_INTERVAL_SECONDS)
            self.renew_files()

    def renew_files(self) -> None:
        """Read all files in use again; a Secret that cannot be read does not keep the other from being renewed."""
        problems: list[str] = []
        try:
            if self._credentials:
                self._credentials = _read_credentials(self._credentials_folder)
        except ValueError as error:
            problems.append(str(error))
        try:
            if self._tls:
                self._load_tls()
        except ValueError as error:
            problems.append(str(error))
        message = "; ".join(problems)
        if message and message != self._logged_problem:
            _log.warning("%s; the previous files stay in use", message)
        self._logged_problem = message


def _read_credentials(folder: str) -> Credentials:
    with _explain_error(f"The credentials in {folder} cannot be read", "correct the Secret"):
        version = resolve_mounted_folder(Path(folder))  # both files of one version
        access_key = (version / "accessKey").read_text().strip()
        secret_key = (version / "secretKey").read_text().strip()
        return Credentials(access_key, secret_key)


def _explain_authority_error(folder: str) -> AbstractContextManager[None]:
    return _explain_error(f"There is no certificate in {folder}/ca.crt", "add one in PEM format")


def _explain_client_error(folder: str) -> AbstractContextManager[None]:
    return _explain_error(f"There is no usable tls.crt and tls.key in {folder}", "correct the Secret")


@contextmanager
def _explain_error(problem: str, remedy: str) -> Iterator[None]:
    """Turn an error of reading or parsing files into a ValueError with a sentence for the user."""
    try:
        yield
    except (OSError, ValueError) as error:  # an undecodable text is a ValueError
        raise ValueError(f"{problem}: {error}; {remedy}") from None
