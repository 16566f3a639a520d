"""Access to a group's brokers: name servers, with credentials and certificates from the group's Secrets.

When a Secret is renewed, the clients of its brokers keep their cached routes, and use the new content in their next
connections and requests. So a client gets functions that return the present credentials and TLS context, not values.
`registry.py:BrokerRegistry.run` reads the Secrets periodically, and `broker_clusters.py:BrokerClusters._renew` replaces
the access of a cluster whose Secrets have changed.
"""

import base64
import logging
import re
import ssl
from collections.abc import Callable, Container
from dataclasses import replace
from typing import NamedTuple, TypeVar

import msgspec

from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.transport.address_policy import AddressPolicy
from rota.brokers.rocketmq.transport.frame_budget import FrameBudget
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.kube.client.api import Api, ApiError
from rota.kube.client.paths import object_path
from rota.spec import RocketMQ
from rota.tls import KeyPair, Validity, certificate_validity, client_context, load_key_pair

_SHORT_HOST = re.compile(r"^(?!localhost:)[^.:\[\]]+(?=:)")  # `ns` in ns:9876; none in ns.shop:9876, [::1]:9876
_Value = TypeVar("_Value")

_log = logging.getLogger(__name__)


class MissingSecretError(Exception):
    """A Secret does not exist, lacks a key, or has unusable content; the message is shown with reason MissingSecret."""


class AccessConfig(NamedTuple):
    """The settings by which a group connects to its brokers, as read from its spec and Secrets at one time."""

    cluster_key: tuple[object, ...]  # name servers and contents of the Secrets; groups with equal keys share a cluster
    config: ConnectionConfig
    client_validity: Validity | None = None  # validity of the client certificate; None: there is none


class ClusterAccess:
    """The access to a broker cluster, whose `AccessConfig` is replaced when Secrets are renewed."""

    def __init__(self, access: AccessConfig) -> None:
        self._access = access

    @property
    def cluster_key(self) -> tuple[object, ...]:
        """The key of the present `AccessConfig`."""
        return self._access.cluster_key

    @property
    def client_validity(self) -> Validity | None:
        """The validity of the present client certificate; None without one."""
        return self._access.client_validity

    @property
    def config(self) -> ConnectionConfig:
        """The settings for a client; their functions return the present TLS context and credentials at each call."""
        config = self._access.config
        return replace(
            config,
            tls=self._present_context if config.tls else None,
            credentials=self._present_credentials if config.credentials else None,
        )

    def renew(self, access: AccessConfig) -> None:
        """Replace certificates and credentials. Name servers, and whether TLS and credentials are used, do not change.

        If `access` uses TLS, it has a TLS context: `BrokerAccessReader.read` leaves it out only for the key of an
        existing cluster, and `BrokerClusters` never renews a cluster with such an access.
        """
        self._access = access

    def _present_context(self) -> ssl.SSLContext:
        tls = self._access.config.tls
        # `__init__` and `renew` get only accesses with a key that no cluster had, for which `BrokerAccessReader.read`
        # built a context; and `renew` never turns TLS off.
        assert tls  # noqa: S101 - see above
        return tls()

    def _present_credentials(self) -> Credentials:
        credentials = self._access.config.credentials
        assert credentials  # noqa: S101 - `renew` never removes credentials
        return credentials()


class _BrokerSecret(msgspec.Struct):
    data: dict[str, str] = {}


class BrokerAccessReader:
    """Reads the Secrets that groups name for their brokers."""

    def __init__(self, api: Api, address_policy: AddressPolicy | None) -> None:
        self._api = api
        self._address_policy = address_policy
        # One memory budget for all brokers: tenants name the brokers, so a budget for each would have no limit in sum.
        self._frame_budget = FrameBudget()

    async def read(self, namespace: str, rocketmq: RocketMQ, known_keys: Container[tuple[object, ...]]) -> AccessConfig:
        """Read a group's Secrets and return its access to its brokers, or raise MissingSecretError.

        The access has no TLS context if its key is in `known_keys`: building a context is slow, and the cluster with
        that key has one already.
        """
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
            # The context never changes: with other certificates the access has another `cluster_key` and context.
            tls = _always(_tls_context(rocketmq, authority, client))
        config = ConnectionConfig(
            rocketmq.name_servers,
            tls=tls,
            credentials=_always(credentials) if credentials else None,
            address_policy=self._address_policy,
            frame_budget=self._frame_budget,
        )
        return AccessConfig(cluster_key, config, certificate_validity(client) if client else None)

    async def is_current(self, cluster_key: tuple[object, ...], namespace: str, rocketmq: RocketMQ) -> bool:
        """Read a group's Secrets; return whether they give the access with this key. Unusable Secrets do not."""
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
        for key in keys:
            if key not in secret.data:
                raise MissingSecretError(f"Secret {name} has no key {key}; add it")
        try:  # the API server stores no value that is not valid base64
            return [base64.b64decode(secret.data[key]).decode() for key in keys]
        except UnicodeDecodeError:
            raise MissingSecretError(f"Secret {name} has a value that is not UTF-8 text; replace it") from None


def _always(value: _Value) -> Callable[[], _Value]:
    return lambda: value


def _tls_context(rocketmq: RocketMQ, authority: str, client: KeyPair | None) -> ssl.SSLContext:
    ca_secret = rocketmq.tls.ca_secret
    context = _trust_authority(ca_secret.name, authority) if ca_secret else ssl.create_default_context()
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


def qualify_name_servers(namespace: str, rocketmq: RocketMQ) -> RocketMQ:
    """Append the group's namespace to name servers without a dot.

    Members' pods look such a name up in their own namespace; the operator's pod would look it up in another one.
    """
    return msgspec.structs.replace(
        rocketmq, name_servers=[_SHORT_HOST.sub(rf"\g<0>.{namespace}", server) for server in rocketmq.name_servers]
    )
