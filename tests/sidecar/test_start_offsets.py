"""The start offsets of a new group at a real broker, and the filters of its messages."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.brokers.errors import NotFoundError
from rota.brokers.port import Membership
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.spec import Subscription
from sidecar.fleet import SidecarFleet, a_fleet


async def start_member(fleet: SidecarFleet) -> None:
    """Start a member with all queues, and wait until it has found each start offset."""
    await fleet.add("a")
    await fleet.grant(a=[*fleet.queues, fleet.retry])

    async def has_all_offsets() -> bool:
        report = await fleet.read_report("a")
        return report is not None and all(queue.committed is not None for queue in report.queues)

    await soon(has_all_offsets)


AT_A_BROKER = pytest.mark.slow("startFrom Latest and Earliest of whole sidecars at a real broker")


@pytest.mark.parametrize(
    ("position", "missed"),
    [
        pytest.param("Latest", 20, marks=AT_A_BROKER),
        pytest.param("Earliest", 0, marks=AT_A_BROKER),
        ("Timestamp", 20),
    ],
)
async def test_start_from_decides_which_messages_a_new_group_gets(
    rocketmq: RocketMQ, tmp_path: Path, position: str, missed: int
) -> None:
    async with a_fleet(rocketmq, tmp_path, startFrom={"position": position}) as fleet:
        early = await fleet.send(20)
        await asyncio.sleep(1.1)  # timestamps have a resolution of a second
        if position == "Timestamp":
            at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            fleet.settings["startFrom"] = {"position": position, "timestamp": at}
            await asyncio.sleep(1.1)
        late = [] if position == "Latest" else await fleet.send(20)
        await start_member(fleet)
        fleet.kill("a", "sidecar")  # its next process must not search for start offsets again
        late += await fleet.send(20)
        fleet.pods["a"].start_sidecar()
        expected = {*early[missed:], *late}
        await fleet.wait_until_all_done(expected)
        await fleet.wait_until_all_committed()
        assert fleet.done() == expected


@pytest.mark.parametrize("position", ["Latest", "Timestamp"])
async def test_start_from_does_not_apply_to_the_retry_topic_which_begins_at_its_first_message(
    rocketmq: RocketMQ, tmp_path: Path, position: str
) -> None:
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat(timespec="seconds").replace("+00:00", "Z")
    start = {"position": position} | ({"timestamp": tomorrow} if position == "Timestamp" else {})
    async with a_fleet(rocketmq, tmp_path, queues=1, startFrom=start) as fleet:
        [failed, _] = await fleet.send(2)
        subscriptions = [Subscription(fleet.topic)]
        member = RocketMQConsumer(
            fleet.site, Membership(group=fleet.group, client_id="10.0.0.9@ended", subscriptions=subscriptions)
        )
        await member.join()  # it commits nothing, like a member that is killed
        pulled = await member.pull(fleet.queues[0], 0)
        await member.send_back(pulled.messages[0], delay_level=1)
        await member.leave()

        async def is_in_the_retry_topic() -> bool:
            with suppress(NotFoundError):
                ends = await fleet.cluster.offset_ranges(fleet.retry.topic, "broker-0")
                return sum(offset_range.max_offset for offset_range in ends.values()) == 1
            return False

        await soon(is_in_the_retry_topic)
        await start_member(fleet)
        await fleet.wait_until_all_done({failed})
        assert [delivery.number for delivery in fleet.delivered()] == [failed]


async def test_filter_by_tags_delivers_only_matching_messages_and_commits_past_the_others(
    rocketmq: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        subscription = {"topic": fleet.topic, "expression": "AaAa || paid"}
        fleet.settings["subscriptions"] = [subscription]
        for number, tag in enumerate(
            ["AaAa", "BBBB", "paid", "open", ""] * 8
        ):  # Java's hashes of the first two are equal
            await send(fleet, number, {"TAGS": tag} if tag else {})
        await start_member(fleet)
        matching = {number for number in range(40) if number % 5 in {0, 2}}
        await fleet.wait_until_all_done(matching)
        await fleet.wait_until_all_committed()
        assert {delivery.number for delivery in fleet.delivered()} == matching


async def test_filter_by_sql92_is_applied_by_a_broker_that_supports_it(rocketmq: RocketMQ, tmp_path: Path) -> None:
    async with a_fleet(rocketmq, tmp_path) as fleet:
        fleet.settings["subscriptions"] = [by_sql(fleet)]
        for number in range(40):
            await send(fleet, number, {"price": f"{number}"})
        await start_member(fleet)
        await fleet.wait_until_all_done(range(30, 40))
        assert {delivery.number for delivery in fleet.delivered()} == {*range(30, 40)}


@pytest.fixture
def without_sql92(rocketmq: RocketMQ) -> Iterator[RocketMQ]:
    [broker] = rocketmq.brokers
    rocketmq.change_setting(broker, "enablePropertyFilter", value=False)
    yield rocketmq
    rocketmq.change_setting(broker, "enablePropertyFilter", value=True)


async def test_filter_by_sql92_unsupported_by_the_broker_is_reported_before_joining(
    without_sql92: RocketMQ, tmp_path: Path
) -> None:
    async with a_fleet(without_sql92, tmp_path) as fleet:
        fleet.settings["subscriptions"] = [by_sql(fleet)]
        pod = await fleet.add("a")
        await fleet.grant(a=fleet.queues)

        async def refused() -> str:
            report = await fleet.read_report("a")
            return report.troubles.get("BrokerRefuses", "") if report else ""

        assert "SQL92" in await soon(refused)
        assert not await fleet.cluster.online_consumers(fleet.group, "broker-0")
        assert await pod.terminate() == 0


def by_sql(fleet: SidecarFleet) -> dict[str, Any]:
    return {"topic": fleet.topic, "type": "SQL92", "expression": "price >= 30"}


async def send(fleet: SidecarFleet, number: int, properties: dict[str, str]) -> None:
    queue = fleet.queues[number % len(fleet.queues)]
    await fleet.cluster.send(fleet.topic, b"%d" % number, properties, queue=queue)
