"""Brokers that require credentials or a client certificate."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from ground.instance import temporary
from ground.keys import Authority
from ground.rocketmq import RocketMQ
from rota.brokers.rocketmq.wire.signing import Credentials

RIGHT = Credentials("rota", "12345678")


_AUTHENTICATION = "org.apache.rocketmq.auth.authentication.provider"


def settings_of(user: Credentials) -> dict[str, object]:
    """Return the settings of a broker with this user."""
    name, password = user.access_key, user.secret_key
    return {
        "authenticationEnabled": True,
        "authenticationProvider": f"{_AUTHENTICATION}.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{_AUTHENTICATION}.LocalAuthenticationMetadataProvider",
        "initAuthenticationUser": f'{{"username":"{name}","password":"{password}"}}',
        "innerClientAuthenticationCredentials": f'{{"accessKey":"{name}","secretKey":"{password}"}}',
    }


SETTINGS = settings_of(RIGHT)


@contextmanager
def a_tls_broker(
    authority: Authority, name: str, options: str = "", settings: Mapping[str, object] | None = None
) -> Iterator[RocketMQ]:
    """Start a broker with a certificate of this authority."""
    with temporary(name) as instance:
        pair = authority.issue(name, "broker", ips=[instance.address()])
        files = f"-Dtls.server.certPath={pair.certificate} -Dtls.server.keyPath={pair.key}"
        java = f"JAVA_TOOL_OPTIONS=-Dtls.test.mode.enable=false {files} {options}"
        brokers = RocketMQ(instance, settings=settings, prefix=("env", java))
        brokers.up()
        yield brokers
        brokers.down()


def a_mutual_tls_broker(authority: Authority, name: str) -> AbstractContextManager[RocketMQ]:
    """Start a broker that requires a client certificate of this authority."""
    trusted = f"-Dtls.server.authClient=true -Dtls.server.trustCertPath={authority.own.certificate}"
    return a_tls_broker(authority, name, f"-Dtls.server.need.client.auth=require {trusted}")
