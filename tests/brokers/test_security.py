"""A real broker that asks who is there, and speaks TLS."""

import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from ground.instance import temporary
from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.brokers import Refused, SwitchedOff, Unreachable
from rota.brokers.rocketmq.acl import Credentials
from rota.brokers.rocketmq.client import Site
from rota.brokers.rocketmq.cluster import Cluster

BROKER, TOPIC = "broker-0", "orders"
RIGHT = Credentials("rota", "12345678")
_AUTHENTICATION = "org.apache.rocketmq.auth.authentication.provider"
SETTINGS = {
    "authenticationEnabled": True,
    "authenticationProvider": f"{_AUTHENTICATION}.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{_AUTHENTICATION}.LocalAuthenticationMetadataProvider",
    "initAuthenticationUser": '{"username":"rota","password":"12345678"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"rota","secretKey":"12345678"}',
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[RocketMQ]:
    """Start a broker with access control; RocketMQ takes TLS on its port in any case."""
    with temporary("guarded") as instance:
        brokers = RocketMQ(instance, settings=SETTINGS)
        brokers.up()
        yield brokers
        brokers.down()


@pytest.fixture
async def cluster(guarded: RocketMQ) -> AsyncIterator[Cluster]:
    opened = Cluster(Site([guarded.name_server], credentials=lambda: RIGHT))
    await opened.create_topic(TOPIC, BROKER, 2)
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    ("credentials", "told"),
    [(None, "username cannot be null"), (lambda: Credentials("rota", "wrong"), "check signature failed")],
    ids=["nobody", "a wrong secret"],
)
async def test_who_is_not_let_in_is_told_why(
    guarded: RocketMQ, credentials: Callable[[], Credentials] | None, told: str
) -> None:
    stranger = Cluster(Site([guarded.name_server], credentials=credentials))
    with pytest.raises(Refused, match=told) as refused:
        await stranger.clients("shop", BROKER)
    assert not isinstance(refused.value, SwitchedOff)
    await stranger.close()


async def test_signed_requests_with_and_without_a_body_are_let_in(cluster: Cluster) -> None:
    assert await cluster.clients("shop", BROKER) == ()
    await cluster.send(TOPIC, "grün".encode(), {"KEYS": "ü"})

    async def is_there() -> bool:  # a moment later: brokers take what they have kept into their queues in turn
        return sum(it.last for it in (await cluster.ends(TOPIC, BROKER)).values()) == 1

    await soon(is_there)


async def test_all_of_it_works_by_tls(guarded: RocketMQ, cluster: Cluster) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    secret = Cluster(Site([guarded.name_server], tls=trusting, credentials=lambda: RIGHT))
    assert await secret.queues(TOPIC) == await cluster.queues(TOPIC)
    await secret.send(TOPIC, b"hidden")
    await secret.close()


async def test_a_certificate_that_nobody_vouches_for_is_not_taken(guarded: RocketMQ) -> None:
    careful = Cluster(Site([guarded.name_server], tls=ssl.create_default_context(), credentials=lambda: RIGHT))
    with pytest.raises(Unreachable, match="certificate"):
        await careful.queues(TOPIC)
    await careful.close()


def test_the_secret_stays_out_of_logs() -> None:
    assert RIGHT.secret_key not in f"{RIGHT!r} {Site(['a:1'], credentials=lambda: RIGHT)!r}"
