"""Access to a group's brokers: name servers, with credentials and certificates from the group's Secrets.

A renewed Secret is a new access to the same brokers: their clients use it from the next connection and request on.
"""

import base64
import logging
import re
import ssl
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec

from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.frame_budget import FrameBudget
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.kube.client.api import Api, ApiError
from rota.kube.client.paths import object_path
from rota.spec import RocketMQ
from rota.tls import KeyPair, Validity, certificate_validity, client_context, load_key_pair

_SHORT_HOST = re.compile(r"^(?!localhost:)[^.:\[\]]+(?=:)")

_log = logging.getLogger(__name__)


class MissingSecretError(Exception):
    """A Secret, or a key in it, does not exist or cannot be used; the message is for the group's condition."""


class AccessConfig(NamedTuple):
    """How to connect to a broker cluster, as a group names it; groups with an equal `cluster_key` share connections."""

    cluster_key: tuple[object, ...]
    config: ConnectionConfig
    client_validity: Validity | None = None  # of the client certificate


class ClusterAccess:
    """The present access to a broker cluster; the clients that were made with its `config` use a renewed one, too."""

    def __init__(self, access: AccessConfig) -> None:
        self._access = access

    @property
    def cluster_key(self) -> tuple[object, ...]:
        """Equal for groups that may share the connections."""
        return self._access.cluster_key

    @property
    def client_validity(self) -> Validity | None:
        """The validity of the present client certificate; None without one."""
        return self._access.client_validity

    @property
    def config(self) -> ConnectionConfig:
        """The settings for a client; its certificates and credentials are always the present ones."""
        config = self._access.config
        credentials = self._sign if config.credentials else None
        return replace(config, tls=self._present_context if config.tls else None, credentials=credentials)

    def renew(self, access: AccessConfig) -> None:
        """Replace certificates and credentials; name servers, and whether there is TLS or a user, stay."""
        self._access = access

    def _present_context(self) -> ssl.SSLContext:
        tls = self._access.config.tls
        assert tls  # noqa: S101 - an access with another key has a context
        return tls()

    def _sign(self) -> Credentials:
        credentials = self._access.config.credentials
        assert credentials  # noqa: S101 - as the one before, which comes from the same fields of the group
        return credentials()


class _BrokerSecret(msgspec.Struct):
    data: dict[str, str] = {}


class BrokerAccessReader:
    """Reads the Secrets that groups name for their brokers."""

    def __init__(self, api: Api, address_policy: AddressPolicy | None) -> None:
        self._api = api
        self._address_policy = address_policy
        self._frame_budget = FrameBudget()  # one budget for all brokers, as tenants choose them

    async def read(self, namespace: str, rocketmq: RocketMQ, known_keys: Container[tuple[object, ...]]) -> AccessConfig:
        """Return the access to brokers, without a TLS context if its key is known. Raise MissingSecretError."""
        credentials: Credentials | None = None
        authority = ""
        client: KeyPair | None = None
        if rocketmq.credentials_secret:
            keys = await self._read_secret(namespace, rocketmq.credentials_secret.name, "accessKey", "secretKey")
            credentials = Credentials(*keys)
        if rocketmq.tls.enabled and rocketmq.tls.ca_secret:
            (authority,) = await self._read_secret(namespace, rocketmq.tls.ca_secret.name, "ca.crt")
        if rocketmq.tls.enabled and rocketmq.tls.client_secret:
            client = KeyPair(*await self._read_secret(namespace, rocketmq.tls.client_secret.name, "tls.crt", "tls.key"))
        cluster_key = (tuple(sorted({*rocketmq.name_servers})), credentials, rocketmq.tls.enabled, authority, client)
        tls: Callable[[], ssl.SSLContext] | None = None
        if rocketmq.tls.enabled and cluster_key not in known_keys:
            tls = partial(_return, _tls_context(rocketmq, authority, client))  # a replaced certificate has another key
        signing = credentials and partial(Credentials, *credentials)
        config = ConnectionConfig(rocketmq.name_servers, tls, signing, self._address_policy, self._frame_budget)
        return AccessConfig(cluster_key, config, certificate_validity(client) if client else None)

    async def leads_to(self, cluster_key: tuple[object, ...], namespace: str, rocketmq: RocketMQ) -> bool:
        """Whether a group's Secrets lead to the access with this key at present; unusable ones do not."""
        try:
            return (await self.read(namespace, rocketmq, {cluster_key})).cluster_key == cluster_key
        except MissingSecretError:
            return False

    async def _read_secret(self, namespace: str, name: str, *keys: str) -> list[str]:
        try:
            secret = await self._api.get(object_path("secrets", namespace, name), _BrokerSecret)
        except ApiError as error:
            # The same message for 403 and 404: it must not reveal that a Secret exists which is forbidden to read.
            _log.info("Secret %s/%s could not be read: %s", namespace, name, error)
            reason = "does not exist or the operator may not read it"
            message = f"Secret {name}, which spec.broker names, {reason}; create it, or grant get on it"
            raise MissingSecretError(message) from error
        missing = [key for key in keys if key not in secret.data]
        if missing:
            raise MissingSecretError(f"Secret {name} has no key {missing[0]}; add it")
        try:
            return [base64.b64decode(secret.data[key]).decode() for key in keys]
        except UnicodeDecodeError:
            raise MissingSecretError(f"Secret {name} has a value that is not UTF-8 text; replace it") from None


def _tls_context(rocketmq: RocketMQ, authority: str, client: KeyPair | None) -> ssl.SSLContext:
    context = (
        _trust_authority(rocketmq.tls.ca_secret.name, authority)
        if rocketmq.tls.ca_secret
        else ssl.create_default_context()
    )
    if rocketmq.tls.client_secret and client:
        try:
            load_key_pair(context, client)
        except ValueError as error:
            name = rocketmq.tls.client_secret.name
            reason = f"has no usable certificate and key under tls.crt and tls.key: {error}"
            raise MissingSecretError(f"Secret {name} {reason}; correct them") from None
    return context


def _trust_authority(name: str, authority: str) -> ssl.SSLContext:
    try:
        return client_context(authority)
    except ValueError:
        raise MissingSecretError(f"Secret {name} has no PEM certificate under ca.crt; add it") from None


def _return(context: ssl.SSLContext) -> ssl.SSLContext:
    return context


def qualify_name_servers(namespace: str, rocketmq: RocketMQ) -> RocketMQ:
    """Qualify name servers without a dot with the group's namespace: members' pods resolve them as Services of it."""
    return msgspec.structs.replace(
        rocketmq, name_servers=[_SHORT_HOST.sub(rf"\g<0>.{namespace}", server) for server in rocketmq.name_servers]
    )
