"""Which annotations are written while earlier ones are on their way, by a stand-in for the API server that waits."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any, cast

import msgspec
import pytest

from rota.aio import BackgroundTasks, loop_time
from rota.kube.client.api import ApiError, NoResponseError
from rota.kube.client.objects import DELETION_COST_ANNOTATION, Pod
from rota.kube.reconcile import pod_annotator
from rota.kube.reconcile.pod_annotator import (
    BUSY_WRITES,
    SETTINGS_POKES_BURST,
    WATCH_DELAY_SECONDS,
    PodAnnotator,
    PokeLimits,
)
from rota.kube.state.group import Group
from rota.model import Poke
from rota.planner import Plan

NOT_FOUND = ApiError(404, "NotFound", "")
LATER = Plan(members_to_poll=frozenset({"a"}))  # the group is not settled: no cost is written alone


class WaitingApi:
    """Keeps each write waiting until the test answers it."""

    def __init__(self) -> None:
        self.writes: list[
            tuple[str, str]
        ] = []  # of each request: the pod, and the generation of its poke, if it has one
        self._answers: list[asyncio.Future[None]] = []

    async def merge_patch(self, path: str, body: Mapping[str, Any], _: type) -> None:
        annotations = body["metadata"]["annotations"]
        generation, *_ = annotations.get("rota.dev/generation", "").split("-")
        self.writes.append((path.rpartition("/")[2], generation))
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        await answer

    async def answer_all(self, error: Exception | None = None) -> None:
        """Answer the waiting requests, and let all tasks run until they wait."""
        for answer in self._answers:
            answer.set_exception(error) if error else answer.set_result(None)
        self._answers.clear()
        await run_tasks()


async def run_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def a_plan(**generations: int) -> Plan:
    """Return a plan of a group that is not settled, with first pokes of these pods."""
    return replace(LATER, pokes={name: Poke(generation, 1) for name, generation in generations.items()})


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
    return PodAnnotator(cast("Any", api), group, PokeLimits(), tasks)


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
    await api.answer_all()
    assert api.writes == [("a", "7"), ("a", "9")]
    await api.answer_all()
    assert annotator.take_write_count() == 2
    assert annotator.take_write_count() == 0


async def test_poke_is_not_written_again_while_the_watch_has_yet_to_report_it(
    api: WaitingApi, annotator: PodAnnotator
) -> None:
    for _ in range(2):
        annotator.annotate(a_plan(a=7))
        await run_tasks()
    await api.answer_all()
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    assert api.writes == [("a", "7")]


async def test_poke_that_somebody_removed_is_written_again(
    api: WaitingApi, annotator: PodAnnotator, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    await api.answer_all()
    written_at = loop_time()
    monkeypatch.setattr(pod_annotator, "loop_time", lambda: written_at + WATCH_DELAY_SECONDS + 1.0)
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    assert api.writes == [("a", "7"), ("a", "7")]


async def test_poke_of_a_pod_recreated_under_its_name_is_written(
    api: WaitingApi, annotator: PodAnnotator, group: Group
) -> None:
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    await api.answer_all()
    state = group.pods["a"]
    metadata = msgspec.structs.replace(state.pod.metadata, uid="another")
    group.pods.upsert(msgspec.structs.replace(state.pod, metadata=metadata), now=1.0)
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    assert api.writes == [("a", "7"), ("a", "7")]


@pytest.mark.parametrize("error", [NOT_FOUND, NoResponseError("none")], ids=["ended", "no response"])
async def test_poke_that_failed_is_written_again_for_the_next_plan(
    api: WaitingApi, annotator: PodAnnotator, error: Exception
) -> None:
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    await api.answer_all(error)
    annotator.annotate(a_plan(a=7))
    await run_tasks()
    assert api.writes == [("a", "7"), ("a", "7")]
    assert annotator.take_write_count() == 0


async def test_poke_of_a_pod_that_has_ended_is_not_written(
    api: WaitingApi, annotator: PodAnnotator, group: Group
) -> None:
    annotator.annotate(a_plan(a=7, b=7, gone=7))
    del group.pods["b"]  # before its task has run
    await run_tasks()
    assert api.writes == [("a", "7")]
    await api.answer_all()
    await asyncio.wait_for(annotator.wait_until_written(), 5)


async def test_poke_that_waits_is_not_written_once_the_operator_does_not_lead(
    api: WaitingApi, annotator: PodAnnotator
) -> None:
    for generation in (7, 8):
        annotator.annotate(a_plan(a=generation))
        await run_tasks()
    annotator.stop()
    await api.answer_all()
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
    await api.answer_all()
    assert api.writes == [("a", "7"), ("b", ""), ("a", "8")]


async def test_status_waits_until_all_pokes_are_written(api: WaitingApi, annotator: PodAnnotator) -> None:
    annotator.annotate(a_plan(a=7, b=7))
    waiting = asyncio.create_task(annotator.wait_until_written())
    await run_tasks()
    assert not waiting.done()
    await api.answer_all()
    assert waiting.done()


async def test_poke_for_settings_above_the_limit_is_postponed(api: WaitingApi, tasks: BackgroundTasks) -> None:
    names = [f"pod-{number:03}" for number in range(SETTINGS_POKES_BURST + 1)]
    annotator = PodAnnotator(cast("Any", api), a_group(*names), PokeLimits(), tasks)
    plan = replace(a_plan(**dict.fromkeys(names, 7)), settings_only_pokes=frozenset(names))
    assert annotator.annotate(plan) == 5.0
    while len(api.writes) < SETTINGS_POKES_BURST:
        await run_tasks()
        await api.answer_all()
    assert [name for name, _ in api.writes] == names[:-1]


async def test_poke_that_is_repeated_is_postponed_while_many_annotations_are_being_written(
    api: WaitingApi, tasks: BackgroundTasks
) -> None:
    limits = PokeLimits()
    busy_names = [f"pod-{number:02}" for number in range(BUSY_WRITES)]
    busy, other = (PodAnnotator(cast("Any", api), a_group(*names), limits, tasks) for names in (busy_names, "ab"))
    assert busy.annotate(a_plan(**dict.fromkeys(busy_names, 7))) == inf
    await run_tasks()
    api.writes.clear()
    plan = replace(LATER, pokes={"a": Poke(7, 2), "b": Poke(7, 1)})
    assert other.annotate(plan) == 1.0
    await run_tasks()
    assert api.writes == [("b", "7")]
    waiting = asyncio.create_task(other.wait_while_busy())
    await run_tasks()
    assert not waiting.done()
    while busy._running:
        await api.answer_all()
    assert waiting.done()
    await other.wait_while_busy()
    assert other.annotate(replace(LATER, pokes={"a": Poke(7, 2)})) == inf
    await run_tasks()
    assert api.writes[-1] == ("a", "7")
