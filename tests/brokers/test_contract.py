"""The contract of the port to brokers, tested on a real broker and on the in-memory broker."""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import pytest

from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.brokers.errors import BrokerError, ConsumptionDisabledError, NotFoundError, RejectedError, UnreachableError
from rota.brokers.memory import BROKER, NAME_SERVER, MemoryCluster, MemoryConsumer
from rota.brokers.message import MESSAGE_OVERHEAD_BYTES, Message
from rota.brokers.port import (
    DEAD_LETTER_LEVEL,
    RETRY_LEVEL,
    BrokerGroupSettings,
    BrokerOffsets,
    Consumer,
    Membership,
    OffsetCorrection,
    PullResult,
)
from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.brokers import PRODUCER_GROUP
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.wire import requests
from rota.model import Queue
from rota.spec import StartFrom, Subscription
from rota.spec.consumer_settings import ConsumerSettings

LONG_POLL_SECONDS = 60.0  # a pull that is held this long was not woken
ONE_SECOND_LEVEL = 1  # the shortest delay

_numbers = count(1)


@dataclass
class ContractCluster:
    """A cluster with one broker, and a test's members; group and topic are unique to the test."""

    cluster: AdminClient | MemoryCluster
    new: Callable[[Membership], Consumer]
    enable: Callable[[str, int], Awaitable[None]]
    delete: Callable[[str], Awaitable[None]]
    send_compressed: Callable[[Queue, bytes], Awaitable[None]]  # sends a ZLIB body
    broker: str
    number: int = field(default_factory=lambda: next(_numbers))
    members: list[Consumer] = field(default_factory=list)

    @property
    def group(self) -> str:
        return f"group-{self.number}"

    async def topic(self, queues: int = 1) -> list[Queue]:
        topic = f"topic-{self.number}"
        await self.cluster.create_topic(topic, self.broker, queues)
        return list(await self.queues(topic))

    async def queues(self, topic: str) -> Sequence[Queue]:
        """Return the queues of a topic that was just created."""

        async def find_queues() -> Sequence[Queue]:
            try:
                return await self.cluster.queues(topic)
            except NotFoundError:
                return ()

        return await soon(find_queues)

    def member(self, *topics: str, name: str = "one", group: str = "", tags: str = "*", **more: Any) -> Consumer:
        subscriptions = [Subscription(topic=topic, expression=tags) for topic in topics]
        return self.create_member(
            Membership(group=group or self.group, client_id=name, subscriptions=subscriptions, **more)
        )

    def create_member(self, member: Membership) -> Consumer:
        self.members.append(self.new(member))
        return self.members[-1]

    async def joined_member(self, *topics: str, **more: Any) -> Consumer:
        member = self.member(*topics, **more)
        await member.join()
        return member

    async def send(self, queue: Queue, *bodies: str, **properties: str) -> None:
        """Send messages, and wait until they can be pulled: a broker adds them to the queue later."""
        previous = await self.message_count([queue])
        for body in bodies:
            await self.cluster.send(queue.topic, body.encode(), properties, queue)
        await self.wait_for_messages(previous + len(bodies), [queue])

    async def message_count(self, queues: Sequence[Queue]) -> int:
        ends = await self.cluster.offset_ranges(queues[0].topic, self.broker)
        return sum(ends[queue].max_offset for queue in queues)

    async def wait_for_messages(self, count: int, queues: Sequence[Queue]) -> None:
        async def have_arrived() -> bool:
            return await self.message_count(queues) == count

        await soon(have_arrived)

    async def leave(self) -> None:
        for member in self.members:
            await member.leave()
        await self.cluster.close()


@pytest.fixture(scope="session", params=["memory", "rocketmq"])
def broker(request: pytest.FixtureRequest) -> RocketMQ | None:
    """Start the real broker for the first test that uses it; None stands for the in-memory broker.

    The session scope makes the broker start before the leak detector takes its first sample.
    """
    return request.getfixturevalue("rocketmq") if request.param == "rocketmq" else None


@pytest.fixture
async def testbed(broker: RocketMQ | None) -> AsyncIterator[ContractCluster]:
    cluster = real(broker) if broker else in_memory(MemoryCluster())
    yield cluster
    await cluster.leave()


def in_memory(memory: MemoryCluster) -> ContractCluster:
    async def enable(group: str, enabled: int) -> None:
        await memory.update_group(group, BROKER, consume_enabled=bool(enabled))

    async def send_compressed(queue: Queue, body: bytes) -> None:
        await memory.send(queue.topic, body, {"UNIQ_KEY": f"packed-{len(memory.store.compressed_ids)}"}, queue)
        memory.store.compressed_ids.add(f"packed-{len(memory.store.compressed_ids)}")

    def new(member: Membership) -> Consumer:
        return MemoryConsumer(memory, member)

    return ContractCluster(memory, new, enable, memory.delete_topic, send_compressed, BROKER)


def real(rocketmq: RocketMQ) -> ContractCluster:
    site = ConnectionConfig([rocketmq.name_server])
    cluster = AdminClient(site)

    async def enable(group: str, enabled: int) -> None:
        await cluster.update_group(group, "broker-0", consumeEnable=bool(enabled))

    async def delete(topic: str) -> None:
        await asyncio.to_thread(rocketmq.delete_topic, topic)

    async def send_compressed(queue: Queue, body: bytes) -> None:
        request = requests.send(
            PRODUCER_GROUP, queue.topic, body, {}, broker=queue.broker, queue_id=queue.id, born_ms=0
        )
        packed = msgspec.structs.replace(request, fields={**request.fields, "f": 0x301})
        await cluster._client.call_or_raise(queue.broker, packed)

    return ContractCluster(
        cluster, lambda member: RocketMQConsumer(site, member), enable, delete, send_compressed, "broker-0"
    )


