"""Tests the filter for measured queue weights: noise keeps the old measurement."""

from rota.model import Queue
from rota.weight_noise import filter_noise

Q = [Queue("orders", "a", number) for number in range(3)]


def test_weight_measurement_is_kept_until_a_members_load_clearly_changes() -> None:
    old = {Q[0]: 10.0, Q[1]: 10.0, Q[2]: 20.0}
    owners = {Q[0]: "m1", Q[1]: "m1", Q[2]: "m2"}
    assert filter_noise({}, old, owners) is old
    within_m1 = {Q[0]: 19.0, Q[1]: 1.0, Q[2]: 20.0}
    assert filter_noise(old, within_m1, owners) is old
    clear_change = {Q[0]: 10.0, Q[1]: 10.0, Q[2]: 30.0}  # m1 has 20 of 50 where it had 25: noise of 0.3 * 14.1 and more
    assert filter_noise(old, clear_change, owners) is not old
    small_change = {Q[0]: 10.0, Q[1]: 10.0, Q[2]: 27.0}  # m1 has 20 of 47 where it had 23.5: noise
    assert filter_noise(old, small_change, owners) is old
    doubled = {queue: 2 * weight for queue, weight in old.items()}
    assert filter_noise(old, doubled, owners) is old, "the weight of all queues doubled"
    without_queue_2 = {Q[0]: 10.0, Q[1]: 10.0}
    assert filter_noise(old, without_queue_2, owners) is without_queue_2
    zeros = dict.fromkeys(old, 0.0)
    assert filter_noise(zeros, zeros, owners) == zeros
    assert filter_noise(zeros, old, owners) is old


def test_weight_change_of_a_nearly_idle_queue_keeps_the_measurement() -> None:
    old = {Q[0]: 10.0, Q[1]: 10.0, Q[2]: 0.01}
    owners = {Q[0]: "m1", Q[1]: "m2", Q[2]: "m3"}
    assert filter_noise(old, {**old, Q[2]: 0.1}, owners) is old
    grown = {**old, Q[2]: 1.0}
    assert filter_noise(old, grown, owners) is grown
