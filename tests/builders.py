"""Builds rosters, pods, documents and snapshots for tests; fields that a case does not name have defaults."""

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from rota.brokers.port import queues_of
from rota.documents import Assignment, Release, Share
from rota.model import Holder, Queue, Roster
from rota.planner import DecodedReport, PodSnapshot, QueueView, Snapshot
from rota.planner.members.member_states import MemberState
from rota.planner.situation import Situation
from rota.ranges import to_ranges
from rota.reports import Report
from rota.spec import GroupSpec, PolicySpec, parse_group, parse_policy
from rota.timestamps import format_time

TOPICS = ("orders", "payments", "%RETRY%shop")
BROKERS = ("room1@a", "room1@b", "room2@a", "plain")


def a_roster(queues: int = 8, members: int = 3, owned: dict[int, str] | None = None) -> Roster:
    """Return a roster of one topic on one broker; `owned` names present owners by queue id."""
    queues_of_topic = [Queue("orders", "broker-a", number) for number in range(queues)]
    current = {queues_of_topic[number]: name for number, name in (owned or {}).items()}
    return Roster.of(queues_of_topic, [f"m{number}" for number in range(members)], current)


@st.composite
def rosters(draw: DrawFn, *, topics: tuple[str, ...] = TOPICS, largest: int = 6) -> Roster:
    """Draw a roster of a few topics, brokers and members; present owners may be members that no longer exist."""
    places = st.tuples(st.sampled_from(topics), st.sampled_from(BROKERS), st.integers(0, largest))
    queues = draw(st.lists(places, min_size=1, max_size=4 * largest, unique=True))
    names = st.sampled_from([f"m{number}" for number in range(9)])
    members = draw(st.lists(names, min_size=1, max_size=9, unique=True))
    owners = draw(st.lists(st.one_of(st.none(), names), min_size=len(queues), max_size=len(queues)))
    current = {queue: owner for queue, owner in zip(queues, owners, strict=True) if owner}
    return Roster.of(queues, members, current)


NOW = 1_763_712_000.0  # the wall-clock time of cases that do not depend on it
GROUP = "shop/orders"
LONG = 1000.0  # seconds that exceed every grace and delay
BEGUN = {"orders": format_time(NOW - 100 * LONG)}  # the recorded start time of each topic


def a_spec(**changed: Any) -> GroupSpec:
    """Return a group's spec with one topic."""
    broker = {"rocketmq": {"nameServers": ["rmq:9876"]}}
    return parse_group({"spec": {"broker": broker, "subscriptions": [{"topic": "orders"}], **changed}})


def a_policy(**changed: Any) -> PolicySpec:
    """Return a policy, by default Sticky."""
    return parse_policy({"spec": {"strategy": "Sticky", **changed}})


def a_view(
    queues: int = 6, topic: str = "orders", stable_for: float = LONG, brokers: tuple[str, ...] = ("a",)
) -> QueueView:
    """Return the view of a topic at its brokers."""
    return QueueView(queues_of(topic, dict.fromkeys(brokers, queues)), stable_for)


def owners_of(document: Assignment) -> dict[Queue, Holder]:
    """Return the owner of each queue that the assignment gives to a member."""
    owners: dict[Queue, Holder] = {}
    for name, share in document.members.items():
        owners.update(dict.fromkeys(share.queues, Holder(name, share.uid)))
    return owners


def a_report(name: str = "m1", generation: int = 1, held: Iterable[Queue] = (), **changed: Any) -> Report:
    """Return a member's report."""
    draining = to_ranges(changed.pop("draining", ()))
    fields: dict[str, Any] = {
        "member": name,
        "uid": f"uid-{name}",
        "generation": generation,
        "held": to_ranges(held),
    } | changed
    return Report(releasing=draining, **fields)


def a_pod(name: str = "m1", report: Report | None = None, **changed: Any) -> PodSnapshot:
    """Return a pod that has long been ready and responds."""
    decoded_report = DecodedReport(report) if report else None
    fields: dict[str, Any] = {
        "uid": f"uid-{name}",
        "client_id": f"10.0.0.1@{name}",
        "ready": True,
        "stable_for": LONG,
        "age": LONG,
        "poked_for": LONG,
    } | changed
    return PodSnapshot(name=name, decoded_report=decoded_report, **fields)


def a_document(generation: int = 5, age: float = LONG, **changed: Any) -> Assignment:
    """Return the stored assignment; `members` maps names to queues, `taken` maps queues to (holder, next owner)."""
    members = {name: Share(f"uid-{name}", tuple(sorted(queues))) for name, queues in changed.pop("members", {}).items()}
    at = format_time(NOW - age)
    releasing = {
        queue: Release(Holder(holder, f"uid-{holder}"), to, generation, at)
        for queue, (holder, to) in changed.pop("taken", {}).items()
    }
    fields: dict[str, Any] = {
        "group": GROUP,
        "strategy": "Sticky",
        "members": members,
        "releasing": releasing,
        "begun": BEGUN,
    } | changed
    return Assignment(generation=generation, issued_at=at, **fields)


def a_snapshot(**changed: Any) -> Snapshot:
    """Return a snapshot of a group of one topic with six queues, by default without problems."""
    fields: dict[str, Any] = {
        "group": GROUP,
        "spec": a_spec(),
        "policy": a_policy(),
        "views": {"orders": a_view()},
        "refetched": True,
    }
    return Snapshot(**(fields | changed))


def obeying(document: Assignment, **changed: dict[str, Any]) -> tuple[PodSnapshot, ...]:
    """Return an obeying pod for each member of a document; `changed` maps names of members to other fields."""
    pods = []
    for name, share in document.members.items():
        report = a_report(name, document.generation, share.queues)
        pods.append(a_pod(name, **({"report": report} | changed.get(name, {}))))
    return tuple(pods)


def a_situation(
    *pods: PodSnapshot, document: Assignment | None = None, states: dict[str, MemberState] | None = None, **changed: Any
) -> Situation:
    """Return a situation in which every pod counts as a member, unless another state is given."""
    member_states = {pod.name: MemberState.READY for pod in pods} | (states or {})
    snapshot = a_snapshot(pods=pods, document=document, **changed)
    return Situation(snapshot, member_states, document or a_document(members={}), NOW)
