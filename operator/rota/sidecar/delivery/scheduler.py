"""Who delivers next: queues take turns, and no queue can keep the others from delivering.

An app that hangs on the messages of one queue would soon have all deliveries that may be open at once busy with it.
So the last quarter of them is for queues that have none open: one that hangs gets three quarters, each further one that
hangs no more than one of the rest. (Of fewer than four there is no quarter.)
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from rota.model import Queue
from rota.sidecar.member.window import Delivery, Window

KEPT = 4  # one in so many is kept for queues that have none open


class Taken(NamedTuple):
    """What is to be delivered now."""

    queue: Queue
    window: Window
    delivery: Delivery


class Shelf:
    """The queues that have something to deliver, as far as is known, in the order of their turns."""

    def __init__(self, may: Callable[[Queue], bool]) -> None:
        """`may` says whether a delivery of a queue may begin now."""
        self._may = may
        self._ready: OrderedDict[Queue, Window] = OrderedDict()

    def offer(self, queue: Queue, window: Window) -> None:
        """Look at a queue at its turn: something was fetched, came back, ended, or is allowed again."""
        self._ready[queue] = window  # of a queue that was given anew it is another one

    def withdraw(self, queue: Queue) -> None:
        """Look at it no more."""
        self._ready.pop(queue, None)

    def take(self, now: float, most: Callable[[Queue], int], free: float = inf, every: int = 0) -> Taken | None:
        """Begin the next delivery, where so many more of every may be open; a queue that has none is offered again."""
        for _ in range(len(self._ready) if free > 0 else 0):
            if not self._ready:  # to ask whether it may can take queues away
                break
            queue, window = self._ready.popitem(last=False)
            if window.open and free <= every // KEPT:
                self._ready[queue] = window
            elif self._may(queue) and (delivery := window.take(most(queue), now)):
                self._ready[queue] = window
                return Taken(queue, window, delivery)
        return None
