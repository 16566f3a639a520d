"""The state of one group; objects and reports may arrive in any order."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from rota.documents import Assignment, Share, encode_assignment
from rota.kube.client.objects import ConfigMap, CustomResource, Metadata, OwnerReference, Pod
from rota.kube.state import pod_state
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.model import Finding, Holder, Queue, Reason
from rota.reports import Report, decode_report

BODY = CustomResource(Metadata("orders", uid="1", namespace="shop"))


def texts_of(document: Assignment) -> dict[str, str]:
    return {name: text for name, text in encode_assignment(document).items() if isinstance(text, str)}


DOCUMENT = Assignment(group="shop/orders", generation=7, issued_at="2026-11-21T08:00:00.000Z")
STORED = ConfigMap(
    Metadata(
        "orders-rota",
        namespace="shop",
        resource_version="42",
        labels={"rota.dev/group": "orders"},
        owner_references=[OwnerReference("1", controller=True)],
    ),
    data=texts_of(DOCUMENT),
)


def test_assignment_seen_before_its_group_is_adopted_when_the_group_appears() -> None:
    group = Group("shop", "orders")
    group.set_assignment(STORED)
    assert group.stored_assignment.resource_version == "", "its owner is unknown before the group"
    group.set_spec(BODY, None)
    assert not group.was_observed
    assert group.stored_assignment.is_writable
    assert group.stored_assignment.document is not None
    assert group.stored_assignment.document.generation == 7


def with_generation(generation: int, resource_version: str) -> ConfigMap:
    document = replace(DOCUMENT, generation=generation)
    metadata = msgspec.structs.replace(STORED.metadata, resource_version=resource_version)
    return msgspec.structs.replace(STORED, metadata=metadata, data=texts_of(document))


def test_generation_that_was_highest_is_remembered_until_the_group_is_recreated() -> None:
    """An old copy that was restored has a lower one; a standby, too, sees both."""
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.set_assignment(with_generation(8, "43"))
    group.set_assignment(with_generation(7, "44"))
    snapshot = group.snapshot(0.0, BrokerState(), {})
    assert snapshot.document is not None
    assert (snapshot.document.generation, snapshot.highest_stored_generation) == (7, 8)
    group.set_assignment(None)
    assert group.snapshot(0.0, BrokerState(), {}).highest_stored_generation == 8
    group.set_spec(CustomResource(Metadata("orders", uid="2", namespace="shop")), None)
    assert group.snapshot(0.0, BrokerState(), {}).highest_stored_generation == 0


def test_assignment_of_another_client_requires_another_observation() -> None:
    """It may be an old copy, which only reports show that were read after it."""
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.was_observed = True
    resets = group.observation_resets
    group.set_assignment(STORED)
    assert not group.was_observed
    assert group.observation_resets == resets + 1


def test_assignment_that_this_operator_wrote_requires_no_observation() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.was_observed = True
    group.assignment.requested = DOCUMENT
    group.set_assignment(STORED)
    assert group.was_observed


def test_assignment_of_this_operator_that_another_client_had_replaced_requires_an_observation() -> None:
    """A user restores what this operator wrote: members may obey the assignment that was written in between."""
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.assignment.requested = DOCUMENT
    group.set_assignment(STORED)
    group.set_assignment(with_generation(8, "43"))
    group.was_observed = True
    group.set_assignment(with_generation(7, "44"))
    assert not group.was_observed


def test_report_of_one_process_with_a_lower_generation_is_ignored() -> None:
    """It would hide that a member obeys a later generation than the one of a restored old copy."""
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(), now=0.0)
    state = group.pods["orders-a"]
    state.record_report(a_report_of(1), 1.0, 1.0)
    assert not state.record_report(msgspec.structs.replace(a_report_of(1), generation=6), 2.0, 2.0), "a late response"
    assert group.snapshot(3.0, BrokerState(), {}).pods[0].generation == 7
    assert state.record_report(msgspec.structs.replace(a_report_of(2), generation=6), 4.0, 4.0), "another process"
    assert group.snapshot(5.0, BrokerState(), {}).pods[0].generation == 6


def test_assignment_written_before_leadership_changed_counts_as_another_clients() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.assignment.requested = DOCUMENT
    group.reset_observations()
    group.was_observed = True
    group.set_assignment(STORED)
    assert not group.was_observed


def test_assignment_of_a_previous_group_of_the_same_name_is_not_owned() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.set_assignment(STORED)
    group.set_spec(CustomResource(Metadata("orders", uid="2", namespace="shop")), None)
    group.set_assignment(STORED)
    assert not group.stored_assignment.is_writable


def test_assignment_deleted_before_its_group_appears_is_forgotten() -> None:
    group = Group("shop", "orders")
    group.set_assignment(STORED)
    group.set_assignment(None)
    group.set_spec(BODY, None)
    assert group.stored_assignment.resource_version == ""


def test_assignment_seen_before_a_group_of_another_uid_is_not_owned() -> None:
    group = Group("shop", "orders")
    group.set_assignment(STORED)
    group.set_spec(CustomResource(Metadata("orders", uid="2", namespace="shop")), None)
    assert not group.stored_assignment.is_writable


def test_reconcile_treats_a_group_as_at_rest_if_the_assignment_names_exactly_its_pods() -> None:
    """A new leader reconciles groups that are not at rest first."""
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    assert not group.is_at_rest
    group.set_assignment(STORED)
    assert group.is_at_rest
    group.pods.upsert(a_pod(), now=0.0)
    assert not group.is_at_rest


def test_member_that_loses_its_label_is_unready_and_tracked_until_its_pod_ends() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(), now=0.0)
    group.mark_pod_missing(a_pod())
    holder = Holder("orders-a", "a")
    assert group.pods.unwatched == {holder}
    assert not group.pods.deleted_uids
    group.pods.apply_read(holder, a_pod(label=None), now=1.0)
    assert group.pods.unwatched == {holder}  # the watch no longer reports it
    (pod,) = group.snapshot(2.0, BrokerState(), {}).pods
    assert (pod.ready, pod.ended) == (False, False)
    group.pods.apply_read(holder, None, now=3.0)
    assert (group.pods.deleted_uids, group.pods) == ({"a"}, {})


def test_membership_above_the_limit_keeps_only_names_of_pods_that_own_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_state, "MAX_MEMBERS", 1)
    owned = replace(DOCUMENT, members={"orders-c": Share("c", (Queue("orders", "broker", 0),))})
    texts = {name: text for name, text in encode_assignment(owned).items() if isinstance(text, str)}
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.set_assignment(msgspec.structs.replace(STORED, data=texts))
    for name in ("a", "b", "c"):
        group.pods.upsert(a_pod(name=name), now=0.0)
    assert ([*group.pods], group.pods.surplus) == (["orders-a", "orders-c"], {"orders-b"})
    assert problems_of(group, 1.0)[Reason.TOO_MANY_MEMBERS].startswith(
        "3 pods carry the group's label; a group may have 1 members"
    )
    group.key_problems = (Finding(Reason.WRITE_REJECTED, "The Secret is rejected"),)
    reasons = [*problems_of(group, 1.0)]
    assert reasons.index(Reason.TOO_MANY_MEMBERS) < reasons.index(Reason.WRITE_REJECTED), "the worst problem is first"
    group.mark_pod_missing(a_pod(name="b"))
    assert group.pods.surplus == set()


def test_member_that_does_not_mount_the_key_is_named_until_its_pod_ends() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    signing = a_pod(name="b")
    mounts = signing.spec.init_containers[0].volume_mounts
    mounts.append(msgspec.structs.replace(mounts[0], mount_path="/etc/rota-key"))
    group.pods.upsert(signing, now=0.0)
    assert Reason.UNSIGNED_MEMBERS not in problems_of(group, 1.0)
    group.pods.upsert(a_pod(), now=2.0)
    assert problems_of(group, 3.0)[Reason.UNSIGNED_MEMBERS].startswith(
        "1 members, such as orders-a, do not mount the group's key"
    )
    group.pods.upsert(a_pod(phase="Failed"), now=4.0)
    assert Reason.UNSIGNED_MEMBERS not in problems_of(group, 5.0)


def test_sidecar_of_another_group_excludes_the_pod_from_the_members() -> None:
    group = Group("shop", "orders")
    group.pods.upsert(a_pod(mounted="billing"), now=0.0)
    assert (group.pods.without_sidecar, group.pods) == ({"orders-a"}, {})
    group.pods.upsert(a_pod(mounted="billing", label="billing"), now=0.0)
    assert not group.pods.without_sidecar


def test_member_is_cut_off_since_another_member_reaches_the_broker() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    for name in ("a", "b"):
        group.pods.upsert(a_pod(name=name), now=0.0)

    def cut_off_after_report(name: str, at: float, *, reaches: bool) -> dict[str, Mapping[str, float]]:
        report = Report(member=f"orders-{name}", uid=name, generation=7, brokers={"x": reaches})
        group.pods[f"orders-{name}"].record_report(report, at, at)
        return {pod.uid: pod.cut_off_brokers for pod in group.snapshot(at, BrokerState(), {}).pods}

    cut_off_after_report("a", 1.0, reaches=False)
    assert cut_off_after_report("b", 2.0, reaches=False) == {"a": {"x": 0.0}, "b": {"x": 0.0}}
    assert cut_off_after_report("a", 300.0, reaches=True) == {"a": {}, "b": {"x": 0.0}}, (
        "the broker came back; b reaches it a moment later"
    )
    assert cut_off_after_report("a", 304.0, reaches=True) == {"a": {}, "b": {"x": 4.0}}
    assert cut_off_after_report("b", 305.0, reaches=True) == {"a": {}, "b": {}}
    cut_off_after_report("a", 400.0, reaches=False)
    assert cut_off_after_report("b", 410.0, reaches=True) == {"a": {"x": 10.0}, "b": {}}


def test_report_that_differs_only_in_queue_states_is_kept_and_causes_no_reconcile() -> None:
    group = Group("shop", "orders")
    group.pods.upsert(a_pod(), now=0.0)
    pod, report = group.pods["orders-a"], Report(member="orders-a", uid="a", generation=7)
    assert pod.record_report(report, 1.0, 1.0)
    full = msgspec.structs.replace(report, states={"full": 2})
    assert not pod.record_report(full, 2.0, 2.0)
    assert pod.decoded_report
    assert pod.decoded_report.report.states == {"full": 2}
    assert pod.record_report(msgspec.structs.replace(full, revision=1), 3.0, 3.0)


def test_report_that_differs_only_in_broker_notices_causes_no_reconcile() -> None:
    group = Group("shop", "orders")
    group.pods.upsert(a_pod(), now=0.0)
    pod, report = group.pods["orders-a"], Report(member="orders-a", uid="a", generation=7, consumers_changed=2)
    assert pod.record_report(report, 1.0, 1.0)
    assert not pod.take_new_notices(), "earlier changes are known from the brokers themselves"
    notified = msgspec.structs.replace(report, revision=1, consumers_changed=3)
    assert not pod.record_report(notified, 2.0, 2.0)
    assert pod.take_new_notices()
    assert not pod.take_new_notices()
    assert pod.record_report(msgspec.structs.replace(notified, revision=2, generation=8, consumers_changed=4), 3.0, 3.0)


def test_report_of_an_earlier_sidecar_has_no_notices_of_brokers() -> None:
    group = Group("shop", "orders")
    group.pods.upsert(a_pod(), now=0.0)
    pod, report = group.pods["orders-a"], decode_report(b'{"member":"orders-a","uid":"a","generation":7}')
    assert report.consumers_changed is None
    for _ in range(2):
        pod.record_report(report, 1.0, 1.0)
        assert not pod.take_new_notices()
    assert not pod.can_report_notices


def test_spec_is_parsed_again_only_when_it_or_its_policy_changes() -> None:
    group = Group("shop", "orders")
    policy = CustomResource(Metadata("steady", namespace="shop"), {"strategy": "Sticky"})
    group.set_spec(BODY, None)
    assert group.resolved_spec.problems, "it has no spec"
    spec = {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "subscriptions": [{"topic": "orders"}]}
    body = msgspec.structs.replace(BODY, spec=spec | {"policyRef": {"name": "steady"}})
    group.set_spec(body, policy)
    resolved = group.resolved_spec
    assert resolved.spec
    assert resolved.policy
    group.set_spec(msgspec.structs.replace(body, status={"lag": 7}), policy)
    assert group.resolved_spec is resolved
    group.set_spec(body, CustomResource(Metadata("steady", namespace="shop"), {"strategy": "Balanced"}))
    assert group.resolved_spec.needs_weights
    group.set_spec(body, None)
    assert [problem.reason for problem in group.resolved_spec.problems] == ["MissingPolicy"]


def test_member_has_ended_once_its_pod_failed_and_after_its_deletion() -> None:
    group, holder = Group("shop", "orders"), Holder("orders-a", "a")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(), now=0.0)
    assert not group.pods.has_ended(holder)
    assert not group.pods.has_ended(Holder("orders-a", "another"))
    group.pods.upsert(a_pod(phase="Failed"), now=1.0)
    assert group.pods.has_ended(holder)
    group.pods.mark_deleted(a_pod())
    assert group.pods.has_ended(holder)


def test_stateful_set_replacement_keeps_tracking_the_old_pod_until_it_ended() -> None:
    """A StatefulSet creates the next pod at once, even if the previous one was deleted by force."""
    group, old = Group("shop", "orders"), Holder("orders-a", "a")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(started=True), now=0.0)
    group.pods.upsert(a_pod(uid="new"), now=1.0)
    assert group.pods.unwatched == {old}
    assert not group.pods.deleted_uids
    assert group.pods["orders-a"].pod.metadata.uid == "new"
    possibly_running = group.pods.find_possibly_running(old)
    assert possibly_running
    assert possibly_running.pod.metadata.uid == "a"
    group.pods.apply_read(old, a_pod(uid="new"), now=2.0)
    assert (group.pods.unwatched, group.pods.deleted_uids, group.pods.find_possibly_running(old)) == (
        set(),
        {"a"},
        None,
    )
    assert group.pods["orders-a"].pod.metadata.uid == "new"


def test_stateful_set_replacement_of_an_ended_pod_tracks_no_old_pod() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(started=True, phase="Failed"), now=0.0)
    group.pods.upsert(a_pod(uid="new"), now=1.0)
    assert (group.pods.unwatched, group.pods.deleted_uids) == (set(), {"a"})


def test_membership_of_a_recreated_group_drops_unseen_and_replaced_pods() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(started=True), now=0.0)
    group.pods.upsert(a_pod(name="b", started=True), now=0.0)
    group.pods.upsert(a_pod(uid="new", started=True), now=1.0)
    group.mark_pod_missing(a_pod(name="b", started=True))
    group.set_spec(CustomResource(Metadata("orders", uid="2", namespace="shop")), None)
    assert (group.pods.unwatched, group.pods.replaced, [*group.pods]) == (set(), {}, ["orders-a"])


def problems_of(group: Group, now: float) -> dict[Reason, str]:
    return {problem.reason: problem.message for problem in group.snapshot(now, BrokerState(), {}).problems}


def a_pod(
    mounted: str = "orders",
    label: str | None = "orders",
    name: str = "a",
    phase: str = "Running",
    uid: str = "",
    *,
    started: bool = False,
) -> Pod:
    metadata = {"name": f"orders-{name}", "namespace": "shop", "uid": uid or name}
    sidecar = {"name": "rota-sidecar", "volumeMounts": [{"name": "documents", "mountPath": "/etc/rota"}]}
    volumes = [{"name": "documents", "configMap": {"name": f"{mounted}-rota"}}]
    labels = {} if label is None else {"rota.dev/group": label}
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}]}
    container_statuses = {"initContainerStatuses": [{"name": "rota-sidecar", "started": started}]}
    body = {"metadata": {**metadata, "labels": labels}, "spec": {"initContainers": [sidecar], "volumes": volumes}}
    return msgspec.convert({**body, "status": status | container_statuses}, Pod)


STARTED, ENDED_AT = 1764237600.4, "2025-11-27T10:00:07Z"  # ended seven seconds after the start


def a_restarted_pod(ended_at: str = ENDED_AT) -> Pod:
    """Return the pod after a process of its sidecar ended."""
    terminated = {"terminated": {"exitCode": 137, "finishedAt": ended_at}}
    pod = a_pod()
    [sidecar] = pod.status.init_container_statuses
    state = msgspec.convert(terminated, type(sidecar.last_state))
    restarted = msgspec.structs.replace(sidecar, last_state=state, restart_count=1)
    return msgspec.structs.replace(pod, status=msgspec.structs.replace(pod.status, init_container_statuses=[restarted]))


def a_report_of(incarnation: int, started: float = STARTED) -> Report:
    return Report(member="orders-a", uid="a", generation=7, reads=2, incarnation=str(incarnation), started=started)


def restarts_of(group: Group, now: float) -> tuple[float | None, int, float]:
    """Return the fields of the pod's snapshot about restarts: stopped_for, restarts, serving_for."""
    (pod,) = group.snapshot(now, BrokerState(), {}).pods
    return pod.stopped_for, pod.restarts, pod.serving_for


