"""Informers for pods, assignments and Deployments, and kopf's watches of groups and policies."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import kopf

from rota.kube.client import kopf_watch
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.informer import Informer, without_refused_namespaces
from rota.kube.client.login.session import Login
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, Custom, Deployment, Pod
from rota.kube.client.paths import GROUPS, POLICIES
from rota.kube.reconcile.controller import Controller

RESYNC_SECONDS = 60.0
NESTED_TOO_DEEPLY = -1  # what `operate` returns when kopf cannot read a group or policy
Told = Callable[[Any], None]
News = Callable[[tuple[str, str]], None]  # called with the key of a group that changed
LOOK_AGAIN_SECONDS = 0.02  # interval of checks whether the first lists have arrived
LIST_AGAIN_SECONDS = 2.0  # pause after a failed list
_LABELLED = {"labelSelector": GROUP_LABEL}

_log = logging.getLogger(__name__)


class _Kind(NamedTuple):
    """A kind of object to list and watch, and what handles its changes."""

    resource: str
    type: type[Any]
    on_upsert: Told
    on_delete: Told
    expected: Callable[[], Iterable[Any]] = tuple


def object_informers(
    api: Api, brain: Controller, namespaces: Sequence[str], notify: News = lambda _: None, *, fleets: bool = True
) -> list[Informer[Any]]:
    """Return informers for the groups' assignments, Deployments and pods, selected by the group label."""
    events = brain.events
    record_seen = _also_reporting_group(events.record_seen, notify)
    record_gone = _also_reporting_group(events.record_gone, notify)
    kinds = [
        _Kind("configmaps", ConfigMap, record_seen, record_gone, events.expected_records),
        _Kind("deployments", Deployment, events.deployment_seen, events.deployment_gone, events.expected_deployments),
        _Kind("pods", Pod, events.pod_seen, events.pod_gone),
    ]
    return [
        Informer(
            api,
            kind.resource,
            namespace,
            kind.type,
            seen=kind.on_upsert,
            gone=kind.on_delete,
            expected=kind.expected,
            params=_LABELLED,
        )
        for namespace in namespaces or [""]
        for kind in kinds
        if fleets or kind.type is not Deployment
    ]


def custom_informers(
    api: Api, brain: Controller, namespaces: Sequence[str], notify: News = lambda _: None
) -> list[Informer[Any]]:
    """Return informers for policies and groups, policies first."""
    kinds: list[tuple[str, Told, Told]] = [
        (POLICIES, brain.events.policy_seen, brain.events.policy_gone),
        (GROUPS, *_groups(brain, notify)),
    ]
    return [
        Informer(api, resource, namespace, Custom, seen=on_upsert, gone=on_delete)
        for namespace in namespaces or [""]
        for resource, on_upsert, on_delete in kinds
    ]


def _groups(brain: Controller, notify: News) -> tuple[Told, Told]:
    return _also_reporting_group(brain.events.group_seen, notify), _also_reporting_group(
        brain.events.group_gone, notify
    )


def _also_reporting_group(handle: Told, notify: News) -> Told:
    """Return a handler that also reports the group: on a standby, or after its deletion, no reconcile would."""

    def told(changed: Custom | ConfigMap) -> None:
        handle(changed)
        notify(changed.metadata.key if isinstance(changed, Custom) else changed.metadata.group)

    return told


async def watchable_namespaces(informers: Sequence[Informer[Any]], *, has_kopf: bool) -> list[str]:
    """Await the first lists; return the namespaces without a refused list, because kopf gives up on a refused kind."""
    while True:
        listed = {informer.namespace for informer in informers}
        listed -= {informer.namespace for informer in informers if informer.refused or not informer.listed.is_set()}
        if listed and all(informer.listed.is_set() for informer in without_refused_namespaces(informers)):
            return sorted(listed) if has_kopf else []
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


async def watch_own_kinds(
    objects: Sequence[Informer[Any]], customs: Sequence[Informer[Any]], kopf_namespaces: "asyncio.Future[list[str]]"
) -> None:
    """List policies and groups of a namespace, and keep them current, even if it can be read only later.

    If kopf watches the namespace, list it again every minute, in case kopf lost an event; otherwise run the informers.
    Groups are listed last: without its pods and its policy, a group would look as if it had none.
    """
    for informer in objects:
        await informer.listed.wait()
    for informer in customs:
        while not await _listed(informer):  # noqa: ASYNC110 - the API server may not serve it yet
            await asyncio.sleep(LIST_AGAIN_SECONDS)
    if customs[0].namespace in await asyncio.shield(kopf_namespaces):
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for informer in customs:
                await _listed(informer)
    await asyncio.gather(*(informer.run() for informer in customs))


async def _listed(informer: Informer[Any]) -> bool:
    try:
        await informer.relist()
    except (ApiError, NoResponseError) as error:
        _log.warning("%s cannot be listed: %s", informer.path, error)
        return False
    return True


async def run_kopf(
    login: Login,
    brain: Controller,
    namespaces: Sequence[str],
    notify: News,
    *,
    stop: asyncio.Event,
    on_started: Callable[[], object] = lambda: None,
) -> int:
    """Watch groups and policies until stopped; return the exit code, or NESTED_TOO_DEEPLY."""
    registry = kopf_watch.registry(login, _groups(brain, notify), (brain.events.policy_seen, brain.events.policy_gone))
    try:
        tasks = await kopf.spawn_tasks(
            registry=registry,
            identity="rota",  # unused without peering; kopf's default fails for a user without a name
            settings=kopf_watch.settings(),
            standalone=True,
            clusterwide="" in namespaces,
            namespaces=[namespace for namespace in namespaces if namespace],
        )
        on_started()
        await kopf_watch.run_tasks(tasks)
    except RecursionError:  # from the JSON decoder that kopf uses
        return NESTED_TOO_DEEPLY
    except Exception as error:  # noqa: BLE001 - kopf's types are private; a kind was deleted, or is forbidden
        _log.error("Groups and policies cannot be watched any more, so this operator ends: %s", error)
        return 1
    else:
        return 0
    finally:
        stop.set()
