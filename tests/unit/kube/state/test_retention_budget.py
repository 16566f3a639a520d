"""The operator's memory for objects and reports that tenants make as large as possible."""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from rota.documents import PLAIN_KEY, Assignment, Share, encode_assignment
from rota.kube.client.objects import MAX_LABELS, SETTINGS_KEY, ConfigMap, CustomResource, Deployment, Metadata, Pod
from rota.kube.members.report_client import UNCOUNTED_BYTES
from rota.kube.state import retention_budget
from rota.kube.state.group import Group
from rota.kube.state.retention_budget import RetentionBudget
from rota.kube.state.stored_assignment import MAX_SETTINGS_BYTES, MAX_UNCLAIMED_BYTES, AssignmentLimits
from rota.model import Queue, Reason
from rota.planner import DecodedReport
from rota.ranges import MAX_QUEUES_PER_DOCUMENT, RangedQueues
from rota.reports import FullReport

BODY = CustomResource(Metadata("orders", uid="1", namespace="shop"))


def bytes_added(call: Callable[[], object]) -> int:
    """Return the memory that the result of a call takes, in bytes."""
    tracemalloc.start()
    try:
        result = call()
        current, _ = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return current


def test_memory_of_a_short_report_that_names_many_queues_is_small() -> None:
    report = FullReport(
        member="a", uid="1", generation=1, held={"orders": {"a": "0-65535"}}, releasing={"orders": {"b": "0-65535"}}
    )

    def parse() -> DecodedReport:
        decoded_report = DecodedReport(report)
        assert Queue("orders", "a", 65_535) in decoded_report.held_queues
        assert len(decoded_report.active_queues) == MAX_QUEUES_PER_DOCUMENT
        return decoded_report

    assert bytes_added(parse) < 64 * 1024


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        (["0-3,7"], [0, 1, 2, 3, 7]),
        (["7,0-3"], [0, 1, 2, 3, 7]),
        (["0-3", "2-5"], [0, 1, 2, 3, 4, 5]),
        (["4-5", "0-3", "9"], [0, 1, 2, 3, 4, 5, 9]),
    ],
)
def test_report_ranges_behave_like_the_set_of_their_queues(ranges: list[str], expected: list[int]) -> None:
    ranged_queues = RangedQueues(*({"orders": {"a": ids}} for ids in ranges))
    queues = frozenset(Queue("orders", "a", number) for number in expected)
    assert queues == frozenset(ranged_queues)
    assert not ranged_queues ^ queues
    assert hash(ranged_queues) == hash(queues)
    assert sorted(ranged_queues) == sorted(queues)
    assert ranged_queues - {Queue("orders", "a", 0)} == queues - {Queue("orders", "a", 0)}
    assert queues - ranged_queues == frozenset()
    foreign = [Queue("orders", "a", 6), Queue("orders", "b", 0), Queue("bills", "a", 0), "orders/a/0"]
    assert [queue for queue in foreign if queue in ranged_queues] == []
    assert not RangedQueues({})


def decode_ten(text: bytes, kind: type[Any]) -> list[Any]:
    """Decode a text ten times, so that the decoder's own caches count little."""
    return [msgspec.json.decode(text, type=kind) for _ in range(10)]


def test_memory_of_pods_configmaps_and_deployments_does_not_keep_unused_fields() -> None:
    large = {
        "name": "a",
        "labels": {f"label-{number}": "a" * 60 for number in range(10_000)} | {"rota.dev/group": "orders"},
        "annotations": {"large": "a" * 200_000, "rota.dev/generation": "7-1"},
        "ownerReferences": [{"uid": str(number)} for number in range(10_000)] + [{"uid": "1", "controller": True}],
    }
    sidecar = {
        "name": "rota-sidecar",
        "volumeMounts": [{"name": f"v{number}", "mountPath": f"/v{number}"} for number in range(10_000)]
        + [{"name": "record", "mountPath": "/etc/rota"}],
        "ports": [{"containerPort": 1, "name": f"p{number}"} for number in range(10_000)]
        + [{"containerPort": 9913, "name": "rota-control"}],
    }
    volumes = [{"name": f"v{number}", "configMap": {"name": "other"}} for number in range(10_000)]
    volumes += [{"name": "record", "configMap": {"name": "orders-rota"}}]
    app = {**sidecar, "name": "app"}
    objects: dict[type[Any], Any] = {
        Pod: {"metadata": large, "spec": {"containers": [app], "initContainers": [sidecar], "volumes": volumes}},
        ConfigMap: {"metadata": large, "data": {"other": "a" * 500_000, "group.json": "{}"}},
        Deployment: {"metadata": large, "spec": {"template": "a" * 500_000}},
    }
    for kind, body in objects.items():
        text = msgspec.json.encode(body)
        assert bytes_added(partial(decode_ten, text, kind)) < 10 * UNCOUNTED_BYTES
    pod = msgspec.json.decode(msgspec.json.encode(objects[Pod]), type=Pod)
    assert (pod.labelled_group, pod.mounted_group, pod.poke.generation, pod.control_port) == (
        "orders",
        "orders",
        7,
        9913,
    )
    assert pod.metadata.is_owned_by("1")
    assert len(pod.metadata.labels) == MAX_LABELS + 1


