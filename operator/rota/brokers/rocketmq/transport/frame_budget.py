"""The frame budget: one limit for the large incomplete frames that all connections of a process buffer.

The operator connects to brokers that tenants run, and any of them may send 16 MiB of a frame and never its end.

- A frame of up to FREE_BYTES needs no room: it takes about as much as its connection does.
- A larger one needs room for the length that it announces before more of it is read. Its connection is not read while
  it waits, first come, first served. A frame never needs more than half of the budget, so each gets room some time.
- A frame that is not complete in time costs its connection, and its client is distrusted for a while: it waits behind
  clients that are not, and its frames find room in half of the budget only.
"""

import asyncio
from collections.abc import Callable
from math import inf

from rota.aio import call_after_all
from rota.brokers.rocketmq.wire.frames import LARGEST

FREE_BYTES = 2**16
BUDGET_BYTES = 4 * LARGEST
HOLD_SECONDS = 5.0  # from when a frame has room until it is complete
WAIT_SECONDS = 10.0  # for room; nobody waits longer for an answer
DISTRUST_SECONDS = 300.0
MOST_WAITING = 64  # connections; each holds what was read before it was paused: 256 KiB, with TLS twice as much


class FrameBudget:
    """Limits the bytes of large incomplete frames, reserved by the lengths that they announce."""

    def __init__(self, limit_bytes: int = BUDGET_BYTES) -> None:
        if limit_bytes < 2 * LARGEST:
            raise ValueError(f"A frame budget has room for two largest frames at least, {2 * LARGEST:,} bytes")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._line: list[Reservation] = []

    @property
    def waiting(self) -> int:
        """How many frames wait for room."""
        return len(self._line)

    def enqueue(self, reservation: "Reservation") -> None:
        """Grant a reservation, or put it in the line; where that is full, reject the last one."""
        self._line.append(reservation)
        self.grant()
        if len(self._line) > MOST_WAITING:
            self._ordered()[-1].reject(f"more than {MOST_WAITING} frames wait for room")

    def withdraw(self, reservation: "Reservation") -> None:
        """Take a reservation out of the line, or its bytes out of the budget; others may be granted now."""
        if reservation in self._line:
            self._line.remove(reservation)
        else:
            self.used_bytes -= reservation.size_bytes
        self.grant()

    def grant(self) -> None:
        """Grant reservations in their order as far as there is room; no frame overtakes a larger one."""
        for reservation in self._ordered():
            limit_bytes = self.limit_bytes // 2 if reservation.account.is_distrusted else self.limit_bytes
            if self.used_bytes + reservation.size_bytes > limit_bytes:
                return
            self._line.remove(reservation)
            self.used_bytes += reservation.size_bytes
            reservation.start()

    def _ordered(self) -> "list[Reservation]":
        return sorted(self._line, key=lambda reservation: reservation.account.is_distrusted)


class FrameAccount:
    """One client's part in the budget: all its connections are trusted or distrusted together."""

    def __init__(self, budget: FrameBudget) -> None:
        self.budget = budget
        self._distrusted_until = -inf

    @property
    def is_distrusted(self) -> bool:
        """Whether a frame of this client was not completed in time a while ago."""
        return asyncio.get_running_loop().time() < self._distrusted_until

    def distrust(self) -> None:
        """Let other clients go first for a while."""
        self._distrusted_until = asyncio.get_running_loop().time() + DISTRUST_SECONDS

    def reserve(
        self, size_bytes: int, on_granted: Callable[[], None], on_rejected: Callable[[str], None]
    ) -> "Reservation":
        """Ask for room for a frame: `on_granted` is called once there is some, `on_rejected` if it takes too long."""
        reservation = Reservation(self, size_bytes, on_granted, on_rejected)
        self.budget.enqueue(reservation)
        return reservation


class Reservation:
    """The room that one frame has, or waits for; it ends by itself if that takes too long."""

    def __init__(
        self,
        account: FrameAccount,
        size_bytes: int,
        on_granted: Callable[[], None],
        on_rejected: Callable[[str], None],
    ) -> None:
        self.account = account
        self.size_bytes = size_bytes
        self.granted = False
        self._on_granted = on_granted
        self._on_rejected = on_rejected
        self._ended = False
        self._timer = self._call_after(WAIT_SECONDS, self._end_waiting)

    @staticmethod
    def _call_after(seconds: float, end: Callable[[], None]) -> asyncio.TimerHandle:
        return call_after_all(asyncio.get_running_loop().time() + seconds, end)

    def start(self) -> None:
        """Have the room from now on."""
        self.granted = True
        self._timer.cancel()
        self._timer = self._call_after(HOLD_SECONDS, self._end_holding)
        self._on_granted()

    def release(self) -> None:
        """Give the room, or the place in the line, back."""
        if not self._ended:
            self._ended = True
            self._timer.cancel()
            self.account.budget.withdraw(self)

    def reject(self, why: str) -> None:
        """Give the room, or the place in the line, back, and say why."""
        if not self._ended:
            self.release()
            self._on_rejected(f"a frame of {self.size_bytes:,} bytes was not read to its end: {why}")

    def _end_waiting(self) -> None:
        if not self.granted:
            self.reject(f"frames of other brokers left no room for it within {WAIT_SECONDS:g} s")

    def _end_holding(self) -> None:
        if not self._ended:
            self.account.distrust()
            self.reject(f"it was not complete within {HOLD_SECONDS:g} s")
