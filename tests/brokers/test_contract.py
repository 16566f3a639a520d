"""What the port promises, asked of a real broker and of its twin in memory."""

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
    PullRedirect,
    PullResult,
)
from rota.brokers.rocketmq.admin import PRODUCER_GROUP, AdminClient
from rota.brokers.rocketmq.consumer import RocketMQConsumer
from rota.brokers.rocketmq.routing import ConnectionConfig
from rota.brokers.rocketmq.wire import requests
from rota.model import Queue
from rota.spec import StartFrom, Subscription
from rota.spec.consumer_settings import ConsumerSettings

LONG = 60.0  # a pull that is held so long was not woken
A_SECOND = 1  # the level of the shortest delay

_numbers = count(1)


@dataclass
class ContractCluster:
    """A cluster with one broker, and the members that a test has there; names are new for every test."""

    cluster: AdminClient | MemoryCluster
    new: Callable[[Membership], Consumer]
    enable: Callable[[str, int], Awaitable[None]]
    delete: Callable[[str], Awaitable[None]]
    send_packed: Callable[[Queue, bytes], Awaitable[None]]  # by ZLIB
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
        """Return the queues of a topic that is just being made."""

        async def ask() -> Sequence[Queue]:
            try:
                return await self.cluster.queues(topic)
            except NotFoundError:
                return ()

        return await soon(ask)

    def member(self, *topics: str, name: str = "one", group: str = "", tags: str = "*", **more: Any) -> Consumer:
        wanted = [Subscription(topic=topic, expression=tags) for topic in topics]
        return self.known(Membership(group=group or self.group, client_id=name, subscriptions=wanted, **more))

    def known(self, member: Membership) -> Consumer:
        self.members.append(self.new(member))
        return self.members[-1]

    async def joined(self, *topics: str, **more: Any) -> Consumer:
        member = self.member(*topics, **more)
        await member.join()
        return member

    async def send(self, queue: Queue, *bodies: str, **properties: str) -> None:
        """Send messages, and wait until they can be pulled: a broker has them before its queue has."""
        last = await self.last([queue])
        for body in bodies:
            await self.cluster.send(queue.topic, body.encode(), properties, queue)
        await self.until(last + len(bodies), [queue])

    async def last(self, queues: Sequence[Queue]) -> int:
        ends = await self.cluster.offset_ranges(queues[0].topic, self.broker)
        return sum(ends[queue].max_offset for queue in queues)

    async def until(self, last: int, queues: Sequence[Queue]) -> None:
        async def arrived() -> bool:
            return await self.last(queues) == last

        await soon(arrived)

    async def leave(self) -> None:
        for member in self.members:
            await member.leave()
        await self.cluster.close()


@pytest.fixture(scope="session", params=["memory", "rocketmq"])
def broker(request: pytest.FixtureRequest) -> RocketMQ | None:
    """Start the real broker when the first test asks for it; None is the one in memory.

    It has the scope of the broker, so that this starts before the leak detector looks.
    """
    return request.getfixturevalue("rocketmq") if request.param == "rocketmq" else None


@pytest.fixture
async def world(broker: RocketMQ | None) -> AsyncIterator[ContractCluster]:
    made = real(broker) if broker else in_memory(MemoryCluster())
    yield made
    await made.leave()


def in_memory(memory: MemoryCluster) -> ContractCluster:
    async def enable(group: str, enabled: int) -> None:
        await memory.update_group(group, BROKER, consume_enabled=bool(enabled))

    async def send_packed(queue: Queue, body: bytes) -> None:
        await memory.send(queue.topic, body, {"UNIQ_KEY": f"packed-{len(memory.compressed_ids)}"}, queue)
        memory.compressed_ids.add(f"packed-{len(memory.compressed_ids)}")

    def new(member: Membership) -> Consumer:
        return MemoryConsumer(memory, member)

    return ContractCluster(memory, new, enable, memory.delete_topic, send_packed, BROKER)


def real(rocketmq: RocketMQ) -> ContractCluster:
    site = ConnectionConfig([rocketmq.name_server])
    cluster = AdminClient(site)

    async def enable(group: str, enabled: int) -> None:
        await cluster.update_group(group, "broker-0", consumeEnable=bool(enabled))

    async def delete(topic: str) -> None:
        await asyncio.to_thread(rocketmq.delete_topic, topic)

    async def send_packed(queue: Queue, body: bytes) -> None:
        request = requests.send(
            PRODUCER_GROUP, queue.topic, body, {}, broker=queue.broker, queue_id=queue.id, born_ms=0
        )
        packed = msgspec.structs.replace(request, fields={**request.fields, "f": 0x301})
        await cluster._client.call_or_raise(queue.broker, packed)

    return ContractCluster(
        cluster, lambda member: RocketMQConsumer(site, member), enable, delete, send_packed, "broker-0"
    )


