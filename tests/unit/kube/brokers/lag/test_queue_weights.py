"""Weights of queues for policies that balance them: their measurement, and noise in it."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from builders import NOW, a_document, a_policy, a_snapshot, a_spec, a_view, obeying
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.brokers.lag.queue_weights import group_weights, measure_weights
from rota.kube.brokers.topic_interest import interest_of
from rota.kube.reconcile.controller import Controller
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.state.resolved_spec import ResolvedSpec
from rota.kube.state.stored_assignment import StoredAssignment
from rota.model import Queue
from rota.planner import Plan, plan

RETRY = "%RETRY%orders"
Q = [Queue("orders", "a", number) for number in range(96)]
ORDERS = BrokerState({"orders": a_view(2), RETRY: a_view(1, RETRY)})
FLOWS: dict[Queue, float | None] = {Q[0]: 3.0, Q[1]: 0.0}


def a_group(strategy: str = "Balanced", **members: list[Queue]) -> Group:
    group = Group("shop", "orders")
    group.last_valid_spec = a_spec()
    group.resolved_spec = ResolvedSpec(a_spec(), a_policy(strategy=strategy))
    group.assignment.stored = StoredAssignment(document=a_document(members=members))
    return group


def test_weight_of_a_queue_is_its_message_rate_and_retry_queues_have_none() -> None:
    assert measure_weights(ORDERS, FLOWS, RETRY) == FLOWS
    assert group_weights(a_group(), ORDERS, GroupLag({}, incoming_rates=FLOWS)) == FLOWS


@pytest.mark.parametrize("flows", [{}, {Q[0]: 3.0}, {Q[0]: 3.0, Q[1]: None}])
def test_weight_is_unknown_while_the_rate_of_one_queue_is_unknown(flows: dict[Queue, float | None]) -> None:
    assert measure_weights(ORDERS, flows, RETRY) is None
    assert group_weights(a_group(), ORDERS, GroupLag({}, incoming_rates=flows)) is None


@pytest.mark.parametrize("views", [{}, {"orders": None}])
def test_weight_is_unknown_without_a_route(views: dict[str, None]) -> None:
    assert measure_weights(BrokerState(views), FLOWS, RETRY) is None


def test_weight_is_measured_only_for_policies_that_use_it() -> None:
    assert group_weights(a_group("Sticky"), ORDERS, GroupLag({}, incoming_rates=FLOWS)) == {}
    assert not a_group("Sticky").resolved_spec.needs_weights
    assert a_group().resolved_spec.needs_weights
    assert interest_of(a_spec(), "orders", needs_weights=True).needs_weights
    assert not Group("shop", "orders").resolved_spec.needs_weights


@pytest.mark.parametrize(("flows", "weights"), [(FLOWS, FLOWS), ({}, None)])
async def test_weight_is_passed_to_the_planner(
    flows: dict[Queue, float | None], weights: dict[Queue, float] | None
) -> None:
    unused: Any = None
    registry: Any = SimpleNamespace(state_of=lambda *_: ORDERS, lag_of=lambda _: GroupLag({}, incoming_rates=flows))
    controller = Controller(unused, unused, registry, unused)
    controller.reconciler._state_reader = SimpleNamespace(topology=SimpleNamespace(rooms_of=lambda _: {}))  # type: ignore[assignment]
    assert controller.reconciler.snapshot(a_group()).queue_weights == weights
    assert controller.reconciler.snapshot(a_group("Sticky")).queue_weights == {}


def handover_count(plan: Plan) -> int:
    return (
        sum(len(record["queues"]) for record in plan.journal_records if record["kind"] == "handover")
        if plan.document
        else 0
    )


@pytest.mark.parametrize("queues", [4, 12, 30, 96])
def test_weight_noise_moves_no_queue(queues: int) -> None:
    """Each rate varies by up to a tenth from plan to plan; after the first rebalance no queue moves."""
    random = Random(queues)
    group = a_group(m1=Q[:queues])
    view = BrokerState({"orders": a_view(queues)})
    document = a_document(members={"m1": Q[:queues], "m2": [], "m3": []}, age=1000.0)
    changed: list[int] = []
    for number in range(100):
        flows: dict[Queue, float | None] = {queue: random.uniform(90, 110) for queue in Q[:queues]}
        group.assignment.stored = StoredAssignment(document=document)
        weights = group_weights(group, view, GroupLag({}, incoming_rates=flows))
        snapshot = a_snapshot(
            policy=group.resolved_spec.policy,
            document=document,
            pods=obeying(document),
            views=view.views,
            queue_weights=weights,
        )
        new_plan = plan(snapshot, NOW + 60.0 * number)
        changed.append(bool(new_plan.document))
        document = new_plan.document or document
    assert changed[:3] == [True, True, False], "revoked, granted, and no further change"
    assert not any(changed[2:])