def bodies(result: PullResult) -> list[str]:
    return [message.body.decode() for message in result.messages]


async def pull_woken_by(member: Consumer, queue: Queue, offset: int, by: Callable[[], Awaitable[None]]) -> PullResult:
    """Return the result of a held pull that an event wakes, within half of the hold time."""
    pulling = asyncio.create_task(member.pull(queue, offset, wait_seconds=LONG_POLL_SECONDS))
    async with asyncio.timeout(LONG_POLL_SECONDS / 2):
        await asyncio.sleep(0)
        await member.max_offset(queue)  # a round trip on the same connection: the broker has received the pull
        await by()
        return await pulling


async def assert_all_fail(error_type: type[BrokerError], *calls: Coroutine[Any, Any, object]) -> None:
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, error_type), result


async def wait_until(predicate: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return predicate()

    assert await soon(holds)


def no_queue(queue: Queue) -> Queue:
    return queue._replace(id=40)


def no_topic(queue: Queue) -> Queue:
    return queue._replace(topic="nowhere")


# Topics and messages.


async def test_topic_lists_its_queues(testbed: ContractCluster) -> None:
    queues = await testbed.topic(3)
    assert queues == [Queue(queues[0].topic, testbed.broker, number) for number in range(3)]
    assert await testbed.cluster.queue_counts(queues[0].topic) == {testbed.broker: 3}
    assert await testbed.cluster.broker_names() == (testbed.broker,)
    assert testbed.cluster.addresses([testbed.broker])


async def test_topic_that_does_not_exist_is_not_found(testbed: ContractCluster) -> None:
    await assert_all_fail(
        NotFoundError,
        testbed.cluster.queues("nowhere"),
        testbed.cluster.offset_ranges("nowhere", testbed.broker),
        testbed.cluster.send("nowhere", b"body"),
    )


async def test_message_sent_to_a_queue_is_pulled_from_it(testbed: ContractCluster) -> None:
    queue, empty_queue = await testbed.topic(2)
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "first", TAGS="t", KEYS="k l", colour="red")
    await testbed.send(queue, "second")
    result = await member.pull(queue, 0, wait_seconds=0)
    assert bodies(result) == ["first", "second"]
    assert result._replace(messages=()) == PullResult((), 2, 0, 2)
    message = result.messages[0]
    assert (message.queue, message.offset, message.reconsume_times, message.body_error) == (queue, 0, 0, "")
    assert (message.topic, message.tag, message.keys) == (queue.topic, "t", "k l")
    assert message.properties["colour"] == "red"
    assert message.id == message.properties["UNIQ_KEY"] != result.messages[1].id
    assert 0 < message.born_ms <= message.stored_ms <= result.messages[1].stored_ms
    assert bodies(await member.pull(empty_queue, 0, wait_seconds=0)) == []


async def test_message_may_be_sent_without_naming_a_queue(testbed: ContractCluster) -> None:
    queues = await testbed.topic(2)
    for _ in range(3):
        await testbed.cluster.send(queues[0].topic, b"to any")
    await testbed.wait_for_messages(3, queues)


@pytest.mark.parametrize("make_missing", [no_queue, no_topic])
async def test_message_to_a_queue_that_does_not_exist_is_not_sent(
    testbed: ContractCluster, make_missing: Callable[[Queue], Queue]
) -> None:
    [queue] = await testbed.topic()
    missing = make_missing(queue)
    await assert_all_fail(NotFoundError, testbed.cluster.send(missing.topic, b"body", queue=missing))
    await assert_all_fail(NotFoundError, testbed.cluster.queues("nowhere"))  # the rejected message created no topic


