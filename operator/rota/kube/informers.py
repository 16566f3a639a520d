"""Informers for pods, assignments and Deployments, and kopf's watches of groups and policies.

kopf decodes whole objects, and fails if one is nested too deeply. Then, and in namespaces that kopf cannot watch, the
operator's own informers watch groups and policies (docs/decisions/13-kopf-and-informers.md).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from rota.kube.client import kopf_watch
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.informer import Informer, without_forbidden_namespaces
from rota.kube.client.login.session import Login
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, CustomResource, Deployment, Pod
from rota.kube.client.paths import GROUPS, POLICIES
from rota.kube.reconcile.event_handlers import EventHandlers

RESYNC_SECONDS = 60.0  # between two lists of groups and policies that kopf watches, in case kopf lost an event
SYNC_CHECK_SECONDS = 0.02  # between two checks whether the first lists have arrived
RELIST_RETRY_SECONDS = 2.0  # after a failed list
NESTED_TOO_DEEPLY = -1  # result of `run_kopf` if kopf cannot decode an object; the operator starts again without kopf

_GROUP_SELECTOR = {"labelSelector": GROUP_LABEL}

_log = logging.getLogger(__name__)


def object_informers(
    api: Api, events: EventHandlers, namespaces: Sequence[str], *, with_deployments: bool = True
) -> list[Informer[Any]]:
    """Return informers for the groups' assignments, Deployments and pods, selected by the group label."""
    informers: list[Informer[Any]] = []
    for namespace in namespaces or [""]:  # "": all namespaces
        informers.append(Informer(api, "configmaps", namespace, ConfigMap, events.assignments, params=_GROUP_SELECTOR))
        if with_deployments:
            informers.append(
                Informer(api, "deployments", namespace, Deployment, events.deployments, params=_GROUP_SELECTOR)
            )
        informers.append(Informer(api, "pods", namespace, Pod, events.pods, params=_GROUP_SELECTOR))
    return informers


def custom_resource_informers(api: Api, events: EventHandlers, namespaces: Sequence[str]) -> list[Informer[Any]]:
    """Return informers for policies and groups, policies first.

    Where kopf watches, these informers only list, since kopf misses deletions while its watch is interrupted. The
    handlers' method `expected` returns the objects that the operator knows: one that a list lacks was deleted.
    """
    informers: list[Informer[Any]] = []
    for namespace in namespaces or [""]:
        informers.append(Informer(api, POLICIES, namespace, CustomResource, events.policies))
        informers.append(Informer(api, GROUPS, namespace, CustomResource, events.groups))
    return informers


async def wait_for_kopf_namespaces(informers: Sequence[Informer[Any]], *, has_kopf: bool) -> list[str]:
    """Await the first lists of all permitted namespaces; return the namespaces that kopf shall watch.

    These are the namespaces in which the operator may list every kind, since kopf gives up on a kind that it may not
    list. Forbidden namespaces are skipped, and not waited for; at least one namespace must be permitted. Without
    `has_kopf` the result is empty: the operator's own informers watch groups and policies everywhere.
    """
    while True:
        fully_listed = {informer.namespace for informer in informers}
        for informer in informers:
            if informer.is_forbidden or not informer.listed.is_set():
                fully_listed.discard(informer.namespace)
        if fully_listed and all(informer.listed.is_set() for informer in without_forbidden_namespaces(informers)):
            return sorted(fully_listed) if has_kopf else []
        await asyncio.sleep(SYNC_CHECK_SECONDS)


async def watch_custom_resources(
    builtin_informers: Sequence[Informer[Any]],
    custom_informers: Sequence[Informer[Any]],
    kopf_namespaces: "asyncio.Future[list[str]]",
) -> None:
    """List policies and groups of a namespace, and keep them current, even if the namespace can be read only later.

    The informers are those of one namespace: `object_informers` and `custom_resource_informers`. If kopf watches the
    namespace, list it again every minute, in case kopf lost an event; otherwise run the informers. Groups are listed
    last: a group that is seen before its pods and its policy would be planned without them.
    """
    namespace = custom_informers[0].namespace
    for informer in builtin_informers:
        await informer.listed.wait()
    for informer in custom_informers:
        while not await _try_relist(informer):  # noqa: ASYNC110 - the API server may not serve it yet
            await asyncio.sleep(RELIST_RETRY_SECONDS)
    # The tasks of all namespaces await this future: shield it, so that cancelling one task does not cancel the future.
    if namespace in await asyncio.shield(kopf_namespaces):
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for informer in custom_informers:
                await _try_relist(informer)
    await asyncio.gather(*(informer.run() for informer in custom_informers))


async def _try_relist(informer: Informer[Any]) -> bool:
    try:
        await informer.relist()
    except (ApiError, NoResponseError) as error:
        _log.warning("Listing %s failed: %s", informer.path, error)
        return False
    return True


async def run_kopf(
    login: Login,
    events: EventHandlers,
    namespaces: Sequence[str],
    *,
    stop: asyncio.Event,
    on_started: Callable[[], object] = lambda: None,
) -> int:
    """Run kopf's watches of groups and policies until they end; return the exit code, or NESTED_TOO_DEEPLY.

    They end by an error, or when the operator cancels this task. Then `stop` is set, so that the operator ends, too.
    `on_started` is called once kopf has installed its own signal handlers.
    """
    registry = kopf_watch.build_registry(
        login,
        (events.groups.on_upsert, events.groups.on_delete),
        (events.policies.on_upsert, events.policies.on_delete),
    )
    try:
        tasks = await kopf.spawn_tasks(
            registry=registry,
            identity="rota",  # unused without peering; kopf's default fails for a user without a name
            settings=kopf_watch.build_settings(),
            standalone=True,
            clusterwide="" in namespaces,
            namespaces=list(filter(None, namespaces)),
        )
        on_started()
        await kopf_watch.run_tasks(tasks)
    except RecursionError:  # from the JSON decoder that kopf uses: an object is nested too deeply
        return NESTED_TOO_DEEPLY
    except Exception as error:  # noqa: BLE001 - kopf's types are private; a kind was deleted, or is forbidden
        _log.error("Watching ConsumerGroups and RebalancePolicies failed, so the operator exits: %s", error)
        return 1
    else:
        return 0
    finally:
        stop.set()
