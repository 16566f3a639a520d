"""Informers for pods, assignments and Deployments, and kopf's watches of groups and policies."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import kopf

from rota.kube.client import kopf_watch
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.informer import Informer, without_forbidden_namespaces
from rota.kube.client.login.session import Login
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, CustomResource, Deployment, Pod
from rota.kube.client.paths import GROUPS, POLICIES
from rota.kube.reconcile.controller import Controller

RESYNC_SECONDS = 60.0  # between two lists of groups and policies, in case kopf lost an event
SYNC_CHECK_SECONDS = 0.02  # between two checks whether the first lists have arrived
RELIST_RETRY_SECONDS = 2.0  # after a failed list
NESTED_TOO_DEEPLY = -1  # the exit code of `operate` when kopf cannot read a group or policy

ObjectHandler = Callable[[Any], None]
OnGroupChange = Callable[[tuple[str, str]], None]  # called with the key of a group that changed
_GROUP_SELECTOR = {"labelSelector": GROUP_LABEL}

_log = logging.getLogger(__name__)


class _Kind(NamedTuple):
    """A kind of object to list and watch, and what handles its changes."""

    resource: str
    type: type[Any]
    on_upsert: ObjectHandler
    on_delete: ObjectHandler
    expected: Callable[[], Iterable[Any]] = tuple

    def informer(self, api: Api, namespace: str, params: dict[str, str] | None = None) -> Informer[Any]:
        """Return an informer for the objects of this kind that match `params`."""
        return Informer(
            api,
            self.resource,
            namespace,
            self.type,
            on_upsert=self.on_upsert,
            on_delete=self.on_delete,
            expected=self.expected,
            params=params,
        )


def object_informers(
    api: Api,
    controller: Controller,
    namespaces: Sequence[str],
    notify: OnGroupChange = lambda _: None,
    *,
    with_deployments: bool = True,
) -> list[Informer[Any]]:
    """Return informers for the groups' assignments, Deployments and pods, selected by the group label."""
    events = controller.events
    on_assignment_upsert = _with_notification(events.on_assignment_upsert, notify)
    on_assignment_delete = _with_notification(events.on_assignment_delete, notify)
    kinds = [
        _Kind("configmaps", ConfigMap, on_assignment_upsert, on_assignment_delete, events.expected_assignments),
        _Kind(
            "deployments",
            Deployment,
            events.on_deployment_upsert,
            events.on_deployment_delete,
            events.expected_deployments,
        ),
        _Kind("pods", Pod, events.on_pod_upsert, events.on_pod_delete),
    ]
    return [
        kind.informer(api, namespace, _GROUP_SELECTOR)
        for namespace in namespaces or [""]
        for kind in kinds
        if with_deployments or kind.type is not Deployment
    ]


def custom_informers(
    api: Api, controller: Controller, namespaces: Sequence[str], notify: OnGroupChange = lambda _: None
) -> list[Informer[Any]]:
    """Return informers for policies and groups, policies first."""
    events = controller.events
    on_group_upsert, on_group_delete = _group_handlers(controller, notify)
    # Expected are also the objects that only kopf has reported: while its watch is interrupted, it misses deletions.
    kinds = [
        _Kind(POLICIES, CustomResource, events.on_policy_upsert, events.on_policy_delete, events.policies.values),
        _Kind(GROUPS, CustomResource, on_group_upsert, on_group_delete, events.expected_groups),
    ]
    return [kind.informer(api, namespace) for namespace in namespaces or [""] for kind in kinds]


def _group_handlers(controller: Controller, notify: OnGroupChange) -> tuple[ObjectHandler, ObjectHandler]:
    events = controller.events
    return _with_notification(events.on_group_upsert, notify), _with_notification(events.on_group_delete, notify)


def _with_notification(handle: ObjectHandler, notify: OnGroupChange) -> ObjectHandler:
    """Return a handler that also reports the group: on a standby, or after its deletion, no reconcile would."""

    def handle_and_notify(changed: CustomResource | ConfigMap) -> None:
        handle(changed)
        notify(changed.metadata.key if isinstance(changed, CustomResource) else changed.metadata.group_key)

    return handle_and_notify


async def watchable_namespaces(informers: Sequence[Informer[Any]], *, has_kopf: bool) -> list[str]:
    """Await the first lists; return the namespaces for kopf, which gives up on a kind that it may not list.

    Without `has_kopf`, no namespace is for kopf: the operator's own informers watch groups and policies.
    """
    while True:
        unlisted = [informer for informer in informers if informer.is_forbidden or not informer.listed.is_set()]
        listed = {informer.namespace for informer in informers} - {informer.namespace for informer in unlisted}
        if listed and all(informer.listed.is_set() for informer in without_forbidden_namespaces(informers)):
            return sorted(listed) if has_kopf else []
        await asyncio.sleep(SYNC_CHECK_SECONDS)


async def watch_custom_resources(
    objects: Sequence[Informer[Any]],
    custom_resources: Sequence[Informer[Any]],
    kopf_namespaces: "asyncio.Future[list[str]]",
) -> None:
    """List policies and groups of a namespace, and keep them current, even if it can be read only later.

    If kopf watches the namespace, list it again every minute, in case kopf lost an event; otherwise run the informers.
    Groups are listed last: without its pods and its policy, a group would look as if it had none.
    """
    for informer in objects:
        await informer.listed.wait()
    for informer in custom_resources:
        while not await _try_relist(informer):  # noqa: ASYNC110 - the API server may not serve it yet
            await asyncio.sleep(RELIST_RETRY_SECONDS)
    if custom_resources[0].namespace in await asyncio.shield(kopf_namespaces):
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for informer in custom_resources:
                await _try_relist(informer)
    await asyncio.gather(*(informer.run() for informer in custom_resources))


async def _try_relist(informer: Informer[Any]) -> bool:
    try:
        await informer.relist()
    except (ApiError, NoResponseError) as error:
        _log.warning("Listing %s failed: %s", informer.path, error)
        return False
    return True


async def run_kopf(
    login: Login,
    controller: Controller,
    namespaces: Sequence[str],
    notify: OnGroupChange,
    *,
    stop: asyncio.Event,
    on_started: Callable[[], object] = lambda: None,
) -> int:
    """Watch groups and policies until stopped; return the exit code, or NESTED_TOO_DEEPLY."""
    registry = kopf_watch.build_registry(
        login,
        _group_handlers(controller, notify),
        (controller.events.on_policy_upsert, controller.events.on_policy_delete),
    )
    try:
        tasks = await kopf.spawn_tasks(
            registry=registry,
            identity="rota",  # unused without peering; kopf's default fails for a user without a name
            settings=kopf_watch.build_settings(),
            standalone=True,
            clusterwide="" in namespaces,
            namespaces=[namespace for namespace in namespaces if namespace],
        )
        on_started()
        await kopf_watch.run_tasks(tasks)
    except RecursionError:  # from the JSON decoder that kopf uses
        return NESTED_TOO_DEEPLY
    except Exception as error:  # noqa: BLE001 - kopf's types are private; a kind was deleted, or is forbidden
        _log.error("Watching ConsumerGroups and RebalancePolicies failed, so the operator exits: %s", error)
        return 1
    else:
        return 0
    finally:
        stop.set()
