"""How a group's brokers are reached: name servers, credentials and certificates from its Secrets."""

import base64
import logging
import ssl
from collections.abc import Callable, Container
from functools import partial
from typing import NamedTuple

import msgspec

from rota.brokers.rocketmq.routing import Site
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.frame_budget import FrameBudget
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.kube.client.api import Api, ApiError
from rota.kube.client.paths import object_path
from rota.spec import RocketMQ
from rota.tls import KeyPair, load_key_pair, trusting

_log = logging.getLogger(__name__)


class MissingSecretError(Exception):
    """A Secret, or a key in it, does not exist or cannot be used; the message is for the group's condition."""


class Access(NamedTuple):
    """A way to a cluster of brokers, and what distinguishes it from others."""

    mark: tuple[object, ...]
    site: Site


class _Secret(msgspec.Struct):
    data: dict[str, str] = {}


class BrokerAccess:
    """Reads Secrets that groups name."""

    def __init__(self, api: Api, address_policy: AddressPolicy | None) -> None:
        self._api = api
        self._address_policy = address_policy
        self._frames = FrameBudget()  # one for all brokers: each tenant names some of them

    async def read(self, namespace: str, reached: RocketMQ, known: Container[tuple[object, ...]]) -> Access:
        """Return the access to brokers; one whose mark is known already gets no TLS context of its own."""
        credentials: Credentials | None = None
        authority = ""
        client: KeyPair | None = None
        if reached.credentials_secret:
            found = await self._secret(namespace, reached.credentials_secret.name, "accessKey", "secretKey")
            credentials = Credentials(*found)
        if reached.tls.enabled and reached.tls.ca_secret:
            (authority,) = await self._secret(namespace, reached.tls.ca_secret.name, "ca.crt")
        if reached.tls.enabled and reached.tls.client_secret:
            client = KeyPair(*await self._secret(namespace, reached.tls.client_secret.name, "tls.crt", "tls.key"))
        mark = (tuple(sorted({*reached.name_servers})), credentials, reached.tls.enabled, authority, client)
        tls: Callable[[], ssl.SSLContext] | None = None
        if reached.tls.enabled and mark not in known:
            tls = partial(_return, _context(reached, authority, client))  # a replaced certificate has another mark
        signing = credentials and partial(Credentials, *credentials)
        return Access(mark, Site(reached.name_servers, tls, signing, self._address_policy, self._frames))

    async def _secret(self, namespace: str, name: str, *keys: str) -> list[str]:
        try:
            found = await self._api.get(object_path("secrets", namespace, name), _Secret)
        except ApiError as error:
            # One sentence for both cases: it must not reveal that a Secret exists which the operator may not read.
            _log.info("Secret %s/%s could not be read: %s", namespace, name, error)
            reason = "does not exist or the operator may not read it"
            message = f"Secret {name}, which spec.broker names, {reason}; create it, or grant get on it"
            raise MissingSecretError(message) from error
        missing = [key for key in keys if key not in found.data]
        if missing:
            raise MissingSecretError(f"Secret {name} has no key {missing[0]}; add it")
        try:
            return [base64.b64decode(found.data[key]).decode() for key in keys]
        except UnicodeDecodeError:
            raise MissingSecretError(f"Secret {name} has a value that is no text; write it anew") from None


def _context(reached: RocketMQ, authority: str, client: KeyPair | None) -> ssl.SSLContext:
    context = (
        _trusting(reached.tls.ca_secret.name, authority) if reached.tls.ca_secret else ssl.create_default_context()
    )
    if reached.tls.client_secret and client:
        try:
            load_key_pair(context, client)
        except ValueError as error:
            name = reached.tls.client_secret.name
            reason = f"has no usable certificate and key under tls.crt and tls.key: {error}"
            raise MissingSecretError(f"Secret {name} {reason}; correct them") from None
    return context


def _trusting(name: str, authority: str) -> ssl.SSLContext:
    try:
        return trusting(authority)
    except ValueError:
        raise MissingSecretError(f"Secret {name} has no certificate under ca.crt; put one there in PEM") from None


def _return(context: ssl.SSLContext) -> ssl.SSLContext:
    return context
