"""A real broker that requires credentials and supports TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from brokers.guarded import RIGHT, SETTINGS, a_mutual_tls_broker
from ground.instance import temporary
from ground.keys import Authority
from ground.poll import soon
from ground.rocketmq import RocketMQ
from group_secrets import GroupSecrets, pair_data
from rota.brokers.errors import ConsumptionDisabledError, RejectedError, UnreachableError
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api
from rota.kube.client.objects import CustomResource, Metadata
from rota.kube.state.group import Group
from rota.model import Reason

BROKER, TOPIC = "broker-0", "orders"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RocketMQ]:
    """Start a broker with access control; RocketMQ always accepts TLS on its port."""
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
    ("credentials", "reason"),
    [(None, "username cannot be null"), (lambda: Credentials("rota", "wrong"), "check signature failed")],
    ids=["no credentials", "a wrong secret"],
)
async def test_credentials_that_are_missing_or_wrong_are_rejected_with_the_reason(
    guarded: RocketMQ, credentials: Callable[[], Credentials] | None, reason: str
) -> None:
    stranger = AdminClient(ConnectionConfig([guarded.name_server], credentials=credentials))
    with pytest.raises(RejectedError, match=reason) as refused:
        await stranger.online_consumers("shop", BROKER)
    assert not isinstance(refused.value, ConsumptionDisabledError)
    await stranger.close()


async def test_signature_is_accepted_on_requests_with_and_without_a_body(cluster: AdminClient) -> None:
    assert await cluster.online_consumers("shop", BROKER) == ()
    await cluster.send(TOPIC, "grün".encode(), {"KEYS": "ü"})

    async def is_in_the_queue() -> bool:  # a moment later: brokers add stored messages to their queues asynchronously
        return (
            sum(offset_range.max_offset for offset_range in (await cluster.offset_ranges(TOPIC, BROKER)).values()) == 1
        )

    await soon(is_in_the_queue)


async def test_tls_works_for_name_server_and_broker_requests(guarded: RocketMQ, cluster: AdminClient) -> None:
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
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


@pytest.mark.slow("a group's certificate is renewed and replaced by a foreign one, at a real broker")
async def test_tls_certificate_renewed_keeps_the_views_and_a_foreign_one_ends_the_former_connections(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path, "authority")
    secrets = GroupSecrets()
    secrets.put("shop", "ca", {"ca.crt": authority.own.certificate.read_text()})
    with a_mutual_tls_broker(authority, "renewed") as rocketmq:
        rocketmq.create_topic(TOPIC, 2)
        registry = BrokerRegistry(cast("Api", secrets))
        registry.set_leading(is_leading=True)
        group = a_secured_group(rocketmq.name_server)
        secrets.put("shop", "client", pair_data(authority.issue("one", "one")))
        registry.update_group(group)

        async def has_lag() -> bool:
            await registry.poll_group(group)
            return bool(registry.lag_of(("shop", "orders")).queues)

        await soon(has_lag)
        secrets.put("shop", "client", pair_data(authority.issue("two", "two")))
        polling = asyncio.create_task(registry.poll_group(group))
        while not polling.done():
            await asyncio.sleep(0)
            assert registry.state_of(group, 0.0).views[TOPIC]
            assert registry.lag_of(("shop", "orders")).queues
        assert registry.state_of(group, 0.0).problems == ()
        foreign = Authority(tmp_path / "other", "stranger").issue("foreign", "foreign")
        secrets.put("shop", "client", pair_data(foreign))

        async def is_refused() -> bool:
            await registry.poll_group(group)
            return {problem.reason for problem in registry.state_of(group, 0.0).problems} == {Reason.BROKER_UNREACHABLE}

        await soon(is_refused)
        await registry.close()


def a_secured_group(name_server: str) -> Group:
    tls = {"enabled": True, "caSecret": {"name": "ca"}, "clientSecret": {"name": "client"}}
    rocketmq = {"nameServers": [name_server], "tls": tls}
    spec = {"broker": {"rocketmq": rocketmq}, "subscriptions": [{"topic": TOPIC}]}
    group = Group("shop", "orders")
    group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop", generation=1), spec), None)
    return group
