"""Which measurement of what queues weigh stands: noise moves nothing."""

from rota.model import Queue
from rota.weight_smoothing import filter_noise

Q = [Queue("orders", "a", number) for number in range(3)]


def test_weight_measurement_is_kept_until_a_members_load_clearly_changes() -> None:
    before = {Q[0]: 10.0, Q[1]: 10.0, Q[2]: 20.0}
    owners = {Q[0]: "m1", Q[1]: "m1", Q[2]: "m2"}
    assert filter_noise({}, before, owners) is before
    among_its_own = {Q[0]: 19.0, Q[1]: 1.0, Q[2]: 20.0}
    assert filter_noise(before, among_its_own, owners) is before
    a_little = {Q[0]: 10.0, Q[1]: 10.0, Q[2]: 30.0}  # m1 has 20 of 50 where it had 25: noise of 0.3 * 14.1 and more
    assert filter_noise(before, a_little, owners) is not before
    a_little = {Q[0]: 10.0, Q[1]: 10.0, Q[2]: 27.0}  # m1 has 20 of 47 where it had 23.5: noise
    assert filter_noise(before, a_little, owners) is before
    twice = {queue: 2 * weight for queue, weight in before.items()}
    assert filter_noise(before, twice, owners) is before, "of everything there is more"
    another = {Q[0]: 10.0, Q[1]: 10.0}
    assert filter_noise(before, another, owners) is another
    nothing = dict.fromkeys(before, 0.0)
    assert filter_noise(nothing, nothing, owners) == nothing
    assert filter_noise(nothing, before, owners) is before


def test_weight_change_of_a_nearly_idle_queue_keeps_the_measurement() -> None:
    before = {Q[0]: 10.0, Q[1]: 10.0, Q[2]: 0.01}
    owners = {Q[0]: "m1", Q[1]: "m2", Q[2]: "m3"}
    assert filter_noise(before, {**before, Q[2]: 0.1}, owners) is before
    grown = {**before, Q[2]: 1.0}
    assert filter_noise(before, grown, owners) is grown
