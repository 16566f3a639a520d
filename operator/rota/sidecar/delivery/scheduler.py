"""Scheduler of deliveries: queues take turns, and no queue can block the others.

An app that hangs on the messages of one queue would soon use up all concurrent deliveries. So the last quarter of them
is reserved for queues without an open delivery: the first queue that hangs gets at most three quarters, each further
one a single delivery of the remaining quarter. (With fewer than four concurrent deliveries nothing is reserved.)
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from rota.model import Queue
from rota.sidecar.member.window import OpenDelivery, QueueWindow

RESERVED_DIVISOR = 4  # one delivery in this many is reserved for queues without an open one


class Batch(NamedTuple):
    """A delivery to send, with its queue and window."""

    queue: Queue
    window: QueueWindow
    delivery: OpenDelivery


class DeliveryScheduler:
    """Queues that may have messages to deliver, in the order of their turns."""

    def __init__(self, may_deliver: Callable[[Queue], bool]) -> None:
        """`may_deliver` returns whether a delivery of a queue may start now."""
        self._may_deliver = may_deliver
        self._ready: OrderedDict[Queue, QueueWindow] = OrderedDict()

    @property
    def has_ready(self) -> bool:
        """Whether a queue waits for its turn."""
        return bool(self._ready)

    def offer(self, queue: Queue, window: QueueWindow) -> None:
        """Give a queue a turn: messages were fetched, returned or finished, or the queue may deliver again."""
        self._ready[queue] = window  # a queue that was assigned again has another window

    def withdraw(self, queue: Queue) -> None:
        """Remove a queue from the turns until it is offered again."""
        self._ready.pop(queue, None)

    def start_next(
        self, now: float, max_messages: Callable[[Queue], int], free_slots: float = inf, total_slots: int = 0
    ) -> Batch | None:
        """Start the next delivery, if one of the `total_slots` is free.

        A queue that cannot deliver is removed until it is offered again.
        """
        if free_slots <= 0:
            return None
        only_idle_queues = free_slots <= total_slots // RESERVED_DIVISOR  # never in delivery mode Pull: it has no slots
        for _ in range(len(self._ready)):
            if not self._ready:  # `may_deliver` can withdraw queues
                break
            queue, window = self._ready.popitem(last=False)
            if only_idle_queues and window.open_deliveries:
                self._ready[queue] = window
                continue
            delivery = window.start_delivery(max_messages(queue), now) if self._may_deliver(queue) else None
            if delivery:
                self._ready[queue] = window
                return Batch(queue, window, delivery)
        return None
