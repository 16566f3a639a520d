"""Probes of brokers that did not answer when the member released its last queue there; repeated until they answer.

Without probes, a member that is cut off from a broker would look healthy once it has no queue there. The operator would
assign it queues of that broker again, the member could consume none of them, over and over.
"""

import asyncio
from typing import Protocol

from rota.brokers.errors import BrokerError, UnreachableError
from rota.model import Queue
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.consume.source import Source
from rota.sidecar.status.problems import Problems

PROBE_SECONDS = 2.0  # seconds between the last answers and the next probes


class ProbeHost(Protocol):
    """The member, as probes need it."""

    readings: dict[Queue, QueueReader]
    health: Problems


class Probes:
    """Probes these brokers, each through the session that last used it."""

    def __init__(self, shell: ProbeHost) -> None:
        self._shell = shell
        self._by_broker: dict[str, Source] = {}

    def given_up(self, reading: QueueReader) -> None:
        """Start probes of a released queue's broker if it did not answer the last request."""
        if self._shell.health.fails(reading.queue.broker):
            self._by_broker[reading.queue.broker] = reading.source

    def forget(self) -> None:
        """Stop all probes: the member leaves the group."""
        self._by_broker.clear()

    def reached(self, now: float) -> dict[str, bool]:
        """Return whether each broker that is read from or probed can be reached."""
        in_use = {queue.broker for queue in self._shell.readings} | self._by_broker.keys()
        return {broker: reached for broker, reached in self._shell.health.brokers(now).items() if broker in in_use}

    async def run(self) -> None:
        """Probe all of these brokers every PROBE_SECONDS, for ever."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            await asyncio.gather(*(self._ask(broker, source) for broker, source in self._by_broker.items()))

    async def _ask(self, broker: str, source: Source) -> None:
        try:
            await source.consumer.reach(broker)
        except UnreachableError:
            return
        except BrokerError:  # an error response, too, shows that the broker is reachable
            pass
        if self._by_broker.get(broker) is source:
            del self._by_broker[broker]
            self._shell.health.reached(broker)
