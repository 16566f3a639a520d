"""What queues weigh for a policy that spreads weight: what is measured, and what the planner makes of noise in it."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from builders import NOW, a_document, a_policy, a_snapshot, a_spec, a_view, obeying
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.brokers.lag.queue_weights import measured, of_group
from rota.kube.brokers.route_watcher import interest_of
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
    group.good = a_spec()
    group.wish = ResolvedSpec(a_spec(), a_policy(strategy=strategy))
    group.record = StoredAssignment(document=a_document(members=members))
    return group


def test_weight_of_a_queue_is_its_message_rate_and_retry_queues_have_none() -> None:
    assert measured(ORDERS, FLOWS, RETRY) == FLOWS
    assert of_group(a_group(), ORDERS, GroupLag({}, flows=FLOWS)) == FLOWS


@pytest.mark.parametrize("flows", [{}, {Q[0]: 3.0}, {Q[0]: 3.0, Q[1]: None}])
def test_weight_is_unknown_while_the_rate_of_one_queue_is_unknown(flows: dict[Queue, float | None]) -> None:
    assert measured(ORDERS, flows, RETRY) is None
    assert of_group(a_group(), ORDERS, GroupLag({}, flows=flows)) is None


@pytest.mark.parametrize("views", [{}, {"orders": None}])
def test_weight_is_unknown_without_a_route(views: dict[str, None]) -> None:
    assert measured(BrokerState(views), FLOWS, RETRY) is None


def test_weight_is_measured_only_for_policies_that_use_it() -> None:
    assert of_group(a_group("Sticky"), ORDERS, GroupLag({}, flows=FLOWS)) == {}
    assert not a_group("Sticky").weighs_queues
    assert a_group().weighs_queues
    assert interest_of(a_spec(), "orders", is_weighed=True).weighed
    assert not Group("shop", "orders").weighs_queues


@pytest.mark.parametrize(("flows", "weights"), [(FLOWS, FLOWS), ({}, None)])
async def test_weight_is_passed_to_the_planner(
    flows: dict[Queue, float | None], weights: dict[Queue, float] | None
) -> None:
    nobody: Any = None
    places: Any = SimpleNamespace(of=lambda *_: ORDERS, lag=lambda _: GroupLag({}, flows=flows))
    brain = Controller(nobody, nobody, places, nobody)
    brain._reconciler._gatherer = SimpleNamespace(rooms=SimpleNamespace(of=lambda _: {}))  # type: ignore[assignment]
    assert brain.snapshot(a_group()).queue_weights == weights
    assert brain.snapshot(a_group("Sticky")).queue_weights == {}


def moves(found: Plan) -> int:
    return sum(len(line["queues"]) for line in found.records if line["kind"] == "handover") if found.document else 0


@pytest.mark.parametrize("queues", [4, 12, 30, 96])
def test_weight_noise_moves_no_queue(queues: int) -> None:
    """Each rate is another one each time, by up to a tenth; nothing is moved after all was spread once."""
    chance, group = Random(queues), a_group(m1=Q[:queues])
    view = BrokerState({"orders": a_view(queues)})
    document = a_document(members={"m1": Q[:queues], "m2": [], "m3": []}, age=1000.0)
    moved: list[int] = []
    for number in range(100):
        flows: dict[Queue, float | None] = {queue: chance.uniform(90, 110) for queue in Q[:queues]}
        group.record = StoredAssignment(document=document)
        weights = of_group(group, view, GroupLag({}, flows=flows))
        world = a_snapshot(
            policy=group.wish.policy,
            document=document,
            pods=obeying(document),
            views=view.views,
            queue_weights=weights,
        )
        found = plan(world, NOW + 60.0 * number)
        moved.append(bool(found.document))
        document = found.document or document
    assert moved[:3] == [True, True, False], "taken, given, and that was it"
    assert not any(moved[2:])
