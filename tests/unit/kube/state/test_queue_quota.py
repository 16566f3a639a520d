"""Limits on the queues of each group and of all groups together."""

import pytest

from rota.kube.state.queue_quota import QueueQuota
from rota.model import Reason

A = ("shop", "a")
B = ("shop", "b")


def test_queue_quota_rejects_a_group_with_too_many_queues() -> None:
    quota = QueueQuota(max_per_group=10, max_total=100)
    quota.claim(A, [{"x": 6, "y": 4}])
    assert quota.rejection(A) is None
    quota.claim(A, [{"x": 6}, {"y": 4, "z": 1}])
    rejection = quota.rejection(A)
    assert rejection
    assert rejection.reason is Reason.TOO_MANY_QUEUES
    assert rejection.message == "The topics have 11 queues; a group may have 10: name fewer topics"
    quota.claim(A, [{"x": 10}])
    assert quota.rejection(A) is None


def test_queue_quota_rejects_a_group_on_too_many_brokers() -> None:
    quota = QueueQuota()
    at_limit = {f"broker-{number}": 1 for number in range(1000)}
    quota.claim(A, [at_limit, at_limit])
    assert quota.rejection(A) is None
    quota.claim(A, [at_limit, {"another": 1}])
    rejection = quota.rejection(A)
    assert rejection
    assert rejection.reason is Reason.TOO_MANY_BROKERS
    assert rejection.message == "The topics are on 1,001 brokers; a group may have 1,000: name fewer topics"


def test_queue_quota_rejects_a_group_with_too_many_pairs_of_topic_and_broker() -> None:
    quota = QueueQuota()
    at_limit = [{f"broker-{number}": 1 for number in range(200)}] * 100
    quota.claim(A, at_limit)
    assert quota.rejection(A) is None
    quota.claim(A, [*at_limit, {"broker-0": 1}])
    rejection = quota.rejection(A)
    assert rejection
    assert rejection.reason is Reason.TOO_MANY_BROKERS
    assert "20,001 pairs of topic and broker; a group may have 20,000" in rejection.message


def test_queue_quota_in_total_is_claimed_first_come_first_served() -> None:
    quota = QueueQuota(max_per_group=10, max_total=15)
    quota.claim(A, [{"x": 9}])
    quota.claim(B, [{"x": 7}])
    rejection = quota.rejection(B)
    assert rejection
    assert "all groups of this operator may have 15 together, of which 9 are in use" in rejection.message
    quota.claim(A, [{"x": 10}])
    assert quota.rejection(A) is None, "a claim that is repeated does not count twice"
    quota.release(A)
    quota.claim(B, [{"x": 7}])
    assert quota.rejection(B) is None
    quota.claim(A, [{"x": 9}])
    assert quota.rejection(A)
    quota.release(B)
    quota.release(B)
    quota.claim(A, [{"x": 9}])
    assert quota.rejection(A) is None


@pytest.mark.parametrize(
    "excessive_claim", [[{"x": 11}], [{"x": 10}, {"y": 1}], [{f"broker-{n}": 0 for n in range(1001)}]]
)
def test_queue_quota_keeps_the_claim_of_a_group_whose_next_claim_is_rejected(
    excessive_claim: list[dict[str, int]],
) -> None:
    """Otherwise a group with growing topics would lose its claim to another tenant while its members still consume."""
    quota = QueueQuota(max_per_group=10, max_total=15)
    quota.claim(A, [{"x": 9}])
    quota.claim(A, excessive_claim)
    assert quota.rejection(A)
    quota.claim(B, [{"x": 7}])
    rejection = quota.rejection(B)
    assert rejection, "9 of 15 are still taken"
    assert "of which 9 are in use" in rejection.message
    quota.claim(A, [{"x": 9}])
    assert quota.rejection(A) is None
    quota.claim(A, excessive_claim)
    quota.release(A)
    quota.claim(B, [{"x": 10}])
    assert quota.rejection(B) is None, "the claim of a deleted group is released"
