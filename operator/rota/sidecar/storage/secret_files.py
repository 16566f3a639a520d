"""What lets a member in at its brokers, as it is mounted. Secrets are renewed, so it is read again and again.

The next request is signed with what lies there then, and the next connection trusts the authorities of that time and
no others. A file that cannot be read leaves what was read before: a Secret that is about to be replaced must not end a
consumer.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NoReturn

from rota.brokers.rocketmq.routing import Site
from rota.brokers.rocketmq.transport.trust import trusting
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.sidecar.storage.environment import Who
from rota.spec import RocketMQ

LOOK_AGAIN = 10.0

_log = logging.getLogger(__name__)


class Access:
    """The mounted Secrets of one pod."""

    def __init__(self, who: Who) -> None:
        """Read nothing yet."""
        self._folder, self._authorities = who.credentials, who.authorities
        self._credentials: Credentials | None = None
        self._authority: str | None = None  # the text of the mounted file that `_tls` trusts
        self._tls: ssl.SSLContext | None = None
        self._told = ""

    def site(self, rocketmq: RocketMQ) -> Site:
        """Return where brokers are, and what lets one in there; what cannot be read is a sentence."""
        self._credentials = _credentials(self._folder) if self._folder else None
        self._authority = None
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
        if not self._authorities:
            self._tls = self._tls or ssl.create_default_context()
            return
        authority = _read_authority(self._authorities)
        if authority != self._authority:
            self._tls = _trusting(authority, self._authorities)
            self._authority = authority

    def _now(self) -> Credentials:
        assert self._credentials  # noqa: S101 - read before it was handed out
        return self._credentials

    async def renew(self) -> NoReturn:
        """Read it again, for ever."""
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            self.look()

    def look(self) -> None:
        """Read again what was read before."""
        told = ""
        try:
            if self._credentials:
                self._credentials = _credentials(self._folder)
            if self._tls:
                self._renew_tls()
        except ValueError as error:
            told = str(error)
        if told and told != self._told:
            _log.warning("%s; until then it goes on with what was there before", told)
        self._told = told


def _credentials(folder: str) -> Credentials:
    try:
        place = _of_one_time(folder)
        return Credentials(*((place / name).read_text().strip() for name in ("accessKey", "secretKey")))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The credentials in {folder} cannot be read: {error}; mend the Secret") from None


def _of_one_time(folder: str) -> Path:
    """Return where files lie that were put there together: the kubelet swaps the link to them."""
    link = Path(folder, "..data")
    return link.resolve() if link.is_symlink() else Path(folder)


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


def _no_certificate(folder: str, error: Exception) -> ValueError:
    return ValueError(f"There is no certificate in {folder}/ca.crt: {error}; put one there in PEM")
