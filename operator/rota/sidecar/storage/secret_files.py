"""What lets a member in at its brokers, as it is mounted. Secrets are renewed, so the files are read again and again.

The next request is signed with the credentials of that time; the next connection trusts the authorities of that time
and no others, and presents the client certificate of that time. A file that cannot be read leaves what was read
before: a Secret that is about to be replaced must not end a consumer.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NamedTuple, NoReturn

from rota.brokers.rocketmq.routing import Site
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.sidecar.storage.environment import Who
from rota.spec import RocketMQ
from rota.tls import KeyPair, load_key_pair, mounted_version, read_key_pair, trusting

LOOK_AGAIN = 10.0

_log = logging.getLogger(__name__)


class _TlsFiles(NamedTuple):
    """The contents of the mounted files that a TLS context is made from."""

    authority: str | None
    client: KeyPair | None


class Access:
    """The mounted Secrets of one pod."""

    def __init__(self, who: Who) -> None:
        """Read nothing yet."""
        self._folder, self._authorities, self._client = who.credentials, who.authorities, who.client
        self._credentials: Credentials | None = None
        self._tls_files: _TlsFiles | None = None  # those that `_tls` was made from
        self._tls: ssl.SSLContext | None = None
        self._told = ""

    def site(self, rocketmq: RocketMQ) -> Site:
        """Return where brokers are, and what lets one in there; what cannot be read is a sentence."""
        self._credentials = _credentials(self._folder) if self._folder else None
        self._tls_files = None
        self._tls = None
        if rocketmq.tls.enabled:
            self._renew_tls()
        tls = self._current_tls if rocketmq.tls.enabled else None
        return Site(rocketmq.name_servers, tls, self._now if self._folder else None)

    def _current_tls(self) -> ssl.SSLContext:
        assert self._tls  # noqa: S101 - set before the site was returned
        return self._tls

    def _renew_tls(self) -> None:
        """Trust the mounted authority, or the image's if none is mounted; a new context forgets a replaced one."""
        authority = _read_authority(self._authorities) if self._authorities else None
        client = _read_client(self._client) if self._client else None
        files = _TlsFiles(authority, client)
        if files == self._tls_files:
            return
        context = ssl.create_default_context() if authority is None else _trusting(authority, self._authorities)
        if client:
            _present(context, client, self._client)
        self._tls = context
        self._tls_files = files

    def _now(self) -> Credentials:
        assert self._credentials  # noqa: S101 - read before it was handed out
        return self._credentials

    async def renew(self) -> NoReturn:
        """Read it again, for ever."""
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            self.look()

    def look(self) -> None:
        """Read again what was read before; a Secret that cannot be read does not keep the other from being renewed."""
        problems = []
        for is_used, renew in ((self._credentials, self._renew_credentials), (self._tls, self._renew_tls)):
            try:
                if is_used:
                    renew()
            except ValueError as error:
                problems.append(str(error))
        told = "; ".join(problems)
        if told and told != self._told:
            _log.warning("%s; until then it goes on with what was there before", told)
        self._told = told

    def _renew_credentials(self) -> None:
        self._credentials = _credentials(self._folder)


def _credentials(folder: str) -> Credentials:
    try:
        version = mounted_version(Path(folder))
        return Credentials(*((version / name).read_text().strip() for name in ("accessKey", "secretKey")))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The credentials in {folder} cannot be read: {error}; mend the Secret") from None


def _read_authority(folder: str) -> str:
    try:
        return Path(folder, "ca.crt").read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_certificate(folder, error) from None


def _trusting(authority: str, folder: str) -> ssl.SSLContext:
    try:
        return trusting(authority)
    except ValueError as error:
        raise _no_certificate(folder, error) from None


def _read_client(folder: str) -> KeyPair:
    try:
        return read_key_pair(Path(folder))
    except (OSError, UnicodeDecodeError) as error:
        raise _no_client_certificate(folder, error) from None


def _present(context: ssl.SSLContext, client: KeyPair, folder: str) -> None:
    try:
        load_key_pair(context, client)
    except ValueError as error:
        raise _no_client_certificate(folder, error) from None


def _no_client_certificate(folder: str, error: Exception) -> ValueError:
    return ValueError(f"There is no usable tls.crt and tls.key in {folder}: {error}; correct the Secret")


def _no_certificate(folder: str, error: Exception) -> ValueError:
    return ValueError(f"There is no certificate in {folder}/ca.crt: {error}; put one there in PEM")