def bodies(found: PullResult) -> list[str]:
    return [message.body.decode() for message in found.messages]


async def woken(member: Consumer, queue: Queue, offset: int, by: Callable[[], Awaitable[None]]) -> PullResult:
    """Return what comes of a pull that is held when something happens; half of its time must do."""
    pulling = asyncio.create_task(member.pull(queue, offset, wait_seconds=LONG))
    async with asyncio.timeout(LONG / 2):
        await asyncio.sleep(0)
        await member.max_offset(queue)  # a round trip on the same connection: by then the pull has been heard
        await by()
        return await pulling


async def all_fail(error: type[BrokerError], *asked: Coroutine[Any, Any, object]) -> None:
    for found in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(found, error), found


async def true(ask: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return ask()

    assert await soon(asked)


def no_queue(queue: Queue) -> Queue:
    return queue._replace(id=40)


def no_topic(queue: Queue) -> Queue:
    return queue._replace(topic="nowhere")


# Topics and messages.


async def test_topic_lists_its_queues(world: ContractCluster) -> None:
    queues = await world.topic(3)
    assert queues == [Queue(queues[0].topic, world.broker, number) for number in range(3)]
    assert await world.cluster.queue_counts(queues[0].topic) == {world.broker: 3}
    assert await world.cluster.broker_names() == (world.broker,)
    assert world.cluster.addresses([world.broker])


async def test_topic_that_does_not_exist_is_not_found(world: ContractCluster) -> None:
    await all_fail(
        NotFoundError,
        world.cluster.queues("nowhere"),
        world.cluster.offset_ranges("nowhere", world.broker),
        world.cluster.send("nowhere", b"body"),
    )


async def test_message_sent_to_a_queue_is_pulled_from_it(world: ContractCluster) -> None:
    queue, other = await world.topic(2)
    member = await world.joined(queue.topic)
    await world.send(queue, "first", TAGS="t", KEYS="k l", colour="red")
    await world.send(queue, "second")
    found = await member.pull(queue, 0, wait_seconds=0)
    assert bodies(found) == ["first", "second"]
    assert found._replace(messages=()) == PullResult((), 2, 0, 2)
    message = found.messages[0]
    assert (message.queue, message.offset, message.reconsume_times, message.body_error) == (queue, 0, 0, "")
    assert (message.topic, message.tag, message.keys) == (queue.topic, "t", "k l")
    assert message.properties["colour"] == "red"
    assert message.id == message.properties["UNIQ_KEY"] != found.messages[1].id
    assert 0 < message.born_ms <= message.stored_ms <= found.messages[1].stored_ms
    assert bodies(await member.pull(other, 0, wait_seconds=0)) == []


async def test_message_may_be_sent_without_naming_a_queue(world: ContractCluster) -> None:
    queues = await world.topic(2)
    for _ in range(3):
        await world.cluster.send(queues[0].topic, b"to any")
    await world.until(3, queues)


@pytest.mark.parametrize("gone", [no_queue, no_topic])
async def test_message_to_a_queue_that_does_not_exist_is_not_sent(
    world: ContractCluster, gone: Callable[[Queue], Queue]
) -> None:
    [queue] = await world.topic()
    missing = gone(queue)
    await all_fail(NotFoundError, world.cluster.send(missing.topic, b"body", queue=missing))
    await all_fail(NotFoundError, world.cluster.queues("nowhere"))  # no broker has made it of that


async def test_message_to_a_queue_of_another_topic_is_rejected(world: ContractCluster) -> None:
    [queue] = await world.topic()
    with pytest.raises(ValueError, match="is not a queue of topic nowhere"):
        await world.cluster.send("nowhere", b"body", queue=queue)


@pytest.mark.parametrize("properties", [{"a\x01": "b"}, {"a": "\x02b"}])
async def test_message_properties_with_separator_characters_are_rejected(
    world: ContractCluster, properties: dict[str, str]
) -> None:
    [queue] = await world.topic()
    with pytest.raises(ValueError, match="which are reserved as separators"):
        await world.cluster.send(queue.topic, b"body", properties, queue)


async def test_broker_that_is_unknown_is_unreachable(world: ContractCluster) -> None:
    [queue] = await world.topic()
    await all_fail(
        UnreachableError,
        world.cluster.offset_ranges(queue.topic, "no-broker"),
        world.cluster.online_consumers(world.group, "no-broker"),
        world.cluster.group_settings(world.group, "no-broker"),
    )


async def test_message_without_a_body_is_rejected(world: ContractCluster) -> None:
    [queue] = await world.topic()
    await all_fail(RejectedError, world.cluster.send(queue.topic, b"", queue=queue))


async def test_pull_returns_as_many_messages_as_requested_up_to_32(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, *map(str, range(40)))
    found = await member.pull(queue, 1, max_messages=2, wait_seconds=0)
    assert (bodies(found), found.next_offset, found.max_offset) == (["1", "2"], 3, 40)
    assert len((await member.pull(queue, 0, max_messages=100, wait_seconds=0)).messages) == 32


async def test_pull_returns_at_most_256_kib_but_at_least_one_message(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, *("x" * 100_000 for _ in range(3)), "y" * 300_000)
    await member.pull(queue, 0, wait_seconds=0)
    for offset, number in ((0, 2), (2, 1), (3, 1)):
        found = await member.pull(queue, offset, wait_seconds=0)
        assert (len(found.messages), found.next_offset) == (number, offset + number)


class Room:
    """Admits messages as long as they fit, and packed ones unpacked as long as they have no more than 1,000 bytes."""

    max_body_bytes = 1000

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def admit(self, memory_bytes: int) -> bool:
        self.free_bytes -= memory_bytes
        return self.free_bytes >= 0


async def test_pull_ends_before_the_first_message_that_admission_rejects(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "x" * 100, "y" * 200, "z")
    sizes = [it + MESSAGE_OVERHEAD_BYTES for it in (100, 200, 1)]
    for kept in range(3):
        for free_bytes in (sum(sizes[:kept]), sum(sizes[: kept + 1]) - 1):
            found = await member.pull(queue, 0, wait_seconds=LONG, admission=Room(free_bytes))
            assert (len(found.messages), found.next_offset, found.max_offset) == (kept, kept, 3)
    found = await member.pull(queue, 1, wait_seconds=0, admission=Room(sizes[1]))
    assert (bodies(found), found.next_offset) == (["y" * 200], 2)
    assert len((await member.pull(queue, 0, wait_seconds=0, admission=Room(sum(sizes)))).messages) == 3


async def test_compression_beyond_the_limit_leaves_the_body_compressed_and_says_why(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    bomb = zlib.compress(bytes(1001))
    for body in (bomb, zlib.compress(bytes(1000))):
        await world.send_packed(queue, body)
    await world.until(2, [queue])
    await world.send(queue, "good")
    found = await member.pull(queue, 0, wait_seconds=0, admission=Room(10_000))
    assert [it.body for it in found.messages] == [bomb, bytes(1000), b"good"]
    too_large = "when decompressed, the limit in spec.delivery.buffer.mebibytesPerMessage"
    assert [too_large in it.body_error for it in found.messages] == [True, False, False]
    assert [bool(it.body_error) for it in found.messages] == [True, False, False]
    assert len((await member.pull(queue, 0, wait_seconds=0)).messages[0].body) == 1001  # with the default limit


async def test_pull_at_the_end_returns_nothing(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    assert await member.pull(queue, 0, wait_seconds=0) == PullResult((), 0, 0, 0)
    await world.send(queue, "one")
    assert await member.pull(queue, 1, wait_seconds=0) == PullResult((), 1, 0, 1)
    assert await member.pull(queue, 1, wait_seconds=0.1) == PullResult((), 1, 0, 1)


async def test_pull_outside_of_a_queue_returns_where_the_queue_starts_or_ends(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    assert await member.pull(queue, 5, wait_seconds=LONG) == PullResult((), 0, 0, 0, PullRedirect.OUT_OF_RANGE)
    await world.send(queue, "one", "two")
    assert await member.pull(queue, 3, wait_seconds=LONG) == PullResult((), 2, 0, 2, PullRedirect.OUT_OF_RANGE)
    assert await member.pull(queue, -1, wait_seconds=LONG) == PullResult((), 0, 0, 2, PullRedirect.OUT_OF_RANGE)


async def test_pull_held_by_the_broker_is_woken_by_a_message(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    found = await woken(member, queue, 0, lambda: world.send(queue, "at last"))
    assert (bodies(found), found.next_offset) == (["at last"], 1)


async def test_pull_held_by_the_broker_fails_when_its_connection_is_closed(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await all_fail(UnreachableError, woken(member, queue, 0, member.leave))


async def test_filter_by_tags_pulls_only_subscribed_tags(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic, tags="a || b")
    for tag in ("a", "", "c", "b", "c"):
        await world.send(queue, f"of {tag}", TAGS=tag)
    found = await member.pull(queue, 0, wait_seconds=LONG)
    assert (bodies(found), found.next_offset) == (["of a", "of b"], 5)
    assert await member.pull(queue, 4, wait_seconds=LONG) == PullResult(
        (), 5, 0, 5
    )  # at once: something was passed over


async def test_filter_by_tags_keeps_a_held_pull_waiting_for_a_matching_message(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic, tags="a")

    async def send() -> None:
        await world.send(queue, "unwanted", TAGS="b")
        await world.send(queue, "wanted", TAGS="a")

    for _ in range(5):  # a busy broker may look at a pull only when the first one is there, and pass that over
        start = await member.max_offset(queue)
        found = await woken(member, queue, start, send)
        if found.messages:
            break
    assert (bodies(found), found.next_offset) == (["wanted"], start + 2)


async def test_filter_by_tags_leaves_out_another_tag_of_the_same_hash(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic, tags="Aa")
    found = await woken(member, queue, 0, lambda: world.send(queue, "twin", TAGS="BB"))
    assert found == PullResult((), 1, 0, 1)


@pytest.mark.parametrize("gone", [no_queue, no_topic])
async def test_queue_that_does_not_exist_is_not_found(world: ContractCluster, gone: Callable[[Queue], Queue]) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic, "nowhere")
    missing = gone(queue)
    await all_fail(
        NotFoundError,
        member.pull(missing, 0, wait_seconds=LONG),
        member.committed_offset(missing),
        member.min_offset(missing),
        member.max_offset(missing),
        member.offset_at_time(missing, 0.0),
    )


async def test_topic_that_was_deleted_is_not_found(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = world.member(queue.topic)
    assert (await member.max_offset(queue), await member.committed_offset(queue)) == (0, None)
    await world.delete(queue.topic)

    async def all_is_unknown() -> bool:
        asked = (
            member.max_offset(queue),
            member.min_offset(queue),
            member.offset_at_time(queue, 1.0),
            member.committed_offset(queue),
        )
        told = await asyncio.gather(*asked, return_exceptions=True)
        return all(isinstance(it, NotFoundError) for it in told)

    await soon(all_is_unknown)
    await all_fail(
        NotFoundError, world.cluster.send(queue.topic, b"body", queue=queue), member.pull(queue, 0, wait_seconds=0)
    )
    await all_fail(NotFoundError, world.cluster.queues(queue.topic))


# Offsets.


async def test_offset_is_none_before_the_first_commit_and_then_the_last_committed(world: ContractCluster) -> None:
    queue, other = await world.topic(2)
    member = await world.joined(queue.topic)
    assert await member.committed_offset(queue) is None
    for offset in (3, 1, 7):  # also lower, also beyond the end: nobody checks
        await member.commit(queue, offset)
        assert await member.committed_offset(queue) == offset
    assert await member.committed_offset(other) is None
    assert await world.member(queue.topic, name="two").committed_offset(queue) == 7
    assert await world.member(queue.topic, group=f"{world.group}-b").committed_offset(queue) is None


async def test_offset_commit_sent_with_a_pull_is_stored_before_the_response(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "one", "two")
    assert len((await member.pull(queue, 0, wait_seconds=0, commit_offset=0)).messages) == 2
    assert await member.committed_offset(queue) == 0
    waits = asyncio.create_task(member.pull(queue, 2, wait_seconds=LONG, commit_offset=1))
    await soon(lambda: _is_committed(member, queue, 1))
    assert not waits.done()
    await member.commit(queue, 2)
    await world.send(queue, "three")
    assert [it.offset for it in (await waits).messages] == [2]
    assert await member.committed_offset(queue) == 2  # what it took along is not said again when it is answered


async def test_offset_commit_sent_with_a_pull_undoes_no_commit_after_the_response(world: ContractCluster) -> None:
    queues = await world.topic(8)
    member = await world.joined(queues[0].topic)
    await member.commit(queues[0], 0)  # first commits are not sent side by side

    async def hand_over(queue: Queue, number: int) -> int | None:
        await member.pull(queue, 0, wait_seconds=0, commit_offset=2 * number)
        await member.commit(queue, 2 * number + 1)
        return await member.committed_offset(queue)

    for number in range(50):
        found = await asyncio.gather(*(hand_over(queue, number) for queue in queues))
        assert {*found} == {2 * number + 1}


async def _is_committed(member: Consumer, queue: Queue, offset: int) -> bool:
    return await member.committed_offset(queue) == offset


async def test_offset_commit_sent_with_a_pull_overwrites_the_reset_that_it_returns(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "one", "two", "three")
    await member.commit(queue, 1)
    assert await world.cluster.reset_offsets(world.group, queue.topic, world.broker) == {queue: 3}
    assert await member.pull(queue, 2, wait_seconds=LONG, commit_offset=2) == PullResult(
        (), 3, 0, 3, PullRedirect.RESET
    )
    assert await member.committed_offset(queue) == 2  # who is told has to commit anew


async def test_offset_that_is_negative_is_not_committed(world: ContractCluster) -> None:
    [queue] = await world.topic()
    with pytest.raises(ValueError, match="-1"):
        await world.member(queue.topic).commit(queue, -1)


async def test_offset_commit_needs_an_existing_group_and_topic(world: ContractCluster) -> None:
    [queue] = await world.topic()
    await all_fail(NotFoundError, world.member(queue.topic).commit(queue, 1))
    member = await world.joined(queue.topic)
    await all_fail(NotFoundError, member.commit(no_topic(queue), 1))
    await member.commit(no_queue(queue), 1)  # it may have left the topic while it was worked on


async def test_queue_has_a_first_and_a_last_offset(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    assert (
        await member.min_offset(queue),
        await member.max_offset(queue),
        await member.offset_at_time(queue, 0.0),
    ) == (0, 0, 0)
    assert await world.cluster.offset_ranges(queue.topic, world.broker) == {queue: (0, 0, 0.0)}
    await world.send(queue, "one", "two")
    assert (await member.min_offset(queue), await member.max_offset(queue)) == (0, 2)
    stored = (await member.pull(queue, 1, wait_seconds=0)).messages[0].stored_ms / 1000
    assert await world.cluster.offset_ranges(queue.topic, world.broker) == {queue: (0, 2, stored)}


async def test_offset_is_found_by_time(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "one")
    one = (await member.pull(queue, 0, wait_seconds=0)).messages[0]
    await true(lambda: time.time() * 1000 > one.stored_ms + 1)
    await world.send(queue, "two")
    for ask in (member.offset_at_time, world.cluster.offset_at_time):
        assert await ask(queue, one.stored_ms / 1000 - 60) == 0
        assert await ask(queue, one.stored_ms / 1000 + 0.001) == 1
        assert await ask(queue, one.stored_ms / 1000 + 60) == 2


async def test_offset_progress_of_a_group_is_returned_per_queue(world: ContractCluster) -> None:
    queue, other = await world.topic(2)
    asked = [queue.topic]
    assert await world.cluster.group_offsets(world.group, world.broker) == {}
    member = await world.joined(queue.topic)
    await world.send(queue, "one", "two", "three")
    nowhere = BrokerOffsets(max_offset=0, committed_offset=0, pulled_offset=0)
    found = await world.cluster.group_offsets(world.group, world.broker, asked)
    assert found == {queue: nowhere._replace(max_offset=3), other: nowhere}
    two = (await member.pull(queue, 0, max_messages=2, wait_seconds=0)).messages[1]
    await member.commit(queue, 2)
    known = {queue: BrokerOffsets(3, 2, 2, two.stored_ms / 1000), other: nowhere}
    assert await world.cluster.group_offsets(world.group, world.broker, asked) == known
    assert await world.cluster.group_offsets(world.group, world.broker) == known
    await member.leave()
    assert await world.cluster.group_offsets(world.group, world.broker, [*asked, "nowhere"]) == known


async def test_offset_that_was_never_committed_differs_from_0(world: ContractCluster) -> None:
    queue, other = await world.topic(2)
    assert await world.cluster.committed_offset(world.group, queue) is None  # nor is there a group
    member = await world.joined(queue.topic)
    await world.send(queue, "one")
    await member.commit(queue, 0)
    assert await world.cluster.committed_offset(world.group, queue) == 0
    assert await world.cluster.committed_offset(world.group, other) is None


async def test_offset_reset_is_returned_by_the_next_pull(world: ContractCluster) -> None:
    queue, other = await world.topic(2)
    member = await world.joined(queue.topic)
    await world.send(queue, "one", "two", "three")
    await member.commit(queue, 1)
    assert await world.cluster.reset_offsets(world.group, queue.topic, world.broker) == {queue: 3, other: 0}
    await member.commit(queue, 2)  # of what was fetched before: void
    assert await member.committed_offset(queue) == 3
    assert await member.pull(queue, 2, wait_seconds=LONG) == PullResult((), 3, 0, 3, PullRedirect.RESET)
    assert await member.committed_offset(queue) == 3
    assert await member.pull(queue, 3, wait_seconds=0) == PullResult((), 3, 0, 3)
    await member.commit(queue, 2)
    assert await member.committed_offset(queue) == 2
    assert await member.pull(other, 0, wait_seconds=0) == PullResult(
        (), 0, 0, 0, PullRedirect.RESET
    )  # each queue has its own mark


async def test_offset_reset_to_a_time_needs_no_online_member(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "one", "two")
    await member.commit(queue, 2)
    await member.leave()
    assert await world.cluster.reset_offsets(world.group, queue.topic, world.broker, timestamp=1.0) == {queue: 0}
    assert await world.member(queue.topic).pull(queue, 2, wait_seconds=0) == PullResult((), 0, 0, 2, PullRedirect.RESET)


async def test_offset_reset_needs_an_existing_group_and_topic(world: ContractCluster) -> None:
    [queue] = await world.topic()
    await all_fail(NotFoundError, world.cluster.reset_offsets(world.group, queue.topic, world.broker))
    await world.joined(queue.topic)
    await all_fail(NotFoundError, world.cluster.reset_offsets(world.group, "nowhere", world.broker))


# Members.


async def ids(world: ContractCluster) -> list[str]:
    return sorted(client.client_id for client in await world.cluster.online_consumers(world.group, world.broker))


async def test_member_is_online_from_join_to_leave_once_per_connection(world: ContractCluster) -> None:
    [queue] = await world.topic()
    assert await ids(world) == []
    one = await world.joined(queue.topic, name="one")
    again = await world.joined(queue.topic, name="one")
    await world.joined(queue.topic, name="two")
    assert await ids(world) == ["one", "one", "two"]
    await again.leave()
    assert await ids(world) == ["one", "two"]
    await one.leave()
    assert await ids(world) == ["two"]


async def test_member_is_notified_of_joins_and_leaves_also_of_its_own_join(world: ContractCluster) -> None:
    [queue] = await world.topic()
    told: list[str] = []
    await world.joined(queue.topic, name="one", on_members_changed=lambda: told.append("one"))
    await true(lambda: told == ["one"])
    two = await world.joined(queue.topic, name="two", on_members_changed=lambda: told.append("two"))
    await true(lambda: sorted(told) == ["one", "one", "two"])
    await two.leave()
    await true(lambda: sorted(told) == ["one", "one", "one", "two"])


async def test_settings_of_a_consumer_are_those_of_the_consumer_that_is_asked(world: ContractCluster) -> None:
    [queue] = await world.topic()
    start = StartFrom(position="Earliest")
    await world.joined(queue.topic, name="one", tags="red || blue", get_start_from=lambda: start)
    await world.joined(queue.topic, name="two", broadcasting=True)

    async def settings(name: str) -> ConsumerSettings:
        found = await world.cluster.consumer_settings(world.group, name, world.broker)
        subscriptions = tuple(it for it in found.subscriptions if it.topic == queue.topic)
        return found._replace(subscriptions=subscriptions)

    one = ConsumerSettings((Subscription(queue.topic, "red || blue"),), "Clustering", "Earliest")
    assert await settings("one") == one
    assert await settings("two") == ConsumerSettings((Subscription(queue.topic),), "Broadcasting", "Latest")
    start = StartFrom(position="Timestamp")
    assert await settings("one") == one._replace(start_position="Timestamp")
    with pytest.raises(RejectedError):
        await settings("three")


async def test_broadcasting_member_is_not_notified_of_other_members(world: ContractCluster) -> None:
    [queue] = await world.topic()
    told: list[str] = []
    hear = {"broadcasting": True, "on_members_changed": lambda: told.append("something")}
    one = await world.joined(queue.topic, name="one", **hear)
    two = await world.joined(queue.topic, name="two", **hear)
    await two.leave()
    await one.max_offset(queue)  # a round trip on the connection where it would have been told
    assert (told, await ids(world)) == ([], ["one"])


async def test_retry_topic_is_created_when_a_member_joins(world: ContractCluster) -> None:
    [queue] = await world.topic()
    await world.joined(queue.topic)
    assert await world.queues(f"%RETRY%{world.group}") == (Queue(f"%RETRY%{world.group}", world.broker, 0),)


async def test_member_joins_only_once(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    with pytest.raises(RuntimeError, match=f"one has already joined group {world.group}"):
        await member.join()
    assert await ids(world) == ["one"]
    await member.leave()
    await member.leave()
    with pytest.raises(RuntimeError, match=f"one has already left group {world.group}"):
        await member.join()
    assert await ids(world) == []


async def test_member_that_failed_to_join_may_try_again(world: ContractCluster) -> None:
    member = world.member(f"topic-{world.number}")
    await all_fail(NotFoundError, member.join())
    await world.topic()

    async def joined() -> bool:
        try:
            await member.join()
        except NotFoundError:
            return False
        return True

    await soon(joined)
    assert await ids(world) == ["one"]


async def test_member_that_has_left_cannot_reach_the_broker(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "one")
    [message] = (await member.pull(queue, 0, wait_seconds=0)).messages
    await member.leave()
    await all_fail(
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


async def test_member_cannot_join_for_a_topic_that_does_not_exist(world: ContractCluster) -> None:
    member = world.member("nowhere")
    await all_fail(NotFoundError, member.check_subscriptions(), member.join())


async def test_pull_of_a_topic_without_subscription_is_rejected(world: ContractCluster) -> None:
    [queue] = await world.topic()
    with pytest.raises(ValueError, match="has not subscribed to"):
        await world.member("another").pull(queue, 0, wait_seconds=0)


async def test_filter_by_sql92_is_rejected(world: ContractCluster) -> None:
    [queue] = await world.topic()
    filtered = Subscription(topic=queue.topic, expression="a > 1", type="SQL92")
    member = world.known(Membership(group=world.group, client_id="one", subscriptions=[filtered]))
    await all_fail(RejectedError, member.check_subscriptions(), member.pull(queue, 0, wait_seconds=0))
    await world.member(queue.topic, tags="a || b").check_subscriptions()


async def test_pull_fails_while_consumption_of_the_group_is_disabled(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "one")
    assert await world.cluster.group_settings(world.group, world.broker) == BrokerGroupSettings()
    await world.enable(world.group, 0)
    assert await world.cluster.group_settings(world.group, world.broker) == BrokerGroupSettings(consume_enabled=False)
    await all_fail(ConsumptionDisabledError, member.pull(queue, 0, wait_seconds=LONG))
    await member.commit(queue, 0)
    assert await member.committed_offset(queue) == 0
    await world.enable(world.group, 1)
    assert bodies(await member.pull(queue, 0, wait_seconds=0)) == ["one"]


# Locks.


async def test_lock_is_renewed_by_its_owner_and_refused_to_others(world: ContractCluster) -> None:
    queues = await world.topic(3)
    one = await world.joined(queues[0].topic, name="one")
    two = await world.joined(queues[0].topic, name="two")
    assert await one.lock(queues[:2]) == {*queues[:2]}
    assert await one.lock(queues[:2]) == {*queues[:2]}
    assert await two.lock(queues) == {queues[2]}
    elsewhere = world.member(queues[0].topic, name="two", group=f"{world.group}-b")
    assert await elsewhere.lock(queues) == {*queues}  # each group has its own locks


async def test_lock_is_released_only_by_its_owner_or_on_its_behalf(world: ContractCluster) -> None:
    queues = await world.topic(2)
    one = await world.joined(queues[0].topic, name="one")
    two = await world.joined(queues[0].topic, name="two")
    await one.lock(queues)
    await two.unlock(queues)
    assert await two.lock(queues) == frozenset()
    await one.unlock(queues[:1])
    assert await two.lock(queues) == {queues[0]}
    await one.leave()  # its locks stay
    assert await two.lock(queues) == {queues[0]}
    await world.cluster.unlock(world.group, "one", queues)
    assert await two.lock(queues) == {*queues}


async def test_lock_request_accepts_queues_of_one_broker_only(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = world.member(queue.topic)
    for queues in ([], [queue, queue._replace(broker="no-broker")]):
        for call in (member.lock, member.unlock):
            with pytest.raises(ValueError, match="The queues of one request must belong to one broker"):
                await call(queues)


async def test_lock_release_reaches_available_brokers_though_others_are_unreachable(world: ContractCluster) -> None:
    [queue] = await world.topic()
    one, two = (world.member(queue.topic, name=name) for name in ("one", "two"))
    await one.lock([queue])
    await all_fail(
        UnreachableError,
        world.cluster.unlock(world.group, "one", [queue._replace(broker="a-broker-that-is-away"), queue]),
    )
    assert await two.lock([queue]) == {queue}
    await world.cluster.unlock(world.group, "one", [])


# What comes again.


async def test_retry_returns_a_message_with_one_more_attempt(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic, tags="t")
    await world.send(queue, "again", TAGS="t")
    first = (await member.pull(queue, 0, wait_seconds=0)).messages[0]
    [retry] = await world.queues(f"%RETRY%{world.group}")
    await member.send_back(first, delay_level=A_SECOND)
    second = (await member.pull(retry, 0, wait_seconds=LONG)).messages[0]
    assert (second.queue, second.offset, second.reconsume_times, second.topic) == (retry, 0, 1, queue.topic)
    assert (second.body, second.tag, second.id, second.born_ms) == (b"again", "t", first.id, first.born_ms)
    assert second.stored_ms > first.stored_ms
    await member.send_back(second, delay_level=A_SECOND)
    third = (await member.pull(retry, 1, wait_seconds=LONG)).messages[0]
    assert (third.reconsume_times, third.topic, third.id) == (2, queue.topic, first.id)
    assert third.properties["ORIGIN_MESSAGE_ID"] == second.properties["ORIGIN_MESSAGE_ID"]
    made = {"RETRY_TOPIC": queue.topic, "REAL_TOPIC": retry.topic, "REAL_QID": "0", "DELAY": "1", "WAIT": "false"}
    assert made.items() <= third.properties.items()


async def dead_letters(world: ContractCluster) -> tuple[Message, ...]:
    [queue] = await world.queues(f"%DLQ%{world.group}")
    return (await world.member(queue.topic, group=f"{world.group}-dead").pull(queue, 0, wait_seconds=LONG)).messages


async def test_dead_letter_is_created_from_a_message_that_is_never_to_be_retried(world: ContractCluster) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "never")
    await member.send_back((await member.pull(queue, 0, wait_seconds=0)).messages[0], delay_level=DEAD_LETTER_LEVEL)
    [dead] = await dead_letters(world)
    assert (dead.body, dead.properties["RETRY_TOPIC"], dead.properties["DELAY"]) == (b"never", queue.topic, "0")
    assert dead.reconsume_times == 1


@pytest.mark.parametrize("attempts", [0, -1])
async def test_dead_letter_is_created_when_no_attempts_are_left(world: ContractCluster, attempts: int) -> None:
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "tried")
    tried = (await member.pull(queue, 0, wait_seconds=0)).messages[0]
    await member.send_back(tried, delay_level=RETRY_LEVEL, max_attempts=attempts)
    assert [dead.id for dead in await dead_letters(world)] == [tried.id]


# What only the twin can do.


class Clock:
    """A clock that is turned by hand."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_lock_at_the_in_memory_broker_expires_after_a_minute() -> None:
    clock = Clock()
    world = in_memory(MemoryCluster(clock=clock))
    queues = await world.topic(2)
    one, two = world.member(queues[0].topic, name="one"), world.member(queues[0].topic, name="two")
    await one.lock(queues)
    clock.now += 60
    assert await two.lock(queues) == frozenset()
    await one.lock(queues[:1])
    clock.now += 1
    assert await two.lock(queues) == {queues[1]}


@pytest.mark.parametrize(("level", "delays"), [(RETRY_LEVEL, [10, 30, 60]), (2, [5, 5, 5]), (18, [7200, 7200, 7200])])
async def test_retry_at_the_in_memory_broker_is_delayed_by_its_clock(level: int, delays: list[int]) -> None:
    clock = Clock()
    world = in_memory(MemoryCluster(clock=clock))
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "again")
    message = (await member.pull(queue, 0)).messages[0]
    retry = Queue(f"%RETRY%{world.group}", BROKER, 0)
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
    world = in_memory(memory)
    [queue] = await world.topic()
    told: list[str] = []
    member = await world.joined(queue.topic, on_members_changed=lambda: told.append("something"))
    await true(lambda: len(told) == 1)
    memory.take_down(name)
    operator = memory.queues(queue.topic) if name == NAME_SERVER else memory.online_consumers(world.group, name)
    late = world.member(queue.topic, name="late")
    await all_fail(UnreachableError, operator, late.join() if name == NAME_SERVER else member.commit(queue, 1))
    memory.bring_up(name)
    await member.commit(queue, 1)
    assert (await memory.queues(queue.topic), await ids(world)) == ((queue,), ["one"])
    await true(lambda: len(told) == 2)


async def test_pull_held_by_the_in_memory_broker_fails_when_it_goes_down() -> None:
    memory = MemoryCluster()
    world = in_memory(memory)
    [queue] = await world.topic()
    member = await world.joined(queue.topic)

    async def down() -> None:
        memory.take_down(BROKER)

    await all_fail(UnreachableError, woken(member, queue, 0, down))


async def test_lock_at_the_in_memory_broker_is_lost_by_a_restart() -> None:
    memory = MemoryCluster()
    world = in_memory(memory)
    [queue] = await world.topic()
    one, two = world.member(queue.topic, name="one"), world.member(queue.topic, name="two")
    await one.lock([queue])
    memory.take_down(BROKER)
    memory.bring_up(BROKER)
    assert await two.lock([queue]) == frozenset()
    memory.bring_up(BROKER, restarted=True)
    assert await two.lock([queue]) == {queue}


async def test_broker_in_memory_that_creates_no_groups_knows_only_created_groups() -> None:
    memory = MemoryCluster()
    memory.auto_creates_groups = False
    world = in_memory(memory)
    [queue] = await world.topic()
    member = world.member(queue.topic)
    await all_fail(
        NotFoundError, member.join(), member.pull(queue, 0, wait_seconds=0), memory.group_settings(world.group, BROKER)
    )
    await memory.update_group(world.group, BROKER, max_attempts=3)
    await member.join()
    assert (await memory.group_settings(world.group, BROKER)).max_attempts == 3


async def test_queue_at_the_in_memory_broker_may_start_at_a_later_offset() -> None:
    memory = MemoryCluster()
    world = in_memory(memory)
    [queue] = await world.topic()
    member = await world.joined(queue.topic)
    await world.send(queue, "old", "new")
    memory.min_offsets[queue] = 1
    assert (
        await member.min_offset(queue),
        await member.offset_at_time(queue, 0.0),
        await member.max_offset(queue),
    ) == (1, 1, 2)
    assert await member.pull(queue, 0) == PullResult((), 1, 1, 2, PullRedirect.OUT_OF_RANGE)
    assert bodies(await member.pull(queue, 1)) == ["new"]


async def test_member_is_registered_at_an_in_memory_broker_that_gains_its_topic() -> None:
    memory = MemoryCluster(("a", "b"))
    world = in_memory(memory)
    await memory.create_topic("orders", "a", 1)
    await world.joined("orders")
    assert await memory.online_consumers(world.group, "b") == ()
    await memory.create_topic("orders", "b", 1)
    assert [client.client_id for client in await memory.online_consumers(world.group, "b")] == ["one"]
    assert [queue.broker for queue in await memory.queues(f"%RETRY%{world.group}")] == ["a", "b"]
