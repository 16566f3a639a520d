"""What the operator watches: pods, assignments and Deployments by informers, groups and policies by kopf."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from rota.kube.client import kopf_watch
from rota.kube.client.api import Api, ApiError, Unanswered
from rota.kube.client.informer import Follower, counted
from rota.kube.client.login.session import Login
from rota.kube.client.objects import GROUP_LABEL, ConfigMap, Custom, Deployment, Pod
from rota.kube.client.paths import GROUPS, POLICIES
from rota.kube.reconcile.controller import Brain

RESYNC_SECONDS = 60.0
NESTED_TOO_DEEPLY = -1  # what `operate` returns when kopf cannot read a group or policy
Told = Callable[[Any], None]
News = Callable[[tuple[str, str]], None]  # told of a group of which something is known anew
LOOK_AGAIN_SECONDS = 0.02  # while the first lists are awaited
LIST_AGAIN_SECONDS = 2.0  # after a list that failed
_LABELLED = {"labelSelector": GROUP_LABEL}

_log = logging.getLogger(__name__)


def followers(
    api: Api, brain: Brain, namespaces: Sequence[str], news: News = lambda _: None, *, fleets: bool = True
) -> list[Follower[Any]]:
    """Return what is followed for the brain: records, fleets and pods, by the label that all of them carry."""
    kinds: list[tuple[str, type[Any], Told, Told]] = [
        ("configmaps", ConfigMap, _telling(brain.events.record_seen, news), _telling(brain.events.record_gone, news)),
        ("deployments", Deployment, brain.events.deployment_seen, brain.events.deployment_gone),
        ("pods", Pod, brain.events.pod_seen, brain.events.pod_gone),
    ]
    return [
        Follower(api, kind, namespace, read_as, seen=seen, gone=gone, kept=_identity_of, params=_LABELLED)
        for namespace in namespaces or [""]
        for kind, read_as, seen, gone in kinds
        if fleets or read_as is not Deployment
    ]


def our_kinds(api: Api, brain: Brain, namespaces: Sequence[str], news: News = lambda _: None) -> list[Follower[Any]]:
    """Return what can be followed of policies and groups, policies first."""
    kinds: list[tuple[str, Told, Told]] = [
        (POLICIES, brain.events.policy_seen, brain.events.policy_gone),
        (GROUPS, *_groups(brain, news)),
    ]
    return [
        Follower(api, kind, namespace, Custom, seen=seen, gone=gone, kept=_identity_of)
        for namespace in namespaces or [""]
        for kind, seen, gone in kinds
    ]


def _identity_of(it: Any) -> Any:
    """Return what has to be known of an object to tell that it is gone; of a pod that is how it was at last."""
    return it if isinstance(it, Pod) else type(it)(it.metadata)


def _groups(brain: Brain, news: News) -> tuple[Told, Told]:
    return _telling(brain.events.group_seen, news), _telling(brain.events.group_gone, news)


def _telling(take: Told, news: News) -> Told:
    """Tell of the group, too: one that stands by makes no rounds, and of one that is gone there are none."""

    def told(it: Custom | ConfigMap) -> None:
        take(it)
        news(it.metadata.key if isinstance(it, Custom) else it.metadata.group)

    return told


async def watchable_namespaces(followed: Sequence[Follower[Any]], *, has_kopf: bool) -> list[str]:
    """Return the namespaces that kopf can watch: it gives up on kinds that are not there, or not ours to see."""
    while True:
        known = {it.namespace for it in followed}
        known -= {it.namespace for it in followed if it.refused or not it.listed.is_set()}
        if known and all(it.listed.is_set() for it in counted(followed)):
            return sorted(known) if has_kopf else []
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


async def watch_own_kinds(
    before: Sequence[Follower[Any]], ours: Sequence[Follower[Any]], here: "asyncio.Future[list[str]]"
) -> None:
    """Know policies and groups of a namespace, also if it comes late, when kopf watches others already.

    Whatever kopf's watch has lost is known a minute later, for all is listed again. What it does not watch is followed.
    A group comes last: without its pods and its policy it would look like one that has none.
    """
    for it in before:
        await it.listed.wait()
    for it in ours:
        while not await _listed(it):  # noqa: ASYNC110 - it may be a server that is not there yet
            await asyncio.sleep(LIST_AGAIN_SECONDS)
    if ours[0].namespace in await asyncio.shield(here):
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for it in ours:
                await _listed(it)
    await asyncio.gather(*(it.run() for it in ours))


async def _listed(follower: Follower[Any]) -> bool:
    try:
        await follower.relist()
    except (ApiError, Unanswered) as error:
        _log.warning("%s cannot be listed: %s", follower.path, error)
        return False
    return True


async def run_kopf(
    login: Login,
    brain: Brain,
    namespaces: Sequence[str],
    news: News,
    *,
    stop: asyncio.Event,
    on_started: Callable[[], object] = lambda: None,
) -> int:
    """Watch groups and policies until stopped; return the exit code, or NESTED_TOO_DEEPLY."""
    registry = kopf_watch.registry(login, _groups(brain, news), (brain.events.policy_seen, brain.events.policy_gone))
    try:
        tasks = await kopf.spawn_tasks(
            registry=registry,
            identity="rota",  # nobody hears it; kopf's own needs a user with a name
            settings=kopf_watch.settings(),
            standalone=True,
            clusterwide="" in namespaces,
            namespaces=[it for it in namespaces if it],
        )
        on_started()
        await kopf_watch.run_tasks(tasks)
    except RecursionError:  # of the JSON decoder that kopf uses
        return NESTED_TOO_DEEPLY
    except Exception as error:  # noqa: BLE001 - kopf's own are not public; the kinds are gone, or not ours to see
        _log.error("Groups and policies cannot be watched any more, so this operator ends: %s", error)
        return 1
    else:
        return 0
    finally:
        stop.set()
