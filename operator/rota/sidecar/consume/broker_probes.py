"""Brokers that did not answer when the last of their queues was given up: asked again until they do.

Otherwise a member that is cut off from a broker would seem well as soon as it has no queue there any more, be given
some again, and work none of them, over and over.
"""

import asyncio
from typing import Protocol

from rota.brokers.errors import BrokerError, Unreachable
from rota.model import Queue
from rota.sidecar.consume.queue_reader import Reading
from rota.sidecar.consume.source import Source
from rota.sidecar.status.problems import Health

PROBE_SECONDS = 2.0  # from the last answers to the next questions


class Shell(Protocol):
    """Whose brokers they are."""

    readings: dict[Queue, Reading]
    health: Health


class Probes:
    """Whom to ask about each of these brokers."""

    def __init__(self, shell: Shell) -> None:
        """Ask nobody yet."""
        self._shell = shell
        self._by_broker: dict[str, Source] = {}

    def given_up(self, reading: Reading) -> None:
        """Know that a queue is read no more."""
        if self._shell.health.fails(reading.queue.broker):
            self._by_broker[reading.queue.broker] = reading.source

    def forget(self) -> None:
        """Forget all of them: the member leaves."""
        self._by_broker.clear()

    def reached(self, now: float) -> dict[str, bool]:
        """Return of the brokers that are read from, and of those that are asked, which can be reached."""
        named = {queue.broker for queue in self._shell.readings} | self._by_broker.keys()
        return {broker: reached for broker, reached in self._shell.health.brokers(now).items() if broker in named}

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            await asyncio.gather(*(self._ask(broker, source) for broker, source in self._by_broker.items()))

    async def _ask(self, broker: str, source: Source) -> None:
        try:
            await source.consumer.reach(broker)
        except Unreachable:
            return
        except BrokerError:  # it answers, whatever it says
            pass
        if self._by_broker.get(broker) is source:
            del self._by_broker[broker]
            self._shell.health.reached(broker)
