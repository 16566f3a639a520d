"""A real broker that asks who is there, and speaks TLS."""

import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from brokers.guarded import RIGHT, SETTINGS
from ground.instance import temporary
from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.brokers.errors import ConsumptionDisabledError, RejectedError, UnreachableError
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.wire.signing import Credentials

BROKER, TOPIC = "broker-0", "orders"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RocketMQ]:
    """Start a broker with access control; RocketMQ takes TLS on its port in any case."""
    with temporary("guarded") as instance:
        brokers = RocketMQ(instance, settings=SETTINGS)
        brokers.up()
        yield brokers
        brokers.down()


@pytest.fixture
async def cluster(guarded: RocketMQ) -> AsyncIterator[AdminClient]:
    opened = AdminClient(ConnectionConfig([guarded.name_server], credentials=lambda: RIGHT))
    await opened.create_topic(TOPIC, BROKER, 2)
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    ("credentials", "told"),
    [(None, "username cannot be null"), (lambda: Credentials("rota", "wrong"), "check signature failed")],
    ids=["nobody", "a wrong secret"],
)
async def test_credentials_that_are_missing_or_wrong_are_rejected_with_the_reason(
    guarded: RocketMQ, credentials: Callable[[], Credentials] | None, told: str
) -> None:
    stranger = AdminClient(ConnectionConfig([guarded.name_server], credentials=credentials))
    with pytest.raises(RejectedError, match=told) as refused:
        await stranger.clients("shop", BROKER)
    assert not isinstance(refused.value, ConsumptionDisabledError)
    await stranger.close()


async def test_signature_is_accepted_on_requests_with_and_without_a_body(cluster: AdminClient) -> None:
    assert await cluster.clients("shop", BROKER) == ()
    await cluster.send(TOPIC, "grün".encode(), {"KEYS": "ü"})

    async def is_there() -> bool:  # a moment later: brokers take what they have kept into their queues in turn
        return sum(it.last for it in (await cluster.ends(TOPIC, BROKER)).values()) == 1

    await soon(is_there)


async def test_tls_works_for_name_server_and_broker_requests(guarded: RocketMQ, cluster: AdminClient) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    secret = AdminClient(ConnectionConfig([guarded.name_server], tls=lambda: trusting, credentials=lambda: RIGHT))
    assert await secret.queues(TOPIC) == await cluster.queues(TOPIC)
    await secret.send(TOPIC, b"hidden")
    await secret.close()


async def test_tls_certificate_that_is_not_trusted_is_rejected(guarded: RocketMQ) -> None:
    careful = AdminClient(
        ConnectionConfig([guarded.name_server], tls=ssl.create_default_context, credentials=lambda: RIGHT)
    )
    with pytest.raises(UnreachableError, match="certificate"):
        await careful.queues(TOPIC)
    await careful.close()


def test_credentials_stay_out_of_logs() -> None:
    assert RIGHT.secret_key not in f"{RIGHT!r} {ConnectionConfig(['a:1'], credentials=lambda: RIGHT)!r}"
