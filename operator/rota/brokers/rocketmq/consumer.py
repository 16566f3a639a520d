"""One member's place in a group at RocketMQ's brokers: `Consumer`."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from itertools import product

import msgspec

from rota.brokers.errors import Garbled, Unknown
from rota.brokers.message import Message
from rota.brokers.port import ADMIT_ALL, LATER, Admission, Membership, Moved, Pulled, Working
from rota.brokers.rocketmq.heartbeat import Presence, consumer_data
from rota.brokers.rocketmq.routing import Client, Site
from rota.brokers.rocketmq.transport.responses import body, good, number, reason, refusal, side_by_side
from rota.brokers.rocketmq.wire import fastjson, payloads, requests
from rota.brokers.rocketmq.wire.codes import Answer, Request
from rota.brokers.rocketmq.wire.frames import Frame, Malformed
from rota.brokers.rocketmq.wire.messages import prefix
from rota.model import Queue
from rota.spec.consumer_settings import tags_of

PULL_MARGIN = 10.0  # a broker answers a held request at its next 5 s tick, so later than it was asked to
MOST_BYTES = 256 * 1024  # a broker gives no more at once, whatever is asked
CLIENT_VERSION = "V5_3_3"  # of which protocol; tools print it

_PULLED = frozenset({Answer.SUCCESS, Answer.PULL_NOT_FOUND, Answer.PULL_RETRY_IMMEDIATELY, Answer.PULL_OFFSET_MOVED})
_RESET = "OFFSET_RESET"

_log = logging.getLogger(__name__)


class RocketMQConsumer:
    """A member, with connections of its own: by them brokers know who is online."""

    def __init__(self, site: Site, member: Membership) -> None:
        """Connect when `join` or something else is asked."""
        self._member, self._name_servers = member, site.name_servers
        self._client = Client(site, self._serve, self._opened)
        self._began = int(time.time() * 1000)
        self._subscriptions = {topic: requests.subscription(it, self._began) for topic, it in member.topics.items()}
        self._tags = {it.topic: frozenset(tags_of(it)) for it in member.topics.values() if it.type == "Tag"}
        self._presence = Presence(self._client, member, [*self._subscriptions.values()])

    # Membership.

    async def check(self) -> None:
        """Ask the brokers whether they take the subscriptions."""
        await self._presence.look()
        told = [
            requests.check_client(self._member.client_id, self._member.group, data)
            for data in self._subscriptions.values()
            if data.expression_type != "TAG"
        ]
        _, failed = await side_by_side(self._client.get(*it) for it in product(self._client.hosts, told))
        if failed:
            raise failed[0]

    async def join(self) -> None:
        """Become known to every broker of the topics, and stay so; one that cannot be reached is told later."""
        await self._presence.join()

    async def leave(self) -> None:
        """Tell the brokers that the member goes, and close all connections."""
        await self._presence.leave()

    def _opened(self, address: str, request: Frame) -> None:
        self._presence.opened(address, request)

    async def reach(self, broker: str) -> None:
        """Ask a broker who is in the group."""
        await self._client.ask(broker, requests.client_ids(self._member.group))

    # Messages.

    async def pull(
        self,
        queue: Queue,
        offset: int,
        *,
        most: int = 32,
        wait: float = 15.0,
        commit: int | None = None,
        admission: Admission = ADMIT_ALL,
    ) -> Pulled:
        """Ask for messages from an offset on; where there are none, the broker waits for some."""
        data = self._subscriptions.get(queue.topic)
        if data is None:
            raise ValueError(f"{self._member.group} has not subscribed to {queue.topic}")
        request = requests.pull(
            self._member.group, queue, offset, data, most=most, most_bytes=MOST_BYTES, wait=wait, commit=commit
        )
        answer = await self._client.ask(queue.broker, request, wait + PULL_MARGIN)
        if answer.code == Answer.INVALID_PARAMETER:
            raise Unknown(f"There is no queue {queue}: {reason(answer)}")
        if answer.code not in _PULLED:
            raise refusal(f"Pulling {queue}", answer)
        following, first, last = (number(answer, it) for it in ("nextBeginOffset", "minOffset", "maxOffset"))
        if answer.code == Answer.PULL_OFFSET_MOVED:
            return Pulled((), following, first, last, Moved.RESET if answer.remark == _RESET else Moved.OUTSIDE)
        try:
            kept, left = prefix(answer.body, queue.broker, offset, admission)
        except Malformed as error:
            raise Garbled(f"What was pulled from {queue} cannot be read: {error}") from None
        if tags := self._tags.get(queue.topic):  # the broker looked at their hashes only
            kept = [it for it in kept if it.tag in tags]
        return Pulled(tuple(kept), following if left is None else left, first, last)

    async def give_back(self, message: Message, *, level: int = LATER, attempts: int = 16) -> None:
        """Have a message tried again later, or never."""
        broker = message.queue.broker
        request = requests.give_back(
            self._member.group,
            message.topic,
            message.place,
            level=level,
            attempts=attempts,
            identity=message.id,
            broker=broker,
        )
        await self._client.get(broker, request)

    # Offsets and locks.

    async def committed(self, queue: Queue) -> int | None:
        """Return where the group is, or None where it never was."""
        await self._client.need(queue)
        answer = await self._client.ask(queue.broker, requests.committed(self._member.group, queue))
        none = answer.code == Answer.QUERY_NOT_FOUND
        found = 0 if none else number(good(f"The offset of {queue}", answer), "offset")
        if not found:  # so brokers speak of what was deleted, too
            await self._client.doubt(queue)
        return None if none else found

    async def commit(self, queue: Queue, offset: int) -> None:
        """Say where the group is."""
        await self._client.get(queue.broker, requests.commit(self._member.group, queue, offset))

    async def first(self, queue: Queue) -> int:
        """Return the offset of a queue's oldest message."""
        return await self._offset(queue, requests.first(queue))

    async def last(self, queue: Queue) -> int:
        """Return the offset that a queue's next message will have."""
        return await self._offset(queue, requests.last(queue))

    async def at(self, queue: Queue, seconds: float) -> int:
        """Return the offset of the first message that was stored at a time or later."""
        return await self._offset(queue, requests.at(queue, round(seconds * 1000)))

    async def _offset(self, queue: Queue, request: Frame) -> int:
        await self._client.need(queue)
        found = number(await self._client.get(queue.broker, request), "offset")
        if not found:
            await self._client.doubt(queue)
        return found

    async def lock(self, queues: Collection[Queue]) -> frozenset[Queue]:
        """Ask for queues of one broker to be locked; return those that are."""
        request = requests.lock(self._member.group, self._member.client_id, queues)
        found = body(await self._client.get(requests.one_broker(queues), request), payloads.Locked)
        return frozenset(it.queue for it in found.lock_ok_mq_set)

    async def unlock(self, queues: Collection[Queue]) -> None:
        """Give locks on queues of one broker back."""
        request = requests.unlock(self._member.group, self._member.client_id, queues)
        await self._client.get(requests.one_broker(queues), request)

    # What brokers ask.

    def _serve(self, asked: Frame) -> Frame | None:
        answers: Mapping[int, Callable[[Frame], Frame | None]] = {
            Request.NOTIFY_CONSUMER_IDS_CHANGED: self._members_changed,
            Request.RESET_CONSUMER_CLIENT_OFFSET: self._offsets_set,
            Request.GET_CONSUMER_RUNNING_INFO: self._running_info,
            Request.GET_CONSUMER_STATUS_FROM_CLIENT: self._status,
        }
        answer = answers.get(asked.code)
        if answer is None:
            return asked.reply(Answer.REQUEST_CODE_NOT_SUPPORTED, remark=f"Rota does not answer {asked.code}")
        if self._member.group not in {asked.fields.get("consumerGroup"), asked.fields.get("group")}:
            return asked.reply(Answer.SYSTEM_ERROR, remark=f"This member is of {self._member.group}")
        return answer(asked)

    def _members_changed(self, _: Frame) -> None:
        self._member.on_members()

    def _offsets_set(self, asked: Frame) -> None:
        try:
            found = fastjson.read(asked.body, payloads.Reset).offset_table
            self._member.on_reset({fastjson.queue(key): offset for key, offset in found.items()})
        except Malformed as error:
            _log.warning("A broker set offsets, but to what cannot be read: %s", error)

    def _running_info(self, asked: Frame) -> Frame:
        data = consumer_data(self._member, self._subscriptions.values())
        info = payloads.RunningInfo(
            properties={
                "consumerGroup": data.group_name,
                "messageModel": data.message_model,
                "consumeFromWhere": data.consume_from_where,
                "PROP_CONSUME_TYPE": data.consume_type,
                "PROP_CONSUMEORDERLY": str(self._member.orderly).lower(),
                "PROP_CONSUMER_START_TIMESTAMP": str(self._began),
                "PROP_CLIENT_VERSION": CLIENT_VERSION,
                "PROP_NAMESERVER_ADDR": ";".join(self._name_servers),
                "PROP_THREADPOOL_CORE_SIZE": "1",
            },
            subscription_set=data.subscription_data_set,
            mq_table=fastjson.table({queue: _info(it) for queue, it in self._member.queues().items()}),
        )
        return asked.reply(Answer.SUCCESS, msgspec.json.encode(info))

    def _status(self, asked: Frame) -> Frame:
        offsets = fastjson.table({queue: it.committed for queue, it in self._member.queues().items()})
        return asked.reply(Answer.SUCCESS, msgspec.json.encode(payloads.ConsumerStatus(message_queue_table=offsets)))


def _info(working: Working) -> payloads.QueueInfo:
    return payloads.QueueInfo(
        commit_offset=working.committed,
        cached_msg_min_offset=working.first,
        cached_msg_max_offset=working.last,
        cached_msg_count=working.buffered,
        cached_msg_size_in_mi_b=working.bytes // 2**20,
        locked=working.locked,
        last_lock_timestamp=int(working.locked_at * 1000),
        last_pull_timestamp=int(working.pulled_at * 1000),
        last_consume_timestamp=int(working.delivered_at * 1000),
    )
