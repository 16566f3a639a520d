"""RocketMQ admin client: `RocketMQBrokers`, the operator's client, with administrative requests.

Benchmarks and tests use it.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rota.brokers.errors import NotFoundError
from rota.brokers.rocketmq.brokers import RELAY_TIMEOUT_SECONDS, RocketMQBrokers
from rota.brokers.rocketmq.transport.responses import decode_body, parse_queue_table, require_success
from rota.brokers.rocketmq.wire import payloads, requests
from rota.brokers.rocketmq.wire.codes import READ_WRITE, ResponseCode
from rota.model import Queue

NO_CONSUMER_REMARK = "no consumer for this group"  # remark of a broker's response; the code is the generic SYSTEM_ERROR


class AdminClient(RocketMQBrokers):
    """Client that also creates and changes topics, groups and brokers; the operator itself sends no such request."""

    async def client_ids(self, group: str, broker: str) -> tuple[str, ...]:
        """Return the distinct client ids online in a group, as RocketMQ's Java clients read them to rebalance."""
        response = await self._client.call(broker, requests.client_ids(group))
        if response.code == ResponseCode.SYSTEM_ERROR and NO_CONSUMER_REMARK in response.remark:
            return ()
        require_success(f"The members of {group} at {broker}", response)
        return tuple(dict.fromkeys(decode_body(response, payloads.ClientIdList).consumer_id_list))

    async def create_topic(self, topic: str, broker: str, queues: int, *, perm: int = READ_WRITE) -> None:
        """Create a topic on a broker, or update it there."""
        await self._client.call_or_raise(broker, requests.create_topic(topic, queues, perm=perm))

    async def topic_config(self, topic: str, broker: str) -> payloads.TopicConfig:
        return decode_body(await self._client.call_or_raise(broker, requests.topic_config(topic)), payloads.TopicConfig)

    async def update_group(self, group: str, broker: str, **changed: Any) -> None:
        """Create a group on a broker, or update the named settings; names are the protocol's.

        Attributes are not sent back, so they do not change: a broker returns their values, but expects changes of them
        in a request ("+name" or "-name").
        """
        current: dict[str, Any] = {}
        with suppress(NotFoundError):
            current = {**await self.group_config(group, broker)}
        current.pop("attributes", None)
        await self._client.call_or_raise(broker, requests.update_group({**current, "groupName": group, **changed}))

    async def group_config(self, group: str, broker: str) -> Mapping[str, Any]:
        """Return all settings of a group at a broker, by the protocol's names."""
        return decode_body(await self._client.call_or_raise(broker, requests.group_config(group)), dict[str, Any])

    async def reset_offsets(
        self, group: str, topic: str, broker: str, *, timestamp: float | None = None
    ) -> dict[Queue, int]:
        """Reset a group's offsets to a time, or to the end; return the new offsets."""
        timestamp_ms = -1 if timestamp is None else round(timestamp * 1000)  # -1: the end
        response = await self._client.call_or_raise(broker, requests.reset_offsets(group, topic, timestamp_ms))
        return parse_queue_table(decode_body(response, payloads.ResetOffsets).offset_table, int)

    async def set_consume_mode(self, topic: str, group: str, broker: str, mode: str) -> None:
        """Set whether a group's members PULL a topic's queues or POP from them."""
        await self._client.call_or_raise(broker, requests.set_request_mode(topic, group, mode))

    async def query_assignment(
        self, topic: str, group: str, client_id: str, broker: str, strategy: str = "AVG"
    ) -> tuple[Queue, ...] | None:
        """Return the queues that a broker assigns to a member; None: no new assignment, the member keeps its queues."""
        response = await self._client.call_or_raise(broker, requests.assignment(topic, group, client_id, strategy))
        assigned = decode_body(response, payloads.AssignmentResponse).message_queue_assignments
        return None if assigned is None else tuple(sorted(item.message_queue.queue for item in assigned))

    async def running_info(self, group: str, client_id: str, broker: str) -> Mapping[str, Any]:
        """Return what a member says about itself (RocketMQ's running info); its broker forwards the request to it."""
        response = await self._client.call_or_raise(
            broker, requests.running_info(group, client_id), RELAY_TIMEOUT_SECONDS
        )
        return decode_body(response, dict[str, Any])

    async def broker_config(self, broker: str) -> dict[str, str]:
        text = (await self._client.call_or_raise(broker, requests.broker_config())).body.decode(errors="replace")
        settings: dict[str, str] = {}
        for line in text.splitlines():
            name, separator, value = line.partition("=")
            if separator:
                settings[name.strip()] = value.strip()
        return settings

    async def update_broker_config(self, broker: str, **changed: object) -> None:
        """Update settings of a broker; names are the broker's."""
        await self._client.call_or_raise(broker, requests.update_broker_config(changed))
