"""Tests which annotations are written, and when, while the API server has not responded to earlier writes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any, cast

import msgspec
import pytest

from rota.aio import BackgroundTasks, loop_time
from rota.kube.client.api import ApiError, NoResponseError
from rota.kube.client.objects import DELETION_COST_ANNOTATION, Metadata, PartialObjectMetadata, Pod
from rota.kube.reconcile import pod_annotator
from rota.kube.reconcile.pod_annotator import (
    BUSY_POKES_PER_SECOND,
    BUSY_WRITES,
    MAX_CONCURRENT_ANNOTATIONS,
    MAX_WAIT_SECONDS,
    SETTINGS_POKES_BURST,
    PodAnnotator,
    PokeLimits,
)
from rota.kube.state.group import Group
from rota.model import Poke
from rota.planner import Plan

NOT_FOUND = ApiError(404, "NotFound", "")
UNSETTLED = Plan(members_to_poll=frozenset({"a"}))  # a plan after which no deletion cost is written alone


class WaitingApi:
    """An API server that responds to a write only when the test says so."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, str]] = []  # the pod of each request, and the generation of its poke, if any
        self._responses: list[asyncio.Future[None]] = []

    async def merge_patch(self, path: str, body: Mapping[str, Any], _: type) -> PartialObjectMetadata:
        annotations = body["metadata"]["annotations"]
        generation, *_ = annotations.get("rota.dev/generation", "").split("-")
        name = path.rpartition("/")[2]
        self.writes.append((name, generation))
        version = len(self.writes)
        response = asyncio.get_running_loop().create_future()
        self._responses.append(response)
        await response
        return PartialObjectMetadata(Metadata(name, resource_version=str(version)))

    async def respond(self, error: Exception | None = None, count: int | None = None) -> None:
        """Respond to the first `count` requests in progress, or to all, and let all tasks run until they wait."""
        for response in self._responses[:count]:
            response.set_exception(error) if error else response.set_result(None)
        del self._responses[:count]
        await run_tasks()


async def run_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def a_plan(**generations: int) -> Plan:
    """Return a plan of an unsettled group, with first pokes of these pods."""
    return replace(UNSETTLED, pokes={name: Poke(generation, 1) for name, generation in generations.items()})


def a_group(*names: str) -> Group:
    group = Group("shop", "orders")
    for name in names:
        metadata = {
            "name": name,
            "namespace": "shop",
            "uid": f"uid-{name}",
            "labels": {"rota.dev/group": "orders"},
            "annotations": {DELETION_COST_ANNOTATION: "9"},  # outdated: without an assignment it is 0
        }
        sidecar = {"name": "rota-sidecar", "volumeMounts": [{"name": "documents", "mountPath": "/etc/rota"}]}
        volumes = [{"name": "documents", "configMap": {"name": "orders-rota"}}]
        body = {"metadata": metadata, "spec": {"initContainers": [sidecar], "volumes": volumes}}
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        group.pods.upsert(msgspec.convert({**body, "status": status}, Pod), now=0.0)
    return group


def an_annotator(api: WaitingApi, group: Group, limits: PokeLimits, tasks: BackgroundTasks) -> PodAnnotator:
    return PodAnnotator(cast("Any", api), group, limits, tasks)


def observe(group: Group, name: str, **changed: Any) -> None:
    """Let the watch report a pod with changed metadata."""
    state = group.pods[name]
    metadata = msgspec.structs.replace(state.pod.metadata, **changed)
    group.pods.upsert(msgspec.structs.replace(state.pod, metadata=metadata), now=1.0)


@pytest.fixture
def api() -> WaitingApi:
    return WaitingApi()


@pytest.fixture
async def tasks() -> AsyncIterator[BackgroundTasks]:
    tasks = BackgroundTasks()
    yield tasks
    await tasks.close()


@pytest.fixture
def group() -> Group:
    return a_group("a", "b")


@pytest.fixture
def annotator(api: WaitingApi, group: Group, tasks: BackgroundTasks) -> PodAnnotator:
    return an_annotator(api, group, PokeLimits(), tasks)


async def test_poke_of_a_later_plan_is_written_while_another_pod_still_waits_for_an_earlier_one(
    api: WaitingApi, annotator: PodAnnotator
) -> None:
    annotator.annotate(a_plan(a=7))
    annotator.annotate(a_plan(b=8))
    await run_tasks()
    assert api.writes == [("a", "7"), ("b", "8")]


