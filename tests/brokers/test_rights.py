"""A real broker that authorizes each group and topic."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from brokers.guarded import RIGHT, SETTINGS
from ground.instance import temporary
from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.brokers.errors import RejectedError
from rota.brokers.port import Membership
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.transport.responses import require_success
from rota.brokers.rocketmq.wire.frames import Frame
from rota.brokers.rocketmq.wire.signing import Credentials
from rota.model import Queue
from rota.sidecar.consume.start_offset import find_start_offset
from rota.spec import StartFrom, Subscription

BROKER = "broker-0"
TOPIC = "orders"
GROUP = "shop"
QUEUE = Queue(TOPIC, BROKER, 0)
USER = Credentials("shopkeeper", "12345678")
# Codes of administrators' requests.
CREATE_USER = 3001
CREATE_RIGHTS = 3006
UPDATE_RIGHTS = 3007

_AUTHORIZATION = "org.apache.rocketmq.auth.authorization.provider"
WITH_RIGHTS = {
    **SETTINGS,
    "authorizationEnabled": True,
    "authorizationProvider": f"{_AUTHORIZATION}.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{_AUTHORIZATION}.LocalAuthorizationMetadataProvider",
}


@pytest.fixture(scope="module")
def strict() -> Iterator[RocketMQ]:
    with temporary("rights") as instance:
        brokers = RocketMQ(instance, settings=WITH_RIGHTS)
        brokers.up()
        yield brokers
        brokers.down()


@pytest.fixture
async def cluster(strict: RocketMQ) -> AsyncIterator[AdminClient]:
    opened = AdminClient(ConnectionConfig([strict.name_server], credentials=lambda: RIGHT))
    await opened.create_topic(TOPIC, BROKER, 1)
    yield opened
    await opened.close()


async def administer(cluster: AdminClient, code: int, body: dict[str, Any], **fields: str) -> None:
    request = Frame(code=code, fields=fields, body=msgspec.json.encode(body))
    require_success(f"The request {code}", await cluster._client.call(BROKER, request))


def rights(*resources: str) -> dict[str, Any]:
    """Return the rights to consume these topics and groups."""
    entry = {"actions": ["Pub", "Sub", "Get"], "sourceIps": [], "decision": "Allow"}
    return {
        "subject": "User:shopkeeper",
        "policies": [{"entries": [entry | {"resource": resource} for resource in resources]}],
    }


def a_member(strict: RocketMQ, credentials: Credentials) -> RocketMQConsumer:
    membership = Membership(group=GROUP, client_id="10.0.0.1@orders-1#1", subscriptions=[Subscription(TOPIC)])
    return RocketMQConsumer(ConnectionConfig([strict.name_server], credentials=lambda: credentials), membership)


async def test_offset_that_the_broker_denies_for_lack_of_permission_is_never_taken_for_no_offset(
    strict: RocketMQ, cluster: AdminClient
) -> None:
    await administer(cluster, CREATE_USER, {"username": "shopkeeper", "password": "12345678"}, username="shopkeeper")
    await administer(cluster, CREATE_RIGHTS, rights(f"Topic:{TOPIC}"), subject="User:shopkeeper")
    await cluster.update_group(GROUP, BROKER)
    for number in range(3):
        await cluster.send(TOPIC, b"%d" % number, queue=QUEUE)
    owner, member = a_member(strict, RIGHT), a_member(strict, USER)
    await owner.commit(QUEUE, 1)

    async def at_the_end() -> bool:
        return await member.max_offset(QUEUE) == 3

    await soon(at_the_end)  # the user may read the topic's offsets, but not the group's
    for position in ("Latest", "Earliest", "Timestamp"):
        with pytest.raises(RejectedError, match="has no permission"):
            await find_start_offset(QUEUE, member, member, StartFrom(position=position))
    await administer(cluster, UPDATE_RIGHTS, rights(f"Topic:{TOPIC}", f"Group:{GROUP}"), subject="User:shopkeeper")

    async def permitted() -> bool:
        try:
            return await find_start_offset(QUEUE, member, member, StartFrom()) == 1
        except RejectedError:
            return False

    await soon(permitted)
    for consumer in (owner, member):
        await consumer.leave()
