"""Frame budget: one memory limit for the large incomplete frames that all connections of a process buffer.

The operator has one client for each broker cluster. Tenants run the brokers, and any of them may send 16 MiB of a frame
and never its end.

- A frame of up to MAX_UNRESERVED_BYTES needs no reservation: it takes about as much memory as its connection does.
- A larger frame must reserve its announced length before more of it is read. Reading from its connection is paused
  until then, first come, first served. A frame needs at most half of the budget, so each gets room eventually.
- If a frame is not complete in time, its connection is closed, and the cluster's client is distrusted for a while:
  its frames wait behind those of trusted clients, and may use only half of the budget.
"""

import asyncio
from collections.abc import Callable
from math import inf

from rota.aio import call_after_pending_input
from rota.brokers.rocketmq.wire.frames import MAX_FRAME_BYTES

MAX_UNRESERVED_BYTES = 2**16
BUDGET_BYTES = 4 * MAX_FRAME_BYTES
HOLD_SECONDS = 5.0  # limit for a frame to be complete after its reservation was granted
WAIT_SECONDS = 10.0  # limit for a reservation to be granted; callers wait about as long for a response, or less
DISTRUST_SECONDS = 300.0
# Reservations in the queue. The connection of each buffers what it read before the pause: 256 KiB, with TLS twice as
# much.
MAX_WAITING_FRAMES = 64


class FrameBudget:
    """Limits the bytes of large incomplete frames, reserved by the lengths that they announce."""

    def __init__(self, limit_bytes: int = BUDGET_BYTES) -> None:
        if limit_bytes < 2 * MAX_FRAME_BYTES:
            problem = f"A frame budget must hold at least two frames of the maximum size, {2 * MAX_FRAME_BYTES:,} bytes"
            raise ValueError(problem)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: list[FrameReservation] = []

    def enqueue(self, reservation: "FrameReservation") -> None:
        """Grant a reservation, or queue it; if the queue is full, reject its last reservation."""
        self._waiting.append(reservation)
        self.grant_waiting()
        if len(self._waiting) > MAX_WAITING_FRAMES:
            self._waiting_in_order()[-1].reject(f"more than {MAX_WAITING_FRAMES} frames wait for memory")

    def withdraw(self, reservation: "FrameReservation") -> None:
        """Remove a waiting reservation, or free the bytes of a granted one; then grant others."""
        if reservation in self._waiting:
            self._waiting.remove(reservation)
        else:
            self.used_bytes -= reservation.size_bytes
        self.grant_waiting()

    def grant_waiting(self) -> None:
        """Grant reservations in their order until one does not fit; smaller frames do not overtake it.

        The callback of a reservation must not release it: that would change the queue while it is served.
        """
        for reservation in self._waiting_in_order():
            limit_bytes = self.limit_bytes // 2 if reservation.account.is_distrusted else self.limit_bytes
            if self.used_bytes + reservation.size_bytes > limit_bytes:
                return
            self._waiting.remove(reservation)
            self.used_bytes += reservation.size_bytes
            reservation.grant()

    def _waiting_in_order(self) -> "list[FrameReservation]":
        """Return the waiting reservations, those of trusted clients first; each part in the order of arrival."""
        return sorted(self._waiting, key=lambda reservation: reservation.account.is_distrusted)


class FrameAccount:
    """The account of one broker cluster's client: all its connections are trusted or distrusted together."""

    def __init__(self, budget: FrameBudget) -> None:
        self.budget = budget
        self._distrusted_until = -inf

    @property
    def is_distrusted(self) -> bool:
        """Whether this client failed to complete a frame in time within the last DISTRUST_SECONDS."""
        return asyncio.get_running_loop().time() < self._distrusted_until

    def distrust(self) -> None:
        """Let other clients go first for DISTRUST_SECONDS."""
        self._distrusted_until = asyncio.get_running_loop().time() + DISTRUST_SECONDS

    def reserve(
        self, size_bytes: int, on_granted: Callable[[], None], on_rejected: Callable[[str], None]
    ) -> "FrameReservation":
        """Reserve memory for a frame: calls `on_granted` when it is available, or `on_rejected` with the reason."""
        reservation = FrameReservation(self, size_bytes, on_granted, on_rejected)
        self.budget.enqueue(reservation)
        return reservation


class FrameReservation:
    """The memory that one frame holds or waits for; it is rejected if either takes too long."""

    def __init__(
        self, account: FrameAccount, size_bytes: int, on_granted: Callable[[], None], on_rejected: Callable[[str], None]
    ) -> None:
        self.account = account
        self.size_bytes = size_bytes
        self.granted = False
        self._on_granted = on_granted
        self._on_rejected = on_rejected
        self._ended = False
        self._timer = call_after_pending_input(asyncio.get_running_loop().time() + WAIT_SECONDS, self._on_grant_timeout)

    def grant(self) -> None:
        """Grant the reservation; the frame must be complete within HOLD_SECONDS."""
        self.granted = True
        self._timer.cancel()
        self._timer = call_after_pending_input(asyncio.get_running_loop().time() + HOLD_SECONDS, self._on_frame_timeout)
        self._on_granted()

    def release(self) -> None:
        """End the reservation: free its bytes, or leave the queue."""
        if not self._ended:
            self._ended = True
            self._timer.cancel()
            self.account.budget.withdraw(self)

    def reject(self, reason: str) -> None:
        """End the reservation and call `on_rejected` with the reason."""
        if not self._ended:
            self.release()
            self._on_rejected(f"a frame of {self.size_bytes:,} bytes was dropped: {reason}")

    def _on_grant_timeout(self) -> None:
        if not self.granted:
            self.reject(f"no memory became available within {WAIT_SECONDS:g} s")

    def _on_frame_timeout(self) -> None:
        if not self._ended:
            self.account.distrust()
            self.reject(f"it did not arrive completely within {HOLD_SECONDS:g} s")