async def test_poke_of_a_pod_waits_for_the_previous_one_and_only_the_newest_is_written(
    api: WaitingApi, annotator: PodAnnotator
) -> None:
    for generation in (7, 8, 9):
        annotator.annotate(a_plan(a=generation))
        await run_tasks()
    assert api.writes == [("a", "7")]
    await api.respond()
    assert api.writes == [("a", "7"), ("a", "9")]
    await api.respond()
    assert annotator.take_write_count() == 2
    assert annotator.take_write_count() == 0


async def test_poke_is_written_again_only_after_the_watch_has_reported_its_write(
    api: WaitingApi, annotator: PodAnnotator, group: Group
) -> None:
    for _ in range(2):
        annotator.annotate(a_plan(a=7))
        await run_tasks()
    await api.respond()
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    assert api.writes == [("a", "7")]
    observe(group, "a", resource_version="9")  # a user has removed the annotation meanwhile
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    assert api.writes == [("a", "7"), ("a", "7")]


async def test_poke_of_a_pod_recreated_under_its_name_does_not_wait_for_the_write_of_the_deleted_pod(
    api: WaitingApi, annotator: PodAnnotator, group: Group
) -> None:
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    observe(group, "a", uid="another")
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    assert api.writes == [("a", "7"), ("a", "7")]


async def test_poke_that_waits_is_not_written_to_a_pod_recreated_under_its_name(
    api: WaitingApi, annotator: PodAnnotator, group: Group
) -> None:
    for generation in (7, 8):
        annotator.annotate(a_plan(a=generation))
        await run_tasks()
    observe(group, "a", uid="another")
    await api.respond(NOT_FOUND)
    assert api.writes == [("a", "7")]


@pytest.mark.parametrize("error", [NOT_FOUND, NoResponseError("none")], ids=["ended", "no response"])
async def test_poke_that_failed_is_written_again_for_the_next_plan(
    api: WaitingApi, annotator: PodAnnotator, error: Exception
) -> None:
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    await api.respond(error)
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    assert api.writes == [("a", "7"), ("a", "7")]
    assert annotator.take_write_count() == 0


async def test_poke_that_waits_is_written_after_an_unexpected_failure(
    api: WaitingApi, annotator: PodAnnotator, caplog: pytest.LogCaptureFixture
) -> None:
    for generation in (7, 8):
        annotator.annotate(a_plan(a=generation))
        await run_tasks()
    await api.respond(RuntimeError("unexpected"))
    assert api.writes == [("a", "7"), ("a", "8")]
    assert "Annotating a pod failed unexpectedly" in caplog.text


async def test_poke_of_a_pod_that_has_ended_is_not_written(
    api: WaitingApi, annotator: PodAnnotator, group: Group
) -> None:
    annotator.annotate(a_plan(a=7, b=7, gone=7))
    del group.pods["b"]  # before its task has run
    await run_tasks()
    assert api.writes == [("a", "7")]
    await api.respond()
    await asyncio.wait_for(annotator.wait_until_written(), 5)


async def test_poke_that_waits_is_not_written_once_the_operator_does_not_lead(
    api: WaitingApi, annotator: PodAnnotator
) -> None:
    for generation in (7, 8):
        annotator.annotate(a_plan(a=generation))
        await run_tasks()
    annotator.stop()
    await api.respond()
    assert api.writes == [("a", "7")]


async def test_poke_is_not_lost_to_a_deletion_cost_that_is_requested_after_it(
    api: WaitingApi, annotator: PodAnnotator
) -> None:
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    annotator.annotate(a_plan(a=8))
    annotator.annotate(Plan())  # a settled group: outdated costs of all pods
    await run_tasks()
    assert api.writes == [("a", "7"), ("b", "")]
    await api.respond()
    assert api.writes == [("a", "7"), ("b", ""), ("a", "8")]


async def test_deletion_cost_that_was_written_with_a_poke_is_not_written_again(
    api: WaitingApi, annotator: PodAnnotator
) -> None:
    annotator.annotate(a_plan(a=7, b=7))
    await run_tasks()
    for _ in range(2):
        annotator.annotate(Plan())
        await api.respond()
    assert api.writes == [("a", "7"), ("b", "7")]


async def test_status_waits_until_all_pokes_are_written(api: WaitingApi, annotator: PodAnnotator) -> None:
    annotator.annotate(a_plan(a=7, b=7))
    waiting = asyncio.create_task(annotator.wait_until_written())
    await run_tasks()
    assert not waiting.done()
    await api.respond()
    assert waiting.done()