def test_force_delete_silence_of_an_earlier_leadership_does_not_count() -> None:
    """A member that responded to another leader meanwhile would soon count as ended."""
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(), 0.0)
    state = group.pods["orders-a"]
    unchanged = replace(state)
    state.record_report(None, 5.0, 5.0, Reason.MEMBER_NOT_AUTHENTICATED)
    state.unauthenticated_since = 5.0
    group.reset_observations()
    assert state == unchanged


def test_restart_is_seen_when_the_container_of_the_reporting_process_has_finished() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(), now=0.0)
    group.pods["orders-a"].record_report(a_report_of(1), 1.0, 1.0)
    assert restarts_of(group, 5.0)[0] is None
    group.pods.upsert(a_restarted_pod(), now=6.0)
    assert restarts_of(group, 8.0)[0] == 2.0
    later = a_report_of(2, started=STARTED + 8)
    assert group.pods["orders-a"].record_report(later, 9.0, 9.0)
    assert restarts_of(group, 10.0) == (None, 1, 1.0)
    assert not group.pods["orders-a"].record_report(a_report_of(1), 11.0, 1.0), "a late response"
    assert restarts_of(group, 12.0) == (None, 1, 3.0)
    assert restarts_of(group, 9.0 + 600.0)[1] == 0, "old restarts do not count"


