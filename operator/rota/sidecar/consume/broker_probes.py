"""Probes of brokers that did not answer when the member released its last queue there; repeated until they answer.

Without probes, a member that is cut off from a broker would look healthy once it has no queue there. The operator would
assign it queues of that broker again, the member could consume none of them, over and over.
"""

import asyncio
from collections.abc import Mapping

from rota.brokers.errors import BrokerError, UnreachableError
from rota.model import Queue
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.consume.source import ConsumerSession
from rota.sidecar.status.problems import Problems

PROBE_SECONDS = 2.0  # seconds between the last answers and the next probes


class BrokerProber:
    """Probes the brokers that did not answer at a release, each through the session that last used it."""

    def __init__(self, readers: Mapping[Queue, QueueReader], problems: Problems) -> None:
        self._readers = readers
        self._problems = problems
        self._sessions: dict[str, ConsumerSession] = {}  # by broker: brokers to probe

    def on_released(self, reader: QueueReader) -> None:
        """Start probes of a released queue's broker if it did not answer the last request."""
        if self._problems.is_failing(reader.queue.broker):
            self._sessions[reader.queue.broker] = reader.session

    def stop_probes(self) -> None:
        """Stop all probes: the member leaves the group."""
        self._sessions.clear()

    def broker_reachability(self, now: float) -> dict[str, bool]:
        """Return whether each broker that is read from or probed can be reached."""
        reachability = self._problems.broker_reachability(now)
        in_use = {queue.broker for queue in self._readers} | self._sessions.keys()
        return {broker: is_reachable for broker, is_reachable in reachability.items() if broker in in_use}

    async def run(self) -> None:
        """Probe the brokers PROBE_SECONDS after the last answers, for ever."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            await asyncio.gather(*(self._probe(broker, session) for broker, session in self._sessions.items()))

    async def _probe(self, broker: str, session: ConsumerSession) -> None:
        try:
            await session.consumer.ping_broker(broker)
        except UnreachableError:
            return
        except BrokerError:  # an error response, too, shows that the broker is reachable
            pass
        if self._sessions.get(broker) is session:  # otherwise probes were stopped, or go through another session now
            del self._sessions[broker]
            self._problems.record_answer(broker)