async def test_status_waits_for_a_limited_time_if_pokes_fail_and_are_repeated_without_end(
    api: WaitingApi, annotator: PodAnnotator, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_at = loop_time()
    annotator.annotate(a_plan(a=7))
    waiting = asyncio.create_task(annotator.wait_until_written())
    for name in "bababa":  # one of both pods is always being annotated
        annotator.annotate(a_plan(**{name: 7}))
        await run_tasks()
        assert not waiting.done()
        await api.respond(NoResponseError("none"), count=1)
    monkeypatch.setattr(pod_annotator, "loop_time", lambda: started_at + 2 * MAX_WAIT_SECONDS)
    annotator.annotate(a_plan(b=7))
    await run_tasks()
    await api.respond(NoResponseError("none"), count=1)
    assert waiting.done()
    await asyncio.wait_for(annotator.wait_until_written(), 5)  # nor does the next status wait


async def test_poke_for_settings_above_the_limit_is_postponed(api: WaitingApi, tasks: BackgroundTasks) -> None:
    names = [f"pod-{number:03}" for number in range(SETTINGS_POKES_BURST + 1)]
    annotator = an_annotator(api, a_group(*names), PokeLimits(), tasks)
    plan = replace(a_plan(**dict.fromkeys(names, 7)), settings_only_pokes=frozenset(names))
    assert annotator.annotate(plan) == 5.0
    while len(api.writes) < SETTINGS_POKES_BURST:
        await run_tasks()
        await api.respond()
    assert [name for name, _ in api.writes] == names[:-1]


async def test_poke_for_settings_that_is_planned_again_before_it_is_written_uses_up_no_limit_of_other_groups(
    api: WaitingApi, tasks: BackgroundTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = PokeLimits()
    names = [f"pod-{number:03}" for number in range(SETTINGS_POKES_BURST)]
    slow = an_annotator(api, a_group(*names), limits, tasks)
    plan = replace(a_plan(**dict.fromkeys(names, 7)), settings_only_pokes=frozenset(names))
    assert slow.annotate(plan) == inf
    refilled_at = loop_time() + 10.0
    monkeypatch.setattr(pod_annotator, "loop_time", lambda: refilled_at)
    assert slow.annotate(plan) == inf
    other = an_annotator(api, a_group("a"), limits, tasks)
    assert other.annotate(replace(a_plan(a=7), settings_only_pokes=frozenset("a"))) == inf


async def test_poke_that_is_repeated_is_limited_while_many_annotations_are_being_written(
    api: WaitingApi, tasks: BackgroundTasks
) -> None:
    limits = PokeLimits()
    names = [f"pod-{number:02}" for number in range(MAX_CONCURRENT_ANNOTATIONS)]
    busy = [an_annotator(api, a_group(*names), limits, tasks) for _ in range(BUSY_WRITES // len(names) + 1)]
    for annotator in busy:
        assert annotator.annotate(a_plan(**dict.fromkeys(names, 7))) == inf
    await run_tasks()
    api.writes.clear()
    other = an_annotator(api, a_group(*names), limits, tasks)
    plan = replace(UNSETTLED, pokes={**dict.fromkeys(names, Poke(7, 2)), names[-1]: Poke(7, 1)})
    assert other.annotate(plan) == 1.0
    await run_tasks()
    assert [name for name, _ in api.writes] == [*names[:BUSY_POKES_PER_SECOND], names[-1]]
    waiting = asyncio.create_task(other.wait_while_busy())
    await run_tasks()
    assert not waiting.done()
    await api.respond()
    assert waiting.done()
    await other.wait_while_busy()
    assert other.annotate(plan) == inf
    await run_tasks()
    assert {name for name, _ in api.writes} == {*names}


async def test_poke_that_is_repeated_is_limited_by_the_waiting_pokes_of_its_own_group_only(
    api: WaitingApi, tasks: BackgroundTasks
) -> None:
    limits = PokeLimits()
    names = [f"pod-{number:02}" for number in range(2 * BUSY_WRITES)]
    busy, other = (an_annotator(api, a_group(*names), limits, tasks) for _ in range(2))
    assert busy.annotate(a_plan(**dict.fromkeys(names[:BUSY_WRITES], 7))) == inf
    await run_tasks()
    repeated = replace(UNSETTLED, pokes=dict.fromkeys(names[BUSY_WRITES:], Poke(7, 2)))
    assert (busy.annotate(repeated), other.annotate(repeated)) == (1.0, inf)


async def test_poke_whose_write_is_cancelled_does_not_count_as_being_written(api: WaitingApi, group: Group) -> None:
    limits = PokeLimits()
    for turns in range(3):  # until the task has begun to run, waits for a slot, waits for the response
        tasks = BackgroundTasks()
        an_annotator(api, group, limits, tasks).annotate(a_plan(a=7, b=7))
        for _ in range(turns):
            await asyncio.sleep(0)
        await tasks.close()
        assert limits.writes_in_progress == 0