def test_restart_before_the_reporting_process_started_is_not_counted() -> None:
    """This holds even if the pod's status arrives late."""
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(), now=0.0)
    group.pods["orders-a"].record_report(a_report_of(2, started=STARTED + 8), 1.0, 1.0)
    group.pods.upsert(a_restarted_pod(), now=2.0)
    assert restarts_of(group, 3.0)[:2] == (None, 0)
    group.pods["orders-a"].record_report(a_report_of(2, started=0.0), 4.0, 4.0)
    assert restarts_of(group, 5.0)[0] is None, "a process that does not report its start"


def test_restart_is_not_seen_while_the_process_responds_even_with_a_wrong_clock() -> None:
    """In its own virtual machine, a sidecar's clock may be behind the clock of its node."""
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(), now=0.0)
    pod_state = group.pods["orders-a"]
    pod_state.record_report(a_report_of(2), 1.0, 1.0)
    group.pods.upsert(a_restarted_pod(), now=2.0)
    assert restarts_of(group, 3.0)[0] == 1.0
    assert pod_state.record_report(a_report_of(2), 4.0, 4.0), "a response after the end is a change"
    assert restarts_of(group, 5.0)[0] is None
    group.pods.upsert(a_restarted_pod(), now=6.0)
    assert restarts_of(group, 7.0)[0] is None, "it responded after this end was known"
    group.pods.upsert(a_restarted_pod("2025-11-27T10:00:09Z"), now=8.0)
    assert restarts_of(group, 9.0)[0] == 1.0


def test_restart_of_a_sidecar_of_an_earlier_version_is_not_counted() -> None:
    group = Group("shop", "orders")
    group.set_spec(BODY, None)
    group.pods.upsert(a_pod(), now=0.0)
    for text in ("d1f0", "7712"):
        report = msgspec.json.decode(
            b'{"member":"orders-a","uid":"a","generation":7,"incarnation":"%s"}' % text.encode(), type=Report
        )
        group.pods["orders-a"].record_report(report, 1.0, 1.0)
    (pod,) = group.snapshot(2.0, BrokerState(), {}).pods
    assert (pod.incarnation, pod.restarts, pod.stopped_for) == (0, 0, None)
