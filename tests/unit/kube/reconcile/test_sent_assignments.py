"""Tests to which members the operator sends a stored assignment."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from rota.aio import BackgroundTasks
from rota.documents import GZIP_KEY, PLAIN_KEY, Assignment, encode_assignment
from rota.kube.client.objects import (
    ASSIGNMENT_MOUNT_PATH,
    GROUP_LABEL,
    KEY_MOUNT_PATH,
    SETTINGS_KEY,
    ConfigMap,
    CustomResource,
    Metadata,
    OwnerReference,
    Pod,
)
from rota.kube.members.report_client import MAX_SENT_ASSIGNMENT_BYTES, Endpoint
from rota.kube.reconcile.assignment_writer import PendingPlan
from rota.kube.reconcile.reconciler import QueuedGroup, Reconciler
from rota.kube.state.group import Group
from rota.model import Poke
from rota.planner import Plan
from rota.spec.resolved import settings_digest

UNUSED: Any = None
SETTINGS = "{}"
PLAN = Plan(
    pokes={name: Poke(2, 1) for name in ("a", "b", "gone")},
    settings_only_pokes=frozenset({"b"}),
    config_map_data={PLAIN_KEY: "the document"},
)


class Recorder:
    """A client of the members that only records what it is asked to send."""

    def __init__(self) -> None:
        self.sent: list[tuple[Endpoint, str | bytes, str]] = []

    async def send_assignment(self, member: Endpoint, document: str | bytes, digest: str) -> None:
        self.sent.append((member, document, digest))


class Annotator:
    """An annotator that only records whether it was asked to annotate."""

    def __init__(self, *, is_busy: bool) -> None:
        self.is_busy = is_busy
        self.plans: list[Plan] = []

    def annotate(self, plan: Plan) -> float:
        self.plans.append(plan)
        return 0.0

    def take_write_count(self) -> int:
        return 0


def a_group() -> Group:
    group = Group("shop", "orders")
    group.body = CustomResource(Metadata("orders", namespace="shop", uid="uid-of-the-group"))
    for name in ("a", "b", "c"):
        metadata = {"name": name, "namespace": "shop", "uid": f"uid-{name}", "labels": {GROUP_LABEL: "orders"}}
        mounts = [{"name": "key", "mountPath": KEY_MOUNT_PATH}, {"name": "group", "mountPath": ASSIGNMENT_MOUNT_PATH}]
        sidecar = {"name": "rota-sidecar", "volumeMounts": mounts}
        volumes = [{"name": "key"}, {"name": "group", "configMap": {"name": "orders-rota"}}]
        spec = {"initContainers": [sidecar], "volumes": volumes}
        pod = {"metadata": metadata, "spec": spec, "status": {"podIP": "10.0.0.1"}}
        group.pods.upsert(msgspec.convert(pod, Pod), now=0.0)
    owner = OwnerReference("uid-of-the-group", controller=True)
    described = Metadata("orders-rota", namespace="shop", resource_version="7", owner_references=[owner])
    assignment = Assignment(group="shop/orders", generation=2, issued_at="2026-11-29T00:00:00.000Z")
    document = {name: str(text) for name, text in encode_assignment(assignment).items()}
    group.set_assignment(ConfigMap(described, {**document, SETTINGS_KEY: SETTINGS}))
    return group


@pytest.fixture
async def tasks() -> AsyncIterator[BackgroundTasks]:
    tasks = BackgroundTasks()
    yield tasks
    await tasks.close()


async def sent_after(plan: Plan, tasks: BackgroundTasks, *, is_busy: bool = False, is_leading: bool = True) -> Recorder:
    """Let a reconcile learn that the document of this plan is stored; return what it has sent."""
    recorder, annotator = Recorder(), Annotator(is_busy=is_busy)
    reconciler = Reconciler(UNUSED, UNUSED, cast("Any", recorder), tasks, lambda: 0.0)
    reconciler.is_leading = is_leading
    publisher = SimpleNamespace(take_write_counts=lambda: {"configmap": 0, "poke": 0}, publish=lambda *_, **__: None)
    watchers = SimpleNamespace(update_polls=lambda: None)
    writer = SimpleNamespace(take_confirmed=lambda: PendingPlan(plan, 0.0))
    parts: list[Any] = [watchers, publisher, writer, annotator]
    await reconciler.reconcile(QueuedGroup(a_group(), *parts))
    await asyncio.sleep(0)  # the tasks run
    assert annotator.plans == ([plan] if is_leading else []), "members are told by their volumes in any case"
    return recorder


@pytest.mark.parametrize("data", [{PLAIN_KEY: "the document"}, {GZIP_KEY: b"compressed"}], ids=["plain", "compressed"])
async def test_assignment_is_sent_to_the_members_that_do_not_obey_it(
    tasks: BackgroundTasks, data: Mapping[str, str | bytes]
) -> None:
    ((member, document, digest),) = (await sent_after(replace(PLAN, config_map_data=data), tasks)).sent
    assert (member.uid, member.address, member.is_signed) == ("uid-a", "10.0.0.1", True)
    assert document == next(iter(data.values()))
    assert digest == settings_digest(SETTINGS)


async def test_assignment_is_not_sent_without_need(tasks: BackgroundTasks) -> None:
    """A plan is remembered without its data if the response to its write was lost."""
    assert (await sent_after(replace(PLAN, config_map_data={}), tasks)).sent == []
    assert (await sent_after(replace(PLAN, pokes={}, settings_only_pokes=frozenset()), tasks)).sent == []


async def test_assignment_that_is_too_large_starts_no_tasks(
    tasks: BackgroundTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks of 10,000 members alone would block the event loop for half a second."""
    monkeypatch.setattr(tasks, "start", None)
    data = {GZIP_KEY: b"x" * (MAX_SENT_ASSIGNMENT_BYTES + 1)}
    assert (await sent_after(replace(PLAN, config_map_data=data), tasks)).sent == []


async def test_assignment_is_not_sent_while_the_operator_is_busy_or_does_not_lead(tasks: BackgroundTasks) -> None:
    assert (await sent_after(PLAN, tasks, is_busy=True)).sent == []
    assert (await sent_after(PLAN, tasks, is_leading=False)).sent == []