async def test_message_to_a_queue_of_another_topic_is_rejected(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    with pytest.raises(ValueError, match="is not a queue of topic nowhere"):
        await testbed.cluster.send("nowhere", b"body", queue=queue)


@pytest.mark.parametrize("properties", [{"a\x01": "b"}, {"a": "\x02b"}])
async def test_message_properties_with_separator_characters_are_rejected(
    testbed: ContractCluster, properties: dict[str, str]
) -> None:
    [queue] = await testbed.topic()
    with pytest.raises(ValueError, match="which are reserved as separators"):
        await testbed.cluster.send(queue.topic, b"body", properties, queue)


async def test_broker_that_is_unknown_is_unreachable(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    await assert_all_fail(
        UnreachableError,
        testbed.cluster.offset_ranges(queue.topic, "no-broker"),
        testbed.cluster.online_consumers(testbed.group, "no-broker"),
        testbed.cluster.group_settings(testbed.group, "no-broker"),
    )


async def test_message_without_a_body_is_rejected(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    await assert_all_fail(RejectedError, testbed.cluster.send(queue.topic, b"", queue=queue))


async def test_pull_returns_as_many_messages_as_requested_up_to_32(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, *map(str, range(40)))
    result = await member.pull(queue, 1, max_messages=2, wait_seconds=0)
    assert (bodies(result), result.next_offset, result.max_offset) == (["1", "2"], 3, 40)
    assert len((await member.pull(queue, 0, max_messages=100, wait_seconds=0)).messages) == 32


async def test_pull_returns_at_most_256_kib_but_at_least_one_message(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, *("x" * 100_000 for _ in range(3)), "y" * 300_000)
    await member.pull(queue, 0, wait_seconds=0)
    for offset, number in ((0, 2), (2, 1), (3, 1)):
        result = await member.pull(queue, offset, wait_seconds=0)
        assert (len(result.messages), result.next_offset) == (number, offset + number)


class Admission:
    """Admits messages as long as they fit; bodies of more than 1,000 bytes stay compressed."""

    max_body_bytes = 1000

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def admit(self, memory_bytes: int) -> bool:
        self.free_bytes -= memory_bytes
        return self.free_bytes >= 0


async def test_pull_ends_before_the_first_message_that_admission_rejects(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "x" * 100, "y" * 200, "z")
    sizes = [size + MESSAGE_OVERHEAD_BYTES for size in (100, 200, 1)]
    for admitted in range(3):
        for free_bytes in (sum(sizes[:admitted]), sum(sizes[: admitted + 1]) - 1):
            result = await member.pull(queue, 0, wait_seconds=LONG_POLL_SECONDS, admission=Admission(free_bytes))
            assert (len(result.messages), result.next_offset, result.max_offset) == (admitted, admitted, 3)
    result = await member.pull(queue, 1, wait_seconds=0, admission=Admission(sizes[1]))
    assert (bodies(result), result.next_offset) == (["y" * 200], 2)
    assert len((await member.pull(queue, 0, wait_seconds=0, admission=Admission(sum(sizes)))).messages) == 3


async def test_compression_beyond_the_limit_leaves_the_body_compressed_and_reports_the_reason(
    testbed: ContractCluster,
) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    bomb = zlib.compress(bytes(1001))
    for body in (bomb, zlib.compress(bytes(1000))):
        await testbed.send_compressed(queue, body)
    await testbed.wait_for_messages(2, [queue])
    await testbed.send(queue, "good")
    result = await member.pull(queue, 0, wait_seconds=0, admission=Admission(10_000))
    assert [message.body for message in result.messages] == [bomb, bytes(1000), b"good"]
    too_large = "when decompressed, the limit in spec.delivery.buffer.mebibytesPerMessage"
    assert [too_large in message.body_error for message in result.messages] == [True, False, False]
    assert [bool(message.body_error) for message in result.messages] == [True, False, False]
    assert len((await member.pull(queue, 0, wait_seconds=0)).messages[0].body) == 1001  # with the default limit


async def test_pull_at_the_end_returns_nothing(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    assert await member.pull(queue, 0, wait_seconds=0) == PullResult((), 0, 0, 0)
    await testbed.send(queue, "one")
    assert await member.pull(queue, 1, wait_seconds=0) == PullResult((), 1, 0, 1)
    assert await member.pull(queue, 1, wait_seconds=0.1) == PullResult((), 1, 0, 1)


async def test_pull_outside_of_a_queue_returns_its_first_or_last_offset(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    assert await member.pull(queue, 5, wait_seconds=LONG_POLL_SECONDS) == PullResult(
        (), 0, 0, 0, OffsetCorrection.OUT_OF_RANGE
    )
    await testbed.send(queue, "one", "two")
    assert await member.pull(queue, 3, wait_seconds=LONG_POLL_SECONDS) == PullResult(
        (), 2, 0, 2, OffsetCorrection.OUT_OF_RANGE
    )
    assert await member.pull(queue, -1, wait_seconds=LONG_POLL_SECONDS) == PullResult(
        (), 0, 0, 2, OffsetCorrection.OUT_OF_RANGE
    )


async def test_pull_held_by_the_broker_is_woken_by_a_message(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    result = await pull_woken_by(member, queue, 0, lambda: testbed.send(queue, "at last"))
    assert (bodies(result), result.next_offset) == (["at last"], 1)


async def test_pull_held_by_the_broker_fails_when_its_connection_is_closed(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await assert_all_fail(UnreachableError, pull_woken_by(member, queue, 0, member.leave))


async def test_filter_by_tags_pulls_only_subscribed_tags(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic, tags="a || b")
    for tag in ("a", "", "c", "b", "c"):
        await testbed.send(queue, f"of {tag}", TAGS=tag)
    result = await member.pull(queue, 0, wait_seconds=LONG_POLL_SECONDS)
    assert (bodies(result), result.next_offset) == (["of a", "of b"], 5)
    assert await member.pull(queue, 4, wait_seconds=LONG_POLL_SECONDS) == PullResult(
        (), 5, 0, 5
    )  # at once: the pull skipped a message


async def test_filter_by_tags_keeps_a_held_pull_waiting_for_a_matching_message(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic, tags="a")

    async def send() -> None:
        await testbed.send(queue, "filtered out", TAGS="b")
        await testbed.send(queue, "matching", TAGS="a")

    for _ in range(5):  # a busy broker may serve the pull at the first message, and skip only that
        start = await member.max_offset(queue)
        result = await pull_woken_by(member, queue, start, send)
        if result.messages:
            break
    assert (bodies(result), result.next_offset) == (["matching"], start + 2)


async def test_filter_by_tags_leaves_out_another_tag_of_the_same_hash(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic, tags="Aa")
    result = await pull_woken_by(member, queue, 0, lambda: testbed.send(queue, "twin", TAGS="BB"))
    assert result == PullResult((), 1, 0, 1)


@pytest.mark.parametrize("make_missing", [no_queue, no_topic])
async def test_queue_that_does_not_exist_is_not_found(
    testbed: ContractCluster, make_missing: Callable[[Queue], Queue]
) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic, "nowhere")
    missing = make_missing(queue)
    await assert_all_fail(
        NotFoundError,
        member.pull(missing, 0, wait_seconds=LONG_POLL_SECONDS),
        member.committed_offset(missing),
        member.min_offset(missing),
        member.max_offset(missing),
        member.offset_at_time(missing, 0.0),
    )


async def test_topic_that_was_deleted_is_not_found(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = testbed.member(queue.topic)
    assert (await member.max_offset(queue), await member.committed_offset(queue)) == (0, None)
    await testbed.delete(queue.topic)

    async def all_is_unknown() -> bool:
        calls = (
            member.max_offset(queue),
            member.min_offset(queue),
            member.offset_at_time(queue, 1.0),
            member.committed_offset(queue),
        )
        errors = await asyncio.gather(*calls, return_exceptions=True)
        return all(isinstance(error, NotFoundError) for error in errors)

    await soon(all_is_unknown)
    await assert_all_fail(
        NotFoundError, testbed.cluster.send(queue.topic, b"body", queue=queue), member.pull(queue, 0, wait_seconds=0)
    )
    await assert_all_fail(NotFoundError, testbed.cluster.queues(queue.topic))


# Offsets.


async def test_offset_is_none_before_the_first_commit_and_then_the_last_committed(testbed: ContractCluster) -> None:
    queue, uncommitted = await testbed.topic(2)
    member = await testbed.joined_member(queue.topic)
    assert await member.committed_offset(queue) is None
    for offset in (3, 1, 7):  # lower offsets and offsets beyond the end are accepted
        await member.commit(queue, offset)
        assert await member.committed_offset(queue) == offset
    assert await member.committed_offset(uncommitted) is None
    assert await testbed.member(queue.topic, name="two").committed_offset(queue) == 7
    assert await testbed.member(queue.topic, group=f"{testbed.group}-b").committed_offset(queue) is None


async def test_offset_commit_sent_with_a_pull_is_stored_before_the_response(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one", "two")
    assert len((await member.pull(queue, 0, wait_seconds=0, commit_offset=0)).messages) == 2
    assert await member.committed_offset(queue) == 0
    held = asyncio.create_task(member.pull(queue, 2, wait_seconds=LONG_POLL_SECONDS, commit_offset=1))
    await soon(lambda: _is_committed(member, queue, 1))
    assert not held.done()
    await member.commit(queue, 2)
    await testbed.send(queue, "three")
    assert [message.offset for message in (await held).messages] == [2]
    assert await member.committed_offset(queue) == 2  # the response does not store the pull's offset again


async def test_offset_commit_sent_with_a_pull_undoes_no_commit_after_the_response(testbed: ContractCluster) -> None:
    queues = await testbed.topic(8)
    member = await testbed.joined_member(queues[0].topic)
    await member.commit(queues[0], 0)  # first commits are not sent concurrently

    async def hand_over(queue: Queue, number: int) -> int | None:
        await member.pull(queue, 0, wait_seconds=0, commit_offset=2 * number)
        await member.commit(queue, 2 * number + 1)
        return await member.committed_offset(queue)

    for number in range(50):
        offsets = await asyncio.gather(*(hand_over(queue, number) for queue in queues))
        assert {*offsets} == {2 * number + 1}


async def test_offset_commit_sent_with_a_held_pull_undoes_no_commit_after_it_was_read(testbed: ContractCluster) -> None:
    queues = await testbed.topic(8)
    member = await testbed.joined_member(queues[0].topic)
    await asyncio.gather(*(testbed.send(queue, "one") for queue in queues))
    await member.commit(queues[0], 0)  # first commits are not sent concurrently

    async def hand_over(queue: Queue, number: int) -> int | None:
        pulling = asyncio.create_task(member.pull(queue, 1, wait_seconds=LONG_POLL_SECONDS, commit_offset=2 * number))
        await soon(lambda: _is_committed(member, queue, 2 * number))
        await member.commit(queue, 2 * number + 1)
        pulling.cancel()
        return await member.committed_offset(queue)

    for number in range(50):
        offsets = await asyncio.gather(*(hand_over(queue, number) for queue in queues))
        assert {*offsets} == {2 * number + 1}


async def _is_committed(member: Consumer, queue: Queue, offset: int) -> bool:
    return await member.committed_offset(queue) == offset


async def test_offset_commit_sent_with_a_pull_overwrites_the_reset_that_it_returns(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one", "two", "three")
    await member.commit(queue, 1)
    assert await testbed.cluster.reset_offsets(testbed.group, queue.topic, testbed.broker) == {queue: 3}
    assert await member.pull(queue, 2, wait_seconds=LONG_POLL_SECONDS, commit_offset=2) == PullResult(
        (), 3, 0, 3, OffsetCorrection.RESET
    )
    assert await member.committed_offset(queue) == 2  # the member must commit the reset offset again


async def test_offset_that_is_negative_is_not_committed(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    with pytest.raises(ValueError, match="-1"):
        await testbed.member(queue.topic).commit(queue, -1)


async def test_offset_commit_needs_an_existing_group_and_topic(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    await assert_all_fail(NotFoundError, testbed.member(queue.topic).commit(queue, 1))
    member = await testbed.joined_member(queue.topic)
    await assert_all_fail(NotFoundError, member.commit(no_topic(queue), 1))
    await member.commit(no_queue(queue), 1)  # a topic may lose a queue while it is consumed


async def test_queue_has_a_first_and_a_last_offset(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    assert (
        await member.min_offset(queue),
        await member.max_offset(queue),
        await member.offset_at_time(queue, 0.0),
    ) == (0, 0, 0)
    assert await testbed.cluster.offset_ranges(queue.topic, testbed.broker) == {queue: (0, 0, 0.0)}
    await testbed.send(queue, "one", "two")
    assert (await member.min_offset(queue), await member.max_offset(queue)) == (0, 2)
    stored = (await member.pull(queue, 1, wait_seconds=0)).messages[0].stored_ms / 1000
    assert await testbed.cluster.offset_ranges(queue.topic, testbed.broker) == {queue: (0, 2, stored)}


async def test_offset_is_found_by_time(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one")
    first = (await member.pull(queue, 0, wait_seconds=0)).messages[0]
    await wait_until(lambda: time.time() * 1000 > first.stored_ms + 1)
    await testbed.send(queue, "two")
    for offset_at_time in (member.offset_at_time, testbed.cluster.offset_at_time):
        assert await offset_at_time(queue, first.stored_ms / 1000 - 60) == 0
        assert await offset_at_time(queue, first.stored_ms / 1000 + 0.001) == 1
        assert await offset_at_time(queue, first.stored_ms / 1000 + 60) == 2


async def test_offset_progress_of_a_group_is_returned_per_queue(testbed: ContractCluster) -> None:
    queue, second = await testbed.topic(2)
    topics = [queue.topic]
    assert await testbed.cluster.group_offsets(testbed.group, testbed.broker) == {}
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one", "two", "three")
    empty = BrokerOffsets(max_offset=0, committed_offset=0, pulled_offset=0)
    offsets = await testbed.cluster.group_offsets(testbed.group, testbed.broker, topics)
    assert offsets == {queue: empty._replace(max_offset=3), second: empty}
    message = (await member.pull(queue, 0, max_messages=2, wait_seconds=0)).messages[1]
    await member.commit(queue, 2)
    expected = {queue: BrokerOffsets(3, 2, 2, message.stored_ms / 1000), second: empty}
    assert await testbed.cluster.group_offsets(testbed.group, testbed.broker, topics) == expected
    assert await testbed.cluster.group_offsets(testbed.group, testbed.broker) == expected
    await member.leave()
    assert await testbed.cluster.group_offsets(testbed.group, testbed.broker, [*topics, "nowhere"]) == expected


async def test_offset_that_was_never_committed_differs_from_0(testbed: ContractCluster) -> None:
    queue, uncommitted = await testbed.topic(2)
    assert await testbed.cluster.committed_offset(testbed.group, queue) is None  # nor does the group exist
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one")
    await member.commit(queue, 0)
    assert await testbed.cluster.committed_offset(testbed.group, queue) == 0
    assert await testbed.cluster.committed_offset(testbed.group, uncommitted) is None


async def test_offset_reset_is_returned_by_the_next_pull(testbed: ContractCluster) -> None:
    queue, second = await testbed.topic(2)
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one", "two", "three")
    await member.commit(queue, 1)
    assert await testbed.cluster.reset_offsets(testbed.group, queue.topic, testbed.broker) == {queue: 3, second: 0}
    await member.commit(queue, 2)  # ignored: its messages were pulled before the reset
    assert await member.committed_offset(queue) == 3
    corrected = PullResult((), 3, 0, 3, OffsetCorrection.RESET)
    assert await member.pull(queue, 2, wait_seconds=LONG_POLL_SECONDS) == corrected
    assert await member.committed_offset(queue) == 3
    assert await member.pull(queue, 3, wait_seconds=0) == PullResult((), 3, 0, 3)
    await member.commit(queue, 2)
    assert await member.committed_offset(queue) == 2
    assert await member.pull(second, 0, wait_seconds=0) == PullResult(
        (), 0, 0, 0, OffsetCorrection.RESET
    )  # each queue has its own reset


async def test_offset_reset_to_a_time_needs_no_online_member(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one", "two")
    await member.commit(queue, 2)
    await member.leave()
    assert await testbed.cluster.reset_offsets(testbed.group, queue.topic, testbed.broker, timestamp=1.0) == {queue: 0}
    assert await testbed.member(queue.topic).pull(queue, 2, wait_seconds=0) == PullResult(
        (), 0, 0, 2, OffsetCorrection.RESET
    )


async def test_offset_reset_needs_an_existing_group_and_topic(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    await assert_all_fail(NotFoundError, testbed.cluster.reset_offsets(testbed.group, queue.topic, testbed.broker))
    await testbed.joined_member(queue.topic)
    await assert_all_fail(NotFoundError, testbed.cluster.reset_offsets(testbed.group, "nowhere", testbed.broker))


# Members.


async def client_ids(testbed: ContractCluster) -> list[str]:
    return sorted(client.client_id for client in await testbed.cluster.online_consumers(testbed.group, testbed.broker))


async def test_member_is_online_from_join_to_leave_once_per_connection(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    assert await client_ids(testbed) == []
    first = await testbed.joined_member(queue.topic, name="one")
    again = await testbed.joined_member(queue.topic, name="one")
    await testbed.joined_member(queue.topic, name="two")
    assert await client_ids(testbed) == ["one", "one", "two"]
    await again.leave()
    assert await client_ids(testbed) == ["one", "two"]
    await first.leave()
    assert await client_ids(testbed) == ["two"]


async def test_member_is_notified_of_joins_and_leaves_also_of_its_own_join(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    notified: list[str] = []
    await testbed.joined_member(queue.topic, name="one", on_members_changed=lambda: notified.append("one"))
    await wait_until(lambda: notified == ["one"])
    two = await testbed.joined_member(queue.topic, name="two", on_members_changed=lambda: notified.append("two"))
    await wait_until(lambda: sorted(notified) == ["one", "one", "two"])
    await two.leave()
    await wait_until(lambda: sorted(notified) == ["one", "one", "one", "two"])


async def test_settings_of_a_consumer_are_returned_by_client_id(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    start = StartFrom(position="Earliest")
    await testbed.joined_member(queue.topic, name="one", tags="red || blue", get_start_from=lambda: start)
    await testbed.joined_member(queue.topic, name="two", broadcasting=True)

    async def settings(name: str) -> ConsumerSettings:
        reported = await testbed.cluster.consumer_settings(testbed.group, name, testbed.broker)
        subscriptions = tuple(
            subscription for subscription in reported.subscriptions if subscription.topic == queue.topic
        )
        return reported._replace(subscriptions=subscriptions)

    expected = ConsumerSettings((Subscription(queue.topic, "red || blue"),), "Clustering", "Earliest")
    assert await settings("one") == expected
    assert await settings("two") == ConsumerSettings((Subscription(queue.topic),), "Broadcasting", "Latest")
    start = StartFrom(position="Timestamp")
    assert await settings("one") == expected._replace(start_position="Timestamp")
    with pytest.raises(RejectedError):
        await settings("three")


async def test_broadcasting_member_is_not_notified_of_other_members(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    notified: list[str] = []
    options = {"broadcasting": True, "on_members_changed": lambda: notified.append("something")}
    first = await testbed.joined_member(queue.topic, name="one", **options)
    second = await testbed.joined_member(queue.topic, name="two", **options)
    await second.leave()
    await first.max_offset(queue)  # a round trip on the connection of notifications
    assert (notified, await client_ids(testbed)) == ([], ["one"])


async def test_retry_topic_is_created_when_a_member_joins(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    await testbed.joined_member(queue.topic)
    assert await testbed.queues(f"%RETRY%{testbed.group}") == (Queue(f"%RETRY%{testbed.group}", testbed.broker, 0),)


async def test_member_joins_only_once(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    with pytest.raises(RuntimeError, match=f"one has already joined group {testbed.group}"):
        await member.join()
    assert await client_ids(testbed) == ["one"]
    await member.leave()
    await member.leave()
    with pytest.raises(RuntimeError, match=f"one has already left group {testbed.group}"):
        await member.join()
    assert await client_ids(testbed) == []


async def test_member_that_failed_to_join_may_try_again(testbed: ContractCluster) -> None:
    member = testbed.member(f"topic-{testbed.number}")
    await assert_all_fail(NotFoundError, member.join())
    await testbed.topic()

    async def has_joined() -> bool:
        try:
            await member.join()
        except NotFoundError:
            return False
        return True

    await soon(has_joined)
    assert await client_ids(testbed) == ["one"]


async def test_member_that_has_left_cannot_reach_the_broker(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one")
    [message] = (await member.pull(queue, 0, wait_seconds=0)).messages
    await member.leave()
    await assert_all_fail(
        UnreachableError,
        *(member.check_subscriptions(), member.pull(queue, 0), member.committed_offset(queue), member.commit(queue, 1)),
        *(
            member.min_offset(queue),
            member.max_offset(queue),
            member.offset_at_time(queue, 1.0),
            member.ping_broker(queue.broker),
        ),
        *(member.lock([queue]), member.unlock([queue]), member.send_back(message)),
    )


async def test_member_cannot_join_for_a_topic_that_does_not_exist(testbed: ContractCluster) -> None:
    member = testbed.member("nowhere")
    await assert_all_fail(NotFoundError, member.check_subscriptions(), member.join())


async def test_pull_of_a_topic_without_subscription_is_rejected(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    with pytest.raises(ValueError, match="has not subscribed to"):
        await testbed.member("another").pull(queue, 0, wait_seconds=0)


async def test_filter_by_sql92_is_rejected(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    filtered = Subscription(topic=queue.topic, expression="a > 1", type="SQL92")
    member = testbed.create_member(Membership(group=testbed.group, client_id="one", subscriptions=[filtered]))
    await assert_all_fail(RejectedError, member.check_subscriptions(), member.pull(queue, 0, wait_seconds=0))
    await testbed.member(queue.topic, tags="a || b").check_subscriptions()


async def test_pull_fails_while_consumption_of_the_group_is_disabled(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "one")
    assert await testbed.cluster.group_settings(testbed.group, testbed.broker) == BrokerGroupSettings()
    await testbed.enable(testbed.group, 0)
    assert await testbed.cluster.group_settings(testbed.group, testbed.broker) == BrokerGroupSettings(
        consume_enabled=False
    )
    await assert_all_fail(ConsumptionDisabledError, member.pull(queue, 0, wait_seconds=LONG_POLL_SECONDS))
    await member.commit(queue, 0)
    assert await member.committed_offset(queue) == 0
    await testbed.enable(testbed.group, 1)
    assert bodies(await member.pull(queue, 0, wait_seconds=0)) == ["one"]


# Locks.


async def test_lock_is_renewed_by_its_owner_and_refused_to_others(testbed: ContractCluster) -> None:
    queues = await testbed.topic(3)
    first = await testbed.joined_member(queues[0].topic, name="one")
    second = await testbed.joined_member(queues[0].topic, name="two")
    assert await first.lock(queues[:2]) == {*queues[:2]}
    assert await first.lock(queues[:2]) == {*queues[:2]}
    assert await second.lock(queues) == {queues[2]}
    elsewhere = testbed.member(queues[0].topic, name="two", group=f"{testbed.group}-b")
    assert await elsewhere.lock(queues) == {*queues}  # each group has its own locks


async def test_lock_is_released_only_by_its_owner_or_on_its_behalf(testbed: ContractCluster) -> None:
    queues = await testbed.topic(2)
    first = await testbed.joined_member(queues[0].topic, name="one")
    second = await testbed.joined_member(queues[0].topic, name="two")
    await first.lock(queues)
    await second.unlock(queues)
    assert await second.lock(queues) == frozenset()
    await first.unlock(queues[:1])
    assert await second.lock(queues) == {queues[0]}
    await first.leave()  # its locks stay
    assert await second.lock(queues) == {queues[0]}
    await testbed.cluster.unlock(testbed.group, "one", queues)
    assert await second.lock(queues) == {*queues}


async def test_lock_request_accepts_queues_of_one_broker_only(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = testbed.member(queue.topic)
    for queues in ([], [queue, queue._replace(broker="no-broker")]):
        for call in (member.lock, member.unlock):
            with pytest.raises(ValueError, match="The queues of one request must belong to one broker"):
                await call(queues)


async def test_lock_release_reaches_available_brokers_though_others_are_unreachable(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    owner, heir = (testbed.member(queue.topic, name=name) for name in ("one", "two"))
    await owner.lock([queue])
    await assert_all_fail(
        UnreachableError,
        testbed.cluster.unlock(testbed.group, "one", [queue._replace(broker="a-broker-that-is-away"), queue]),
    )
    assert await heir.lock([queue]) == {queue}
    await testbed.cluster.unlock(testbed.group, "one", [])


# Retries and dead letters.


async def test_retry_returns_a_message_with_one_more_attempt(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic, tags="t")
    await testbed.send(queue, "again", TAGS="t")
    first = (await member.pull(queue, 0, wait_seconds=0)).messages[0]
    [retry] = await testbed.queues(f"%RETRY%{testbed.group}")
    await member.send_back(first, delay_level=ONE_SECOND_LEVEL)
    second = (await member.pull(retry, 0, wait_seconds=LONG_POLL_SECONDS)).messages[0]
    assert (second.queue, second.offset, second.reconsume_times, second.topic) == (retry, 0, 1, queue.topic)
    assert (second.body, second.tag, second.id, second.born_ms) == (b"again", "t", first.id, first.born_ms)
    assert second.stored_ms > first.stored_ms
    await member.send_back(second, delay_level=ONE_SECOND_LEVEL)
    third = (await member.pull(retry, 1, wait_seconds=LONG_POLL_SECONDS)).messages[0]
    assert (third.reconsume_times, third.topic, third.id) == (2, queue.topic, first.id)
    assert third.properties["ORIGIN_MESSAGE_ID"] == second.properties["ORIGIN_MESSAGE_ID"]
    added = {"RETRY_TOPIC": queue.topic, "REAL_TOPIC": retry.topic, "REAL_QID": "0", "DELAY": "1", "WAIT": "false"}
    assert added.items() <= third.properties.items()


async def dead_letters(testbed: ContractCluster) -> tuple[Message, ...]:
    [queue] = await testbed.queues(f"%DLQ%{testbed.group}")
    return (
        await testbed.member(queue.topic, group=f"{testbed.group}-dead").pull(queue, 0, wait_seconds=LONG_POLL_SECONDS)
    ).messages


async def test_dead_letter_is_created_from_a_message_that_is_never_to_be_retried(testbed: ContractCluster) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "never")
    await member.send_back((await member.pull(queue, 0, wait_seconds=0)).messages[0], delay_level=DEAD_LETTER_LEVEL)
    [dead] = await dead_letters(testbed)
    assert (dead.body, dead.properties["RETRY_TOPIC"], dead.properties["DELAY"]) == (b"never", queue.topic, "0")
    assert dead.reconsume_times == 1


@pytest.mark.parametrize("attempts", [0, -1])
async def test_dead_letter_is_created_when_no_attempts_are_left(testbed: ContractCluster, attempts: int) -> None:
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "tried")
    tried = (await member.pull(queue, 0, wait_seconds=0)).messages[0]
    await member.send_back(tried, delay_level=RETRY_LEVEL, max_attempts=attempts)
    assert [dead.id for dead in await dead_letters(testbed)] == [tried.id]


# The in-memory broker only.


class Clock:
    """A clock that tests advance."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_lock_at_the_in_memory_broker_expires_after_a_minute() -> None:
    clock = Clock()
    testbed = in_memory(MemoryCluster(clock=clock))
    queues = await testbed.topic(2)
    owner, heir = testbed.member(queues[0].topic, name="one"), testbed.member(queues[0].topic, name="two")
    await owner.lock(queues)
    clock.now += 60
    assert await heir.lock(queues) == frozenset()
    await owner.lock(queues[:1])
    clock.now += 1
    assert await heir.lock(queues) == {queues[1]}


@pytest.mark.parametrize(("level", "delays"), [(RETRY_LEVEL, [10, 30, 60]), (2, [5, 5, 5]), (18, [7200, 7200, 7200])])
async def test_retry_at_the_in_memory_broker_is_delayed_by_its_clock(level: int, delays: list[int]) -> None:
    clock = Clock()
    testbed = in_memory(MemoryCluster(clock=clock))
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "again")
    message = (await member.pull(queue, 0)).messages[0]
    retry = Queue(f"%RETRY%{testbed.group}", BROKER, 0)
    for offset, delay in enumerate(delays):
        await member.send_back(message, delay_level=level)
        clock.now += delay - 0.001
        assert (await member.pull(retry, offset, wait_seconds=0)).messages == ()
        clock.now += 0.001
        message = (await member.pull(retry, offset, wait_seconds=0)).messages[0]
        assert message.stored_ms == int(clock.now * 1000)


@pytest.mark.parametrize("name", [BROKER, NAME_SERVER])
async def test_broker_or_name_server_in_memory_is_unreachable_while_down(name: str) -> None:
    memory = MemoryCluster()
    testbed = in_memory(memory)
    [queue] = await testbed.topic()
    notified: list[str] = []
    member = await testbed.joined_member(queue.topic, on_members_changed=lambda: notified.append("something"))
    await wait_until(lambda: len(notified) == 1)
    memory.take_down(name)
    operator = memory.queues(queue.topic) if name == NAME_SERVER else memory.online_consumers(testbed.group, name)
    late = testbed.member(queue.topic, name="late")
    await assert_all_fail(UnreachableError, operator, late.join() if name == NAME_SERVER else member.commit(queue, 1))
    memory.bring_up(name)
    await member.commit(queue, 1)
    assert (await memory.queues(queue.topic), await client_ids(testbed)) == ((queue,), ["one"])
    await wait_until(lambda: len(notified) == 2)


async def test_pull_held_by_the_in_memory_broker_fails_when_it_goes_down() -> None:
    memory = MemoryCluster()
    testbed = in_memory(memory)
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)

    async def take_down() -> None:
        memory.take_down(BROKER)

    await assert_all_fail(UnreachableError, pull_woken_by(member, queue, 0, take_down))


async def test_lock_at_the_in_memory_broker_is_lost_by_a_restart() -> None:
    memory = MemoryCluster()
    testbed = in_memory(memory)
    [queue] = await testbed.topic()
    owner, heir = testbed.member(queue.topic, name="one"), testbed.member(queue.topic, name="two")
    await owner.lock([queue])
    memory.take_down(BROKER)
    memory.bring_up(BROKER)
    assert await heir.lock([queue]) == frozenset()
    memory.bring_up(BROKER, restarted=True)
    assert await heir.lock([queue]) == {queue}


async def test_broker_in_memory_that_creates_no_groups_knows_only_created_groups() -> None:
    memory = MemoryCluster()
    memory.groups.auto_creates = False
    testbed = in_memory(memory)
    [queue] = await testbed.topic()
    member = testbed.member(queue.topic)
    await assert_all_fail(
        NotFoundError,
        member.join(),
        member.pull(queue, 0, wait_seconds=0),
        memory.group_settings(testbed.group, BROKER),
    )
    await memory.update_group(testbed.group, BROKER, max_attempts=3)
    await member.join()
    assert (await memory.group_settings(testbed.group, BROKER)).max_attempts == 3


async def test_queue_at_the_in_memory_broker_may_start_at_a_later_offset() -> None:
    memory = MemoryCluster()
    testbed = in_memory(memory)
    [queue] = await testbed.topic()
    member = await testbed.joined_member(queue.topic)
    await testbed.send(queue, "old", "new")
    memory.store.min_offsets[queue] = 1
    assert (
        await member.min_offset(queue),
        await member.offset_at_time(queue, 0.0),
        await member.max_offset(queue),
    ) == (1, 1, 2)
    assert await member.pull(queue, 0) == PullResult((), 1, 1, 2, OffsetCorrection.OUT_OF_RANGE)
    assert bodies(await member.pull(queue, 1)) == ["new"]


async def test_member_is_registered_at_an_in_memory_broker_that_gains_its_topic() -> None:
    memory = MemoryCluster(("a", "b"))
    testbed = in_memory(memory)
    await memory.create_topic("orders", "a", 1)
    await testbed.joined_member("orders")
    assert await memory.online_consumers(testbed.group, "b") == ()
    await memory.create_topic("orders", "b", 1)
    assert [client.client_id for client in await memory.online_consumers(testbed.group, "b")] == ["one"]
    assert [queue.broker for queue in await memory.queues(f"%RETRY%{testbed.group}")] == ["a", "b"]