def test_memory_of_a_deployment_does_not_keep_the_response_around_it() -> None:
    items = b",".join(b'{"metadata": {"name": "d%d"}, "spec": {"replicas": 1}}' % number for number in range(10_000))

    def first() -> Deployment:
        item = msgspec.json.decode(b"[" + items + b"]", type=list[Raw])[0]
        return msgspec.json.decode(item, type=Deployment)

    assert bytes_added(first) < UNCOUNTED_BYTES


def test_memory_of_assignments_without_a_group_is_limited() -> None:
    limits = AssignmentLimits()
    size = 1_000_000
    groups = [Group("shop", f"orders-{number}", limits) for number in range(2 * MAX_UNCLAIMED_BYTES // size)]
    for group in groups:
        metadata = Metadata(f"{group.name}-rota", namespace="shop", resource_version="1")
        group.set_assignment(ConfigMap(metadata, data={PLAIN_KEY: "a" * size}))
    for group in groups:
        group.set_spec(BODY, None)
    kept_groups = [group.name for group in groups if group.stored_assignment.resource_version]
    assert len(kept_groups) == MAX_UNCLAIMED_BYTES // 2 // size  # one namespace may have half; the rest is read later


def an_assignment(group: str, queues: int, settings: str = "") -> ConfigMap:
    held = tuple(Queue("orders", "a", number) for number in range(queues))
    document = Assignment(
        group=f"shop/{group}", generation=1, issued_at="2026-11-21T08:00:00.000Z", members={"m": Share("1", held)}
    )
    text = encode_assignment(document)[PLAIN_KEY]
    assert isinstance(text, str)
    labels = {"rota.dev/group": group}
    metadata = Metadata(f"{group}-rota", namespace="shop", resource_version="1", labels=labels)
    return ConfigMap(metadata, data={PLAIN_KEY: text, SETTINGS_KEY: settings})


def test_memory_of_assignments_is_limited_by_the_number_of_their_queues() -> None:
    limits = AssignmentLimits(max_queues=1000)
    first, second = (Group("shop", name, limits) for name in ("one", "other"))
    for group in (first, second):
        group.set_spec(BODY, None)
        group.set_assignment(an_assignment(group.name, 600))
    assert first.stored_assignment.is_writable
    assert (second.stored_assignment.is_writable, second.stored_assignment.document) == (False, None)
    (problem,) = second.stored_assignment.problems
    assert problem.reason is Reason.TOO_MANY_QUEUES
    assert problem.message.startswith("The assignment names 600 queues, and all groups of this operator may have 1,000")
    assert second.seconds_to_next_reread == 60.0
    first.mark_deleted()
    second.set_assignment(an_assignment("other", 600))
    assert second.stored_assignment.is_writable


def test_memory_of_settings_in_an_assignment_is_limited() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.set_assignment(an_assignment("orders", 1, "a" * (MAX_SETTINGS_BYTES + 1)))
    assert group.stored_assignment.document
    assert group.stored_assignment.settings == ""


def test_memory_budget_counts_objects_for_as_long_as_they_exist() -> None:
    @dataclass(eq=False)
    class Retained:
        """An object that supports weak references."""

    budget = RetentionBudget(1000, uncounted_bytes=10)
    retained = [Retained() for _ in range(5)]
    assert budget.admit("shop", retained[0], 500)
    assert not budget.admit("shop", retained[1], 11), "one namespace may have half"
    assert budget.admit("shop", retained[1], 10), "small objects are not counted"
    assert budget.admit("other", retained[2], 400)
    assert not budget.admit("third", retained[3], 101)
    del retained[0]
    assert budget.used_bytes == 400
    assert budget.admit("shop", retained[2], 500)


@pytest.mark.parametrize(("limit_mib", "budget_mib"), [(inf, 128), (4096, 128), (256, 64)])
def test_memory_budget_is_a_quarter_of_the_container_and_never_more_than_128_mib(
    monkeypatch: pytest.MonkeyPatch, limit_mib: float, budget_mib: int
) -> None:
    monkeypatch.setattr(retention_budget, "memory_limit_bytes", lambda: limit_mib * 2**20)
    budget = RetentionBudget()
    reports = {namespace: FullReport(member=namespace, uid="1", generation=1) for namespace in ("a", "b", "c")}
    half = budget_mib * 2**19
    assert not budget.admit("a", reports["a"], half + 1)
    assert budget.admit("a", reports["a"], half)
    assert budget.admit("b", reports["b"], half)
    assert not budget.admit("c", reports["c"], 1)
