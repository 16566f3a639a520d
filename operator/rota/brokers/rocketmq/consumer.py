"""RocketMQ consumer client: implements the broker port's `Consumer` for one member of a group."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import product, starmap

import msgspec

from rota.brokers.errors import MalformedResponseError, NotFoundError
from rota.brokers.message import Message
from rota.brokers.port import ADMIT_ALL, RETRY_LEVEL, Admission, ConsumedQueue, Membership, OffsetCorrection, PullResult
from rota.brokers.rocketmq.heartbeat import HeartbeatSender, consumer_data
from rota.brokers.rocketmq.routing import ConnectionConfig, RoutingClient
from rota.brokers.rocketmq.transport.responses import (
    decode_body,
    error_of,
    gather_results,
    int_field,
    remark_of,
    require_success,
)
from rota.brokers.rocketmq.wire import fastjson, payloads, requests
from rota.brokers.rocketmq.wire.codes import RequestCode, ResponseCode
from rota.brokers.rocketmq.wire.frames import Frame, MalformedFrameError
from rota.brokers.rocketmq.wire.messages import decode_admitted
from rota.model import Queue
from rota.spec.consumer_settings import tags_of

PULL_MARGIN_SECONDS = 10.0  # a broker answers a waiting pull at its next 5 s tick, so after the requested wait
MAX_PULL_BYTES = 256 * 1024  # a broker returns no more in one pull, whatever the request says
CLIENT_VERSION = "V5_3_3"  # protocol version that tools print for this member

_PULL_CODES = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
_RESET_REMARK = "OFFSET_RESET"

_log = logging.getLogger(__name__)


class RocketMQConsumer:
    """A member of a group, with its own connections: brokers list a member as online by its connections."""

    def __init__(self, config: ConnectionConfig, member: Membership) -> None:
        self._member = member
        self._name_servers = config.name_servers
        self._client = RoutingClient(config, self._handle_request, self._on_connected)
        self._started_ms = int(time.time() * 1000)
        self._subscriptions: dict[str, payloads.SubscriptionData] = {}
        self._tags: dict[str, frozenset[str]] = {}  # by topic, for subscriptions of type Tag; empty: all tags
        for topic, subscription in member.subscriptions_by_topic.items():
            self._subscriptions[topic] = requests.subscription(subscription, self._started_ms)
            if subscription.type == "Tag":
                self._tags[topic] = frozenset(tags_of(subscription))
        self._heartbeat = HeartbeatSender(self._client, member, [*self._subscriptions.values()])

    # Membership.

    async def check_subscriptions(self) -> None:
        """Ask every broker of the topics about each subscription that is not by tag; no broker rejects one by tag."""
        await self._heartbeat.fetch_routes()
        not_by_tag = [data for data in self._subscriptions.values() if not data.is_by_tag]
        check = partial(requests.check_client, self._member.client_id, self._member.group)
        calls = product(self._client.topic_brokers, map(check, not_by_tag))
        _, failed = await gather_results(starmap(self._client.call_or_raise, calls))
        if failed:
            raise failed[0]

    async def join(self) -> None:
        await self._heartbeat.join()

    async def leave(self) -> None:
        await self._heartbeat.leave()

    def _on_connected(self, address: str, request: Frame) -> None:
        """Pass the event on: `_heartbeat` does not exist yet when `__init__` names the callback."""
        self._heartbeat.on_connected(address, request)

    async def ping_broker(self, broker: str) -> None:
        """Request the group's client ids from a broker; any response counts."""
        await self._client.call(broker, requests.client_ids(self._member.group))

    # Messages.

    async def pull(
        self,
        queue: Queue,
        offset: int,
        *,
        max_messages: int = 32,
        wait_seconds: float = 15.0,
        commit_offset: int | None = None,
        admission: Admission = ADMIT_ALL,
    ) -> PullResult:
        data = self._subscriptions.get(queue.topic)
        if data is None:
            raise ValueError(f"{self._member.group} has not subscribed to {queue.topic}")
        request = requests.pull(
            self._member.group,
            queue,
            offset,
            data,
            max_messages=max_messages,
            max_bytes=MAX_PULL_BYTES,
            wait_seconds=wait_seconds,
            commit_offset=commit_offset,
        )
        response = await self._client.call(queue.broker, request, seconds=wait_seconds + PULL_MARGIN_SECONDS)
        if response.code == ResponseCode.INVALID_PARAMETER:
            raise NotFoundError(f"There is no queue {queue}: {remark_of(response)}")
        if response.code not in _PULL_CODES:
            raise error_of(f"Pulling {queue}", response)
        next_offset = int_field(response, "nextBeginOffset")
        min_offset = int_field(response, "minOffset")
        max_offset = int_field(response, "maxOffset")
        if response.code == ResponseCode.PULL_OFFSET_MOVED:
            correction = OffsetCorrection.RESET if response.remark == _RESET_REMARK else OffsetCorrection.OUT_OF_RANGE
            return PullResult((), next_offset, min_offset, max_offset, correction)
        try:
            messages, refused_offset = decode_admitted(response.body, queue.broker, offset, admission)
        except MalformedFrameError as error:
            raise MalformedResponseError(f"The response to a pull of {queue} cannot be decoded: {error}") from None
        tags = self._tags.get(queue.topic)
        if tags:  # the broker compared only the hashes of tags
            messages = [message for message in messages if message.tag in tags]
        if refused_offset is not None:  # the next pull begins with the first message that was not admitted
            next_offset = refused_offset
        return PullResult(tuple(messages), next_offset, min_offset, max_offset)

    async def send_back(self, message: Message, *, delay_level: int = RETRY_LEVEL, max_attempts: int = 16) -> None:
        broker = message.queue.broker
        request = requests.send_back(
            self._member.group,
            message.topic,
            message.commit_log_offset,
            delay_level=delay_level,
            max_attempts=max_attempts,
            message_id=message.id,
            broker=broker,
        )
        await self._client.call_or_raise(broker, request)

    # Offsets and locks.

    async def committed_offset(self, queue: Queue) -> int | None:
        await self._client.require_queue(queue)
        response = await self._client.call(queue.broker, requests.committed_offset(self._member.group, queue))
        offset = None
        if response.code != ResponseCode.QUERY_NOT_FOUND:
            offset = int_field(require_success(f"The offset of {queue}", response), "offset")
        if not offset:  # brokers respond with none or 0 for a deleted queue, too, which only a recent route shows
            await self._client.recheck_queue(queue)
        return offset

    async def commit(self, queue: Queue, offset: int) -> None:
        await self._client.call_or_raise(queue.broker, requests.commit(self._member.group, queue, offset))

    async def min_offset(self, queue: Queue) -> int:
        return await self._request_offset(queue, requests.min_offset(queue))

    async def max_offset(self, queue: Queue) -> int:
        return await self._request_offset(queue, requests.max_offset(queue))

    async def offset_at_time(self, queue: Queue, timestamp: float) -> int:
        return await self._request_offset(queue, requests.offset_at_time(queue, round(timestamp * 1000)))

    async def _request_offset(self, queue: Queue, request: Frame) -> int:
        await self._client.require_queue(queue)
        offset = int_field(await self._client.call_or_raise(queue.broker, request), "offset")
        if offset == 0:  # brokers respond 0 for a deleted queue, too, which only a recent route shows
            await self._client.recheck_queue(queue)
        return offset

    async def lock(self, queues: Collection[Queue]) -> frozenset[Queue]:
        request = requests.lock(self._member.group, self._member.client_id, queues)
        response = await self._client.call_or_raise(requests.require_one_broker(queues), request)
        locked = decode_body(response, payloads.LockedQueues).lock_ok_mq_set
        return frozenset(entry.queue for entry in locked)

    async def unlock(self, queues: Collection[Queue]) -> None:
        request = requests.unlock(self._member.group, self._member.client_id, queues)
        await self._client.call_or_raise(requests.require_one_broker(queues), request)

    # Requests from brokers.

    def _handle_request(self, request: Frame) -> Frame | None:
        handlers: Mapping[int, Callable[[Frame], Frame | None]] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._on_members_changed,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._on_offsets_reset,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._answer_running_info,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._answer_status,
        }
        handler = handlers.get(request.code)
        if handler is None:
            return request.make_response(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"Rota does not support request code {request.code}"
            )
        if self._member.group not in {request.fields.get("consumerGroup"), request.fields.get("group")}:
            return request.make_response(
                ResponseCode.SYSTEM_ERROR, remark=f"This member belongs to group {self._member.group}"
            )
        return handler(request)

    def _on_members_changed(self, _: Frame) -> None:
        self._member.on_members_changed()

    def _on_offsets_reset(self, request: Frame) -> None:
        try:
            offsets = fastjson.decode_json(request.body, payloads.ResetOffsets).offset_table
            self._member.on_offsets_reset(fastjson.parse_queue_table(offsets, int))
        except MalformedFrameError as error:
            _log.warning("A broker's offset reset was ignored, because its offsets cannot be decoded: %s", error)

    def _answer_running_info(self, request: Frame) -> Frame:
        data = consumer_data(self._member, self._subscriptions.values())
        queue_infos = {queue: _to_queue_info(consumed) for queue, consumed in self._member.get_queues().items()}
        info = payloads.RunningInfo(
            properties={
                "consumerGroup": data.group_name,
                "messageModel": data.message_model,
                "consumeFromWhere": data.consume_from_where,
                "PROP_CONSUME_TYPE": data.consume_type,
                "PROP_CONSUMEORDERLY": str(self._member.orderly).lower(),
                "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
                "PROP_CLIENT_VERSION": CLIENT_VERSION,
                "PROP_NAMESERVER_ADDR": ";".join(self._name_servers),
                "PROP_THREADPOOL_CORE_SIZE": "1",
            },
            subscription_set=data.subscription_data_set,
            mq_table=fastjson.encode_queue_table(queue_infos),
        )
        return request.make_response(ResponseCode.SUCCESS, msgspec.json.encode(info))

    def _answer_status(self, request: Frame) -> Frame:
        offsets = {queue: consumed.committed_offset for queue, consumed in self._member.get_queues().items()}
        table = fastjson.encode_queue_table(offsets)
        body = msgspec.json.encode(payloads.ConsumerStatus(message_queue_table=table))
        return request.make_response(ResponseCode.SUCCESS, body)


def _to_queue_info(consumed: ConsumedQueue) -> payloads.QueueInfo:
    return payloads.QueueInfo(
        commit_offset=consumed.committed_offset,
        cached_msg_min_offset=consumed.min_buffered_offset,
        cached_msg_max_offset=consumed.max_buffered_offset,
        cached_msg_count=consumed.buffered_messages,
        cached_msg_size_in_mi_b=consumed.buffered_bytes // 2**20,
        locked=consumed.locked,
        last_lock_timestamp=int(consumed.locked_at * 1000),
        last_pull_timestamp=int(consumed.pulled_at * 1000),
        last_consume_timestamp=int(consumed.delivered_at * 1000),
    )
