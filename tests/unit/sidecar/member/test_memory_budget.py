"""The memory budget: which messages of a pull are admitted, which pulls wait and when they continue."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.brokers.message import MAX_PROPERTIES_BYTES, MEBIBYTE, MESSAGE_OVERHEAD_BYTES, Message
from rota.brokers.port import PullResult
from rota.model import Queue
from rota.sidecar.member.memory_budget import MemoryBudget, MemoryReservation, PullAdmission
from rota.sidecar.member.window import QueueLimits, QueueWindow
from rota.spec import Buffer

BUDGET = 100_000


class AQueue:
    """A queue with a window; a test chooses how much memory each message takes."""

    def __init__(self, limit_bytes: int = BUDGET) -> None:
        self.window = QueueWindow(next_offset=0, committed_offset=0)
        self.limits = QueueLimits(max_bytes=limit_bytes)

    def put(self, *memory_bytes: int) -> None:
        start = self.window.next_offset
        bodies = [bytes(memory - MESSAGE_OVERHEAD_BYTES) for memory in memory_bytes]
        messages = [Message(Queue("t", "b", 0), offset, body, {}) for offset, body in enumerate(bodies, start)]
        self.window.add_pull(start, PullResult(tuple(messages), start + len(messages), 0, 1000))

    def finish(self) -> None:
        """Deliver one message."""
        delivery = self.window.start_delivery(1, 0.0)
        assert delivery
        self.window.finish_message(delivery, delivery.messages[0])


class BudgetedMember:
    """Queues with a common budget."""

    def __init__(self, *limits: int, budget: float = BUDGET) -> None:
        self.queues = [AQueue(limit_bytes) for limit_bytes in limits]
        self.budget = MemoryBudget(budget, lambda: self.queues)
        self.woken: list[str] = []

    def wait(self, name: str, memory_bytes: int, queue: int = 0) -> MemoryReservation:
        return self.budget.reserve(self.queues[queue], memory_bytes, lambda: self.woken.append(name))

    def pull(self, queue: int, reservation: MemoryReservation | None = None) -> PullAdmission:
        return PullAdmission(self.budget, self.queues[queue], reservation)


def admit(admission: PullAdmission, *memory_bytes: int) -> int:
    """Return how many of these messages are admitted before the first refused one."""
    for number, memory in enumerate(memory_bytes):
        if not admission.admit(memory):
            assert admission.refused_bytes == memory
            return number
    assert admission.refused_bytes == 0
    return len(memory_bytes)


# One pull.


def test_memory_admission_keeps_messages_up_to_the_queues_limit() -> None:
    member = BudgetedMember(10_000)
    assert admit(member.pull(0), 4000, 6000, 2000) == 2


def test_memory_admission_counts_messages_in_the_window() -> None:
    member = BudgetedMember(10_000)
    member.queues[0].put(4000)
    assert admit(member.pull(0), 6000, 2000) == 1
    assert admit(member.pull(0), 6001) == 0


def test_memory_admission_of_an_empty_queue_keeps_one_message_over_the_queues_limit() -> None:
    member = BudgetedMember(10_000)
    assert admit(member.pull(0), 50_000, 2000) == 1
    member.queues[0].put(2000)
    assert admit(member.pull(0), 50_000) == 0


def test_memory_admission_keeps_messages_up_to_the_members_budget() -> None:
    member = BudgetedMember(BUDGET, BUDGET)
    member.queues[0].put(60_000)
    assert admit(member.pull(1), 20_000, 20_000, 2000) == 2


def test_memory_admission_counts_messages_of_other_pulls_until_they_are_closed() -> None:
    member = BudgetedMember(BUDGET, BUDGET)
    with member.pull(0) as open_pull:
        assert admit(open_pull, 90_000) == 1
        assert admit(member.pull(1), 20_000) == 0
    assert (member.budget.used_bytes, admit(member.pull(1), 20_000)) == (0, 1)


def test_memory_admission_of_an_empty_member_keeps_one_message_of_any_size() -> None:
    member = BudgetedMember(10_000, 10_000)
    assert admit(member.pull(0), 10 * BUDGET, 2000) == 1
    assert admit(member.pull(1), 2000) == 0


@pytest.mark.parametrize("holder", ["by a window", "by a pull"])
def test_memory_admission_of_a_member_that_holds_messages_keeps_none_over_the_budget(holder: str) -> None:
    member = BudgetedMember(10_000, 10_000)
    if holder == "by a window":
        member.queues[1].put(2000)
    else:
        member.pull(1).admit(2000)
    assert admit(member.pull(0), BUDGET - 2000 + 1) == 0
    assert admit(member.pull(0), BUDGET - 2000) == 1


def test_memory_admission_that_is_closed_counts_nothing() -> None:
    member = BudgetedMember(10_000)
    with member.pull(0) as admission:
        admission.admit(2000)
    assert admission.admit(10 * BUDGET)
    assert member.budget.used_bytes == 0


def test_memory_admission_is_closed_by_an_error() -> None:
    member = BudgetedMember(10_000)
    admission = member.pull(0)
    admission.admit(2000)
    with pytest.raises(OSError, match="gone"), admission:
        raise OSError("gone")
    assert member.budget.used_bytes == 0


def test_memory_admission_uses_the_current_limit_of_a_decompressed_body() -> None:
    member = BudgetedMember(10_000)
    admission = member.pull(0)
    assert admission.max_body_bytes == 4 * MEBIBYTE
    member.queues[0].limits = QueueLimits(max_body_bytes=7)
    assert admission.max_body_bytes == 7


# Waiting.


def test_memory_budget_reserves_free_memory_at_once() -> None:
    member = BudgetedMember(BUDGET)
    assert member.wait("a", BUDGET).granted
    assert member.budget.used_bytes == BUDGET


def test_memory_budget_grants_freed_memory_in_order_of_waiting() -> None:
    member = BudgetedMember(BUDGET, BUDGET)
    member.queues[0].put(60_000, 30_000)
    waiting = [member.wait("large", 50_000), member.wait("small", 20_000), member.wait("next", 60_000)]
    assert [reservation.granted for reservation in waiting] == [False] * 3  # the small one waits behind the large one
    member.queues[0].finish()
    member.budget.grant_waiting()
    assert (member.woken, [reservation.granted for reservation in waiting]) == (["large", "small"], [True, True, False])


def test_memory_budget_prefers_waiting_reservations_to_later_pulls() -> None:
    member = BudgetedMember(BUDGET, BUDGET)
    member.queues[0].put(60_000)
    member.wait("large", 50_000)
    assert admit(member.pull(1), 2000) == 0
    member.queues[0].finish()
    member.budget.grant_waiting()
    assert admit(member.pull(1), 50_000, 2000) == 1


def test_memory_budget_grants_one_message_of_any_size_once_nothing_is_held() -> None:
    member = BudgetedMember(BUDGET, BUDGET)
    member.queues[0].put(2000)
    large, following = member.wait("large", 3 * BUDGET), member.wait("next", 2000)
    assert not large.granted
    member.queues[0].finish()
    member.budget.grant_waiting()
    assert (large.granted, following.granted) == (True, False)


def test_memory_reservation_stays_available_to_its_pull_while_others_wait() -> None:
    member = BudgetedMember(BUDGET, BUDGET)
    member.queues[1].put(50_000)
    reservation = member.wait("a", 50_000)
    member.wait("b", 90_000)
    with member.pull(0, reservation) as admission:
        assert admit(admission, 50_000, 2000) == 1
        member.queues[0].put(50_000)
    assert member.budget.used_bytes == BUDGET


def test_memory_reservation_that_is_unused_goes_to_the_next_waiting_pull() -> None:
    member = BudgetedMember(BUDGET, BUDGET)
    member.queues[1].put(50_000)
    reservation = member.wait("a", 50_000)
    member.wait("b", 40_000)
    with member.pull(0, reservation):
        assert member.woken == ["a"]
    assert member.woken == ["a", "b"]


@pytest.mark.parametrize("granted", [True, False])
def test_memory_reservation_that_is_cancelled_goes_to_the_next_waiting_pull(granted: bool) -> None:  # noqa: FBT001 - a case
    member = BudgetedMember(BUDGET, BUDGET)
    member.queues[0].put(60_000)
    first, second = member.wait("first", 40_000 if granted else 50_000), member.wait("second", 30_000)
    assert (first.granted, second.granted) == (granted, False)
    member.budget.cancel(first)
    assert second.granted
    assert member.budget.used_bytes == 90_000
    member.budget.cancel(first)  # a second time changes nothing
    assert member.budget.used_bytes == 90_000


class RandomWalk:
    """Four queues that pull, wait and finish in any order."""

    def __init__(self, budget: int) -> None:
        self.member = BudgetedMember(*[5000] * 4, budget=budget)
        self.budget = budget
        self.waiting: dict[int, tuple[int, MemoryReservation]] = {}

    def pull(self, queue: int, memory_bytes: int) -> None:
        """Pull a message; a queue that waits pulls the same one again, once its memory is granted."""
        memory_bytes, reservation = self.waiting.pop(queue, (memory_bytes, None))
        if reservation and not reservation.granted:
            self.waiting[queue] = memory_bytes, reservation
            return
        with self.member.pull(queue, reservation) as admission:
            if admission.admit(memory_bytes):
                self.member.queues[queue].put(memory_bytes)
        if admission.refused_bytes and not self.member.queues[queue].window.unfinished_count:
            self.waiting[queue] = memory_bytes, self.member.wait(str(queue), memory_bytes, queue)
        assert self.member.budget.used_bytes <= max(self.budget, 30_000)

    def finish(self, queue: int) -> None:
        if self.member.queues[queue].window.unfinished_count:
            self.member.queues[queue].finish()
            self.member.budget.grant_waiting()

    def finish_all(self) -> None:
        """End deliveries until no queue waits; in each turn a queue must continue or a delivery end."""
        while self.waiting:
            granted = [queue for queue, (_, reservation) in self.waiting.items() if reservation.granted]
            assert granted or self.member.budget.used_bytes, "queues wait although no memory is held"
            for queue in granted:
                self.pull(queue, 0)
                assert queue not in self.waiting, "less was reserved than was refused"
            for queue in range(4):
                self.finish(queue)


@given(
    budget=st.integers(10_000, 60_000),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(2000, 30_000), st.booleans()), max_size=60),
)
def test_memory_budget_lets_every_queue_continue_as_long_as_deliveries_end(
    budget: int, steps: Sequence[tuple[int, int, bool]]
) -> None:
    walk = RandomWalk(budget)
    for queue, memory_bytes, ends in steps:
        if ends:
            walk.finish(queue)
        else:
            walk.pull(queue, memory_bytes)
    walk.finish_all()


# Messages beyond their queues' shares.


def a_divided_member() -> BudgetedMember:
    """Return a member of four queues with shares of 10,000; 60,000 are the common part."""
    return BudgetedMember(*[10_000] * 4)


def test_memory_beyond_the_queue_shares_is_limited_to_the_common_part() -> None:
    member = a_divided_member()
    for queue in range(2):
        with member.pull(queue) as admission:
            assert admit(admission, 40_000) == 1  # 30,000 beyond the share
            member.queues[queue].put(40_000)
    assert admit(member.pull(2), 10_001) == 0
    assert admit(member.pull(2), 10_000) == 1


def test_memory_share_of_a_queue_is_not_taken_by_messages_that_never_finish() -> None:
    member = BudgetedMember(*[10_000] * 32, budget=400_000)  # 80,000 are the common part
    waiting = []
    for queue in range(16):
        with member.pull(queue) as admission:
            if admission.admit(50_000):
                member.queues[queue].put(50_000)
        if admission.refused_bytes:
            waiting.append(member.wait("large", 50_000, queue))
    assert [reservation.granted for reservation in waiting] == [False] * 14
    for queue in range(16, 32):
        with member.pull(queue) as admission:
            assert admit(admission, 8000, 2000) == 2
            member.queues[queue].put(8000, 2000)
    assert member.budget.used_bytes == 2 * 50_000 + 16 * 10_000


def test_memory_beyond_the_queue_shares_is_granted_first_come_first_served() -> None:
    member = a_divided_member()
    member.queues[0].put(60_000)
    large, larger = member.wait("large", 20_000, 1), member.wait("larger", 60_000, 2)
    assert (large.granted, larger.granted) == (True, False)
    assert admit(member.pull(3), 10_001) == 0  # it would fit, but others wait
    small = member.wait("small", 10_001, 3)
    assert not small.granted
    with member.pull(3) as within_share:
        assert admit(within_share, 10_000) == 1
    member.queues[0].finish()
    member.budget.grant_waiting()
    assert member.woken == ["large", "larger"]
    member.budget.cancel(large)
    assert member.woken == ["large", "larger", "small"]


def test_memory_for_a_message_above_the_common_part_is_not_overtaken() -> None:
    member = a_divided_member()
    member.queues[1].put(2000)
    member.queues[0].put(30_000)
    too_large = member.wait("too large", 75_000, 2)
    assert not too_large.granted
    assert admit(member.pull(3), 2000) == 0
    member.queues[0].finish()
    member.budget.grant_waiting()
    assert too_large.granted
    assert member.budget.used_bytes == 77_000


def test_memory_for_a_message_above_the_common_part_blocks_nothing_while_that_is_in_use() -> None:
    member = a_divided_member()
    member.queues[0].put(60_000)
    member.wait("large", 40_000, 1)
    member.wait("too large", 90_000, 2)
    assert member.woken == []
    assert admit(member.pull(3), 10_000) == 1


def test_memory_share_must_wait_while_others_hold_more_than_the_shares_leave() -> None:
    member = a_divided_member()
    member.queues[0].put(95_000)  # from before its share was reduced
    assert admit(member.pull(1), 4000, 2000) == 1
    waiting = member.wait("a", 6000, 1)
    assert not waiting.granted
    member.queues[0].finish()
    member.budget.grant_waiting()
    assert waiting.granted


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(2000, 60_000), st.booleans()), max_size=60))
def test_memory_within_a_queues_share_is_granted_without_waiting(steps: Sequence[tuple[int, int, bool]]) -> None:
    member = a_divided_member()
    waiting: set[int] = set()
    for queue, memory_bytes, ends in steps:
        if ends and member.queues[queue].window.unfinished_count:
            member.queues[queue].finish()
            member.budget.grant_waiting()
        if ends or queue in waiting:
            continue
        is_within_share = member.budget.is_within_share(member.queues[queue], memory_bytes)
        with member.pull(queue) as admission:
            is_admitted = admission.admit(memory_bytes)
            if is_admitted:
                member.queues[queue].put(memory_bytes)
        assert is_admitted or not is_within_share
        if not is_admitted and not member.queues[queue].window.unfinished_count:
            waiting.add(queue)
            member.wait(str(queue), memory_bytes, queue)
        assert member.budget.used_bytes <= BUDGET


# Shares.


def test_memory_shares_leave_room_for_one_largest_message() -> None:
    budget = MemoryBudget(64 * MEBIBYTE, list)
    divided_bytes = 60 * MEBIBYTE - MESSAGE_OVERHEAD_BYTES - MAX_PROPERTIES_BYTES
    assert budget.compute_share(16, 4 * MEBIBYTE) == divided_bytes / 16
    assert budget.compute_share(0, 4 * MEBIBYTE) == divided_bytes


def test_memory_shares_divide_at_least_half_of_the_budget() -> None:
    budget = MemoryBudget(4 * MEBIBYTE, list)
    assert budget.compute_share(2, 64 * MEBIBYTE) == MEBIBYTE


def test_memory_shares_are_unlimited_without_a_container_limit() -> None:
    assert MemoryBudget(float("inf"), list).compute_share(7, MEBIBYTE) == float("inf")


def test_memory_budget_is_divided_among_queues_and_topic_limits_among_those_of_a_topic() -> None:
    member = BudgetedMember(1, 1, 1, budget=64 * MEBIBYTE)
    names = [Queue("orders", "b", 0), Queue("orders", "b", 1), Queue("bills", "b", 0)]
    buffer = Buffer(messages_per_topic=100, mebibytes_per_message=2)
    member.budget.set_limits(buffer, dict(zip(names, member.queues, strict=True)))
    share_bytes = int(member.budget.compute_share(3, 2 * MEBIBYTE))
    assert [queue.limits for queue in member.queues] == [
        QueueLimits(messages, share_bytes, max_body_bytes=2 * MEBIBYTE) for messages in (50, 50, 100)
    ]
