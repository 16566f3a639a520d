"""Summary and detail of groups, as the page and the command line show them."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from builders import NOW, a_document, a_view
from rota.brokers.port import OnlineConsumer
from rota.deliveries import DeliveriesPage, FailingMessage
from rota.delivery_totals import MemberDeliveries
from rota.documents import Assignment, encode_assignment
from rota.kube.brokers.lag.lag_history import QueueLag
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import ConfigMap, CustomResource, Metadata, OwnerReference, Pod
from rota.kube.http import presenters, schema
from rota.kube.state import rebalance
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.kube.telemetry.operator_metrics import OperatorMetrics
from rota.kube.telemetry.rebalances import RebalanceTracker
from rota.lag import LagState
from rota.model import Queue
from rota.planner import Plan
from rota.planner.members.member_states import MemberState
from rota.ranges import to_ranges
from rota.reports import Report
from rota.spec import Subscription as CoreSubscription
from rota.spec.consumer_settings import ConsumerSettings
from rota.spec.resolved import settings_digest

Q = [Queue("orders", "a", number) for number in range(6)]
RETRY = "%RETRY%orders"
LEADS = schema.OperatorInfo("rota-0", "0.1.0", leads=True)
READY = {"type": "Ready", "status": "True", "reason": "Settled", "message": "6 queues, 2 members"}
STATUS = {
    "members": 2,
    "queues": 6,
    "idleMembers": 1,
    "unownedQueues": 0,
    "conditions": [{**READY, "lastTransitionTime": "2026-11-21T08:00:00.000Z"}],
    "lastRebalance": {"reason": "MemberLeft", "at": "2026-11-21T08:00:00.000Z", "moved": 3, "seconds": 1.5},
}


def a_pod(name: str, ready: str = "True") -> Pod:
    """Return a pod with a sidecar, as the API server returns it."""
    sidecar = {"name": "rota-sidecar", "volumeMounts": [{"name": "documents", "mountPath": "/etc/rota"}]}
    body = {
        "metadata": {"name": name, "namespace": "shop", "uid": f"uid-{name}", "labels": {"rota.dev/group": "orders"}},
        "spec": {"initContainers": [sidecar], "volumes": [{"name": "documents", "configMap": {"name": "orders-rota"}}]},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": ready}]},
    }
    return msgspec.convert(body, Pod)


def a_group(document: Assignment | None = None, status: dict[str, Any] | None = None, **spec: Any) -> Group:
    """Return a group without pods, with its stored assignment if given."""
    group = Group("shop", "orders")
    broker = {"rocketmq": {"nameServers": ["rmq:9876"]}}
    body = {"broker": broker, "subscriptions": [{"topic": "orders"}], **spec}
    group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop"), body, status or {}), None)
    if document:
        labels = {"rota.dev/group": "orders"}
        owner_references = [OwnerReference("1", controller=True)]
        texts = {name: text for name, text in encode_assignment(document).items() if isinstance(text, str)}
        metadata = Metadata("orders-rota", "2", "shop", "42", labels=labels, owner_references=owner_references)
        group.set_assignment(ConfigMap(metadata, data=texts))
    return group


def group_facts(group: Group, lags: dict[Queue, QueueLag] | None = None, **plan_fields: Any) -> GroupFacts:
    """Return the facts of a group with one topic of six queues; other keywords are fields of its last plan."""
    broker = BrokerState({"orders": a_view(6)}, plan_fields.pop("unmanaged_consumers", ()))
    lag = GroupLag(lags or {}, dead_letters=plan_fields.pop("dead", None), sampled_at=plan_fields.pop("at", None))
    return GroupFacts(group, RebalanceTracker(last_plan=Plan(**plan_fields)), broker, lag)


def queue_lags(*lags: int | None, **changed: Any) -> dict[Queue, QueueLag]:
    lag_by_queue = {}
    for queue, lag in zip(Q, lags, strict=False):
        offsets = {"min_offset": 0, "max_offset": 9, "lag": lag}
        fields: dict[str, Any] = {**offsets, "lag_state": LagState.KEEPING_UP, "consumed_rate": 2.0}
        lag_by_queue[queue] = QueueLag(
            **fields | {"committed": None if lag is None else 9 - lag, "delay": lag} | changed
        )
    return lag_by_queue


def owned_document(**changed: Any) -> Assignment:
    return a_document(members={"m1": Q[:3], "m2": Q[3:6]}, **changed)


def test_api_group_without_a_plan_has_no_invented_figures() -> None:
    facts = group_facts(a_group())
    empty: dict[str, Any] = dict.fromkeys(("members", "queues", "idle", "unowned", "generation"), 0)
    empty |= {"ready": False, "moving": False} | dict.fromkeys(("reason", "message", "strategy"), "")
    assert presenters.present_summary(facts) == schema.GroupSummary("shop", "orders", **empty)
    detail = presenters.present_detail(LEADS, facts, {})
    assert (detail.members, detail.conditions, detail.rebalances, detail.looked_at) == ([], [], [], None)
    assert {(queue.state, queue.owner, queue.lag) for queue in detail.queues} == {("Free", None, None)}


def test_api_shows_a_group_without_topics_or_valid_spec() -> None:
    group = Group("shop", "orders")
    group.set_spec(CustomResource(Metadata("orders", uid="1", namespace="shop"), {"subscriptions": 5}), None)
    detail = presenters.present_detail(LEADS, GroupFacts(group, RebalanceTracker(), BrokerState(), GroupLag({})), {})
    assert (detail.at_broker, detail.topics, detail.queues) == ("orders", [], [])


def test_api_shows_the_published_status_before_the_first_plan() -> None:
    summary = presenters.present_summary(group_facts(a_group(owned_document(), STATUS)))
    assert (summary.ready, summary.reason, summary.message) == (True, "Settled", "6 queues, 2 members")
    assert (summary.members, summary.queues, summary.idle, summary.unowned) == (2, 6, 1, 0)
    assert (summary.generation, summary.strategy, summary.moving) == (5, "Sticky", False)
    assert summary.last_rebalance == rebalance.Rebalance("MemberLeft", "", "2026-11-21T08:00:00.000Z", 0, 3, 0, 1.5)


def test_api_shows_the_status_of_the_latest_plan() -> None:
    status = {**STATUS, "members": 7, "conditions": [{**READY, "status": "False", "reason": "NoMembers"}]}
    facts = group_facts(a_group(owned_document(), STATUS), status=status)
    facts.tracker.rebalances.appendleft(rebalance.Rebalance("MemberJoined", "m2 joined", "later", 6))
    summary = presenters.present_summary(facts)
    assert (summary.members, summary.ready, summary.reason) == (7, False, "NoMembers")
    assert summary.last_rebalance == facts.tracker.rebalances[0]
    assert presenters.present_detail(LEADS, facts, {}).rebalances == [*facts.tracker.rebalances]


@pytest.mark.parametrize(("progressing", "moving"), [("True", True), ("False", False)])
def test_api_shows_a_handover_under_way_by_plan_or_stored_assignment(progressing: str, moving: bool) -> None:  # noqa: FBT001 - a row of the table
    status = {"conditions": [{"type": "Progressing", "status": progressing, "reason": "x"}]}
    assert presenters.present_summary(group_facts(a_group(owned_document(), status))).moving == moving
    releasing = a_document(members={"m1": Q[:3]}, taken={Q[3]: ("m1", "m2")})
    assert presenters.present_summary(group_facts(a_group(releasing, status))).moving


def test_api_shows_conditions_as_in_the_status() -> None:
    minimal = {"type": "Degraded", "status": "False", "reason": "Settled"}
    detail = presenters.present_detail(
        LEADS,
        group_facts(
            a_group(None, {"conditions": [READY | {"lastTransitionTime": "2026-11-21T08:00:00.000Z"}, minimal]})
        ),
        {},
    )
    assert detail.conditions == [
        schema.ConditionInfo("Ready", "True", "Settled", "6 queues, 2 members", "2026-11-21T08:00:00.000Z"),
        schema.ConditionInfo("Degraded", "False", "Settled", "", ""),
    ]


def test_api_shows_lag_by_queue_topic_and_group() -> None:
    facts = group_facts(a_group(owned_document()), queue_lags(1, 2, 3, 0, 0, 0), dead=4, at=NOW)
    detail = presenters.present_detail(LEADS, facts, {})
    assert detail.looked_at == "2025-11-21T08:00:00.000Z"
    assert detail.topics == [schema.TopicInfo("orders", "Subscribed", 6, 6, 3)]
    assert (detail.summary.lag, detail.summary.delay, detail.summary.dead, detail.summary.retrying) == (6, 3, 4, None)
    assert detail.summary.verdicts == {"KeepingUp": 6}
    orders: dict[str, Any] = {"topic": "orders", "broker": "a", "id": 2, "kind": "Subscribed", "estimate": False}
    offsets: dict[str, Any] = {"first": 0, "last": 9, "committed": 6, "lag": 3, "delay": 3, "verdict": "KeepingUp"}
    assert detail.queues[2] == schema.QueueDetail(**orders, **offsets, state="Owned", owner="m1")


def test_api_shows_unknown_lag_as_null_without_a_verdict() -> None:
    lags = queue_lags(1, 2, 3, 0, 0) | queue_lags(None, lag_state=None)
    detail = presenters.present_detail(LEADS, group_facts(a_group(owned_document()), lags), {})
    assert [queue.lag for queue in detail.queues] == [None, 2, 3, 0, 0, None]
    assert [queue.verdict for queue in detail.queues][:2] == [None, "KeepingUp"]
    assert (detail.summary.lag, detail.summary.delay, detail.topics[0].lag) == (None, None, None)
    assert detail.summary.verdicts == {"KeepingUp": 4}


def test_api_marks_lag_with_a_filter_as_estimate() -> None:
    group = a_group(owned_document(), subscriptions=[{"topic": "orders", "expression": "paid"}])
    detail = presenters.present_detail(LEADS, group_facts(group, queue_lags(*[1] * 6)), {})
    assert detail.summary.estimate
    assert detail.topics[0].estimate
    assert {queue.estimate for queue in detail.queues} == {True}


def test_api_shows_owner_next_owner_and_forced_grant_of_each_queue() -> None:
    document = a_document(
        members={"m1": Q[:2], "m2": Q[2:3]}, taken={Q[3]: ("m1", "m2"), Q[4]: ("m2", None)}, forced={Q[2]: 4}
    )
    queues = presenters.present_detail(LEADS, group_facts(a_group(document)), {}).queues
    assert {queue.id: (queue.state, queue.owner, queue.to, queue.forced) for queue in queues} == {
        0: ("Owned", "m1", None, False),
        1: ("Owned", "m1", None, False),
        2: ("Owned", "m2", None, True),
        3: ("Releasing", "m1", "m2", False),
        4: ("Releasing", "m2", None, False),
        5: ("Free", None, None, False),
    }


def test_api_does_not_show_queues_of_unmanaged_consumers_as_free() -> None:
    group = a_group(a_document(members={"m1": Q[:3]}))
    facts = group_facts(group, unmanaged_queues=frozenset({*Q[2:5]}), unmanaged_consumers=("10.0.0.9@1",))
    assert [(queue.state, queue.owner) for queue in presenters.present_detail(LEADS, facts, {}).queues] == [
        *[("Owned", "m1")] * 3,
        *[("Foreign", None)] * 2,
        ("Free", None),
    ]


def test_api_shows_a_group_with_an_invalid_spec_by_its_last_valid_one() -> None:
    group = a_group(
        owned_document(),
        group="shop-orders",
        subscriptions=[{"topic": "orders", "expression": "paid"}, {"topic": RETRY}],
    )
    invalid = CustomResource(Metadata("orders", "7", "shop", "1"), {"subscriptions": 5}, {})
    assert group.uid == "1"
    group.set_spec(msgspec.structs.replace(invalid, metadata=Metadata("orders", uid="1", namespace="shop")), None)
    assert group.resolved_spec.spec is None
    detail = presenters.present_detail(LEADS, group_facts(group, queue_lags(*[1] * 6)), {})
    assert (detail.at_broker, detail.topics[0].estimate, detail.summary.estimate) == ("shop-orders", True, True)
    group.set_spec(CustomResource(Metadata("orders", uid="2", namespace="shop"), {"subscriptions": 5}, {}), None)
    recreated = presenters.present_detail(LEADS, group_facts(group, queue_lags(*[1] * 6)), {})
    assert (recreated.at_broker, recreated.topics[0].estimate) == ("orders", False), (
        "a recreated group does not use the spec of its predecessor"
    )


def test_api_takes_the_group_name_at_brokers_from_stored_settings() -> None:
    group = a_group()
    settings = '{"group": "shop-orders", "schema": 1}'
    group.set_spec(CustomResource(Metadata("orders", uid="2", namespace="shop"), {"subscriptions": 5}, {}), None)
    labels = {"rota.dev/group": "orders"}
    owner_references = [OwnerReference("2", controller=True)]
    metadata = Metadata("orders-rota", "3", "shop", "43", labels=labels, owner_references=owner_references)
    for text, group_name in (("{}", "orders"), (settings, "shop-orders")):
        metadata = msgspec.structs.replace(metadata, resource_version=f"{int(metadata.resource_version) + 1}")
        group.set_assignment(ConfigMap(metadata, data={"group.json": text}))
        assert presenters.present_detail(LEADS, group_facts(group), {}).at_broker == group_name


def test_api_shows_retry_topics_of_other_groups_as_subscribed() -> None:
    retry_queue = Queue("%RETRY%others", "a", 0)
    group = a_group(a_document(members={"m1": [retry_queue]}), subscriptions=[{"topic": retry_queue.topic}])
    facts = group_facts(group)._replace(broker=BrokerState({retry_queue.topic: a_view(1, retry_queue.topic)}, ()))
    detail = presenters.present_detail(LEADS, facts, {})
    assert [queue.kind for queue in detail.queues] == [detail.topics[0].kind] == ["Subscribed"]


def test_api_shows_stored_queues_missing_at_brokers_with_their_kind() -> None:
    retried = Queue(RETRY, "a", 0)
    document = a_document(members={"m1": [*Q[:6], retried]}, taken={Queue("old", "a", 0): ("m1", None)})
    facts = group_facts(a_group(document))._replace(broker=BrokerState({"orders": None}))
    detail = presenters.present_detail(LEADS, facts, {})
    assert [(queue.topic, queue.id, queue.kind) for queue in detail.queues] == [
        (RETRY, 0, "Retry"),
        ("old", 0, "Subscribed"),
        *(("orders", number, "Subscribed") for number in range(6)),
    ]
    assert detail.topics == [schema.TopicInfo("orders", "Subscribed", 0)]


def broadcasting_group(**spec: Any) -> Group:
    document = a_document(members={"m1": (), "m2": ()}, everyone=tuple(Q[:5]), strategy="")
    group = a_group(document, messageModel="Broadcasting", **spec)
    for name in ("m1", "m2", "m3"):
        group.pods.upsert(a_pod(name), now=0.0)
    return group


def test_broadcasting_queues_belong_to_everyone_once_stored() -> None:
    detail = presenters.present_detail(LEADS, group_facts(broadcasting_group()), {})
    assert [(queue.state, queue.owner, queue.to) for queue in detail.queues] == [("Everyone", None, None)] * 5 + [
        ("Free", None, None)
    ]


def test_broadcasting_member_with_an_entry_has_every_queue_and_an_unknown_rate() -> None:
    detail = presenters.present_detail(LEADS, group_facts(broadcasting_group()), {})
    assert {member.name: (member.queues, member.rate) for member in detail.members} == {
        "m1": (5, None),
        "m2": (5, None),
        "m3": (0, 0),
    }


def test_broadcasting_group_shows_a_dash_as_strategy() -> None:
    assert presenters.present_summary(group_facts(broadcasting_group())).strategy == "-"


async def test_broadcasting_queues_are_not_counted_as_unowned_in_metrics() -> None:
    class ReadModel:
        def facts_of(self, _: tuple[str, str]) -> GroupFacts:
            return group_facts(broadcasting_group(), status={"unownedQueues": 0, "queues": 5})

        def keys(self) -> list[tuple[str, str]]:
            return [("shop", "orders")]

    text = (await OperatorMetrics(lambda: True).render(ReadModel())).decode()
    labels = '{namespace="shop",group="orders"}'
    assert f"rota_unowned_queues{labels} 0\n" in text
    assert f"rota_queue_unowned_seconds_total{labels} 0\n" in text
    assert "rota_imbalance_ratio{" not in text
    assert "rota_queue_lag{" not in text


def a_report(name: str, **fields: Any) -> Report:
    return Report(member=name, uid=f"uid-{name}", generation=5, held=to_ranges(Q[:3]), **fields)


def test_api_shows_generation_rate_and_problems_of_a_member() -> None:
    group = a_group(owned_document())
    group.pods.upsert(a_pod("m1"), now=0.0)
    group.pods["m1"].record_report(
        a_report("m1", troubles={"AppNotListening": "its app does not listen"}, states={"full": 2}), 1.0, 1.0
    )
    clients = {"10.0.0.1@m1#uid-m1": OnlineConsumer("10.0.0.1@m1#uid-m1", "10.0.0.1:5", "PYTHON", "V5_1_4")}
    facts = group_facts(group, queue_lags(*[1] * 6), member_states={"m1": MemberState.READY})
    (member,) = presenters.present_detail(LEADS, facts, clients).members
    assert member == schema.MemberInfo(
        "m1",
        "10.0.0.1@m1#uid-m1",
        "Rota",
        "Ready",
        "10.0.0.1",
        "V5_1_4",
        "PYTHON",
        queues=3,
        generation=5,
        rate=6.0,
        troubles=["its app does not listen"],
        queue_states={"full": 2},
    )


def test_api_names_failing_messages_of_a_member_and_estimates_delayed_ones() -> None:
    group = a_group(owned_document())
    for name in ("m1", "m2"):
        group.pods.upsert(a_pod(name), now=0.0)
    assert presenters.present_summary(group_facts(group)).delayed is None
    message = FailingMessage("orders", RETRY, "a", 0, 17, 4, 12.0, "5xx", 503)
    page = DeliveriesPage("process", 1.0, delayed=40, failing=[message])
    group.deliveries.record("uid-m1", "r1", MemberDeliveries.from_page(page), group.topics, 0.0)
    detail = presenters.present_detail(LEADS, group_facts(group), {})
    assert detail.summary.delayed == 40
    assert {member.name: member.failing for member in detail.members} == {
        "m1": [f"{RETRY}/a/0, offset 17 (sent to orders): failed 4 times, most recently with status 503"],
        "m2": [],
    }


def test_api_shows_unknown_generation_and_client_of_a_silent_member() -> None:
    group = a_group(owned_document())
    group.pods.upsert(a_pod("m2", "False"), now=0.0)
    group.pods.upsert(a_pod("m1"), now=0.0)
    m1, m2 = presenters.present_detail(LEADS, group_facts(group, queue_lags(1)), {}).members
    assert (m1.name, m1.state, m2.state) == ("m1", "Ready", "Joining"), "before the first plan"
    assert (m2.generation, m2.version, m2.language, m2.troubles) == (None, "", "", [])
    assert (m1.queues, m1.rate) == (3, None), "the rate of two of its queues is unknown"


def test_api_shows_no_queues_for_a_recreated_pod_of_the_same_name() -> None:
    group = a_group(a_document(members={"m1": Q[:3]}))
    pod = a_pod("m1")
    group.pods.upsert(msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, uid="new")), now=0.0)
    (member,) = presenters.present_detail(LEADS, group_facts(group), {}).members
    assert member.queues == 0


def test_api_lists_unmanaged_consumers_last_with_their_broker_data() -> None:
    group = a_group(owned_document())
    group.pods.upsert(a_pod("m1"), now=0.0)
    clients = {"10.0.0.9@1": OnlineConsumer("10.0.0.9@1", "10.0.0.9:41", "JAVA", "V4_9_4")}
    facts = group_facts(group, unmanaged_consumers=("10.0.0.9@1", "10.0.0.8@2"))
    managed, java, unknown = presenters.present_detail(LEADS, facts, clients).members
    assert (managed.origin, java.origin, unknown.origin) == ("Rota", "Foreign", "Foreign")
    assert java == schema.MemberInfo("10.0.0.9@1", "10.0.0.9@1", "Foreign", "Foreign", "10.0.0.9:41", "V4_9_4", "JAVA")
    assert unknown == schema.MemberInfo("10.0.0.8@2", "10.0.0.8@2", "Foreign", "Foreign")
    assert (java.queues, java.generation, java.rate) == (None, None, None)


def test_api_shows_the_settings_of_unmanaged_consumers_and_of_members_that_use_the_stored_ones() -> None:
    group = a_group(owned_document(), subscriptions=[{"topic": "orders", "expression": "paid"}])
    group.assignment.stored = replace(group.stored_assignment, settings=group.desired_settings)
    digests = {"m1": settings_digest(group.stored_assignment.settings), "m2": "of older settings"}
    for name, digest in digests.items():
        group.pods.upsert(a_pod(name), now=0.0)
        report = Report(member=name, uid=f"uid-{name}", generation=1, settings=digest)
        group.pods[name].record_report(report, 1.0, 1.0)
    java_settings = ConsumerSettings((CoreSubscription("orders"), CoreSubscription(RETRY)), "Clustering", "Earliest")
    facts = group_facts(group, unmanaged_consumers=("10.0.0.9@1", "10.0.0.8@2"))
    facts = facts._replace(broker=replace(facts.broker, unmanaged_settings={"10.0.0.9@1": java_settings}))
    members = presenters.present_detail(LEADS, facts, {}).members
    assert [(member.subscriptions, member.model, member.start) for member in members] == [
        ([schema.SubscriptionInfo("orders", "paid", "Tag")], "Clustering", "Latest"),
        ([], "", ""),
        ([schema.SubscriptionInfo("orders", "*", "Tag")], "Clustering", "Earliest"),
        ([], "", ""),
    ]


def test_api_lists_no_unmanaged_consumers_while_they_are_unknown() -> None:
    assert presenters.present_detail(LEADS, group_facts(a_group(), unmanaged_consumers=None), {}).members == []


def test_api_of_a_standby_operator_shows_owners_without_lag() -> None:
    standby = schema.OperatorInfo("rota-1", "0.1.0", leads=False)
    facts = GroupFacts(a_group(owned_document(), STATUS), RebalanceTracker(), BrokerState(), GroupLag({}))
    detail = presenters.present_detail(standby, facts, {})
    assert not detail.operator.leads
    assert [queue.owner for queue in detail.queues] == ["m1"] * 3 + ["m2"] * 3
    assert {queue.lag for queue in detail.queues} == {None}
    assert (detail.summary.lag, detail.summary.queues, detail.topics, detail.looked_at) == (None, 6, [], None)


def test_api_shows_the_group_name_at_brokers_from_the_spec() -> None:
    assert presenters.present_detail(LEADS, group_facts(a_group(group="shop-orders")), {}).at_broker == "shop-orders"
    assert presenters.present_detail(LEADS, group_facts(a_group()), {}).at_broker == "orders"


def test_api_detail_round_trips_through_json() -> None:
    group = broadcasting_group()
    detail = presenters.present_detail(LEADS, group_facts(group, queue_lags(1, None), at=NOW), {})
    assert msgspec.json.decode(msgspec.json.encode(detail), type=schema.GroupDetail) == detail
