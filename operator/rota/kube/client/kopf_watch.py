"""What kopf runs: it watches groups and policies and hands on what it sees; it writes nothing.

Only `on.event`: no finalizer keeps an object, no annotation is left on one, no log line becomes an Event.
"""

import asyncio
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import CoroutineType
from typing import Any

import kopf
import msgspec

from rota.kube.client.login.session import Login
from rota.kube.client.objects import Custom
from rota.kube.client.paths import GROUPS, POLICIES

VERSION = "rota.dev/v1alpha1"


REOPEN_SECONDS = 10.0  # between two sessions: kopf asks for one after each 401
Told = Callable[[Custom], None]
_KOPF_FOLDER = f"{Path(kopf.__file__).parent}{os.sep}"


def registry(login: Login, groups: tuple[Told, Told], policies: tuple[Told, Told]) -> kopf.OperatorRegistry:
    """Return handlers that pass on groups and policies that change or are deleted; kopf asks with this login."""
    found = kopf.OperatorRegistry()
    kopf.on.login(registry=found)(_session_opener(login))
    for kind, (seen, gone) in ((GROUPS, groups), (POLICIES, policies)):
        kopf.on.event(VERSION, kind, registry=found, id=kind)(_handler(seen, gone))
    return found


def _session_opener(login: Login) -> Callable[..., Any]:
    opened_at = -math.inf

    async def open_session(**_: Any) -> kopf.AiohttpSession:
        """Open a session for kopf, which closes it after a 401 and asks for another."""
        nonlocal opened_at
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(opened_at + REOPEN_SECONDS - now)
        opened_at = asyncio.get_running_loop().time()
        return kopf.AiohttpSession(server=login.server, aiohttp_session=login.open_session())

    return open_session


def _handler(seen: Told, gone: Told) -> Callable[..., Any]:
    async def told(event: Mapping[str, Any], **_: Any) -> None:
        it = msgspec.convert(dict(event["object"]), Custom)
        (gone if event["type"] == "DELETED" else seen)(it)

    return told


class OtherTasks(Collection["asyncio.Task[Any]"]):
    """The tasks that are not kopf's, for `kopf.run_tasks` to leave alone.

    When it ends, it takes every task that began after it for its own: it would wait 5 s for the operator's tasks,
    cancel them, and raise the error of one that had failed instead of the error that ended the watch.
    """

    def __contains__(self, task: object) -> bool:
        coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
        return not (isinstance(coroutine, CoroutineType) and coroutine.cr_code.co_filename.startswith(_KOPF_FOLDER))

    def __iter__(self) -> Iterator["asyncio.Task[Any]"]:
        return (task for task in asyncio.all_tasks() if task in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def settings() -> kopf.OperatorSettings:
    """Return how kopf shall run: quick to notice that a watch is dead, silent in the cluster, quick to end."""
    found = kopf.OperatorSettings()
    found.peering.standalone = True  # who leads is our own business
    found.posting.enabled = False
    found.scanning.disabled = True
    found.watching.server_timeout = 300
    found.watching.client_timeout = 330
    found.watching.connect_timeout = 10
    found.watching.inactivity_timeout = 70
    found.watching.reconnect_backoff = 0.5
    found.networking.request_timeout = 30
    found.networking.connect_timeout = 5
    found.networking.enforce_retry_after = True
    # kopf keeps a worker for each object until no event of it has come for idle_timeout: at most worker_limit /
    # idle_timeout objects pass in a second.
    found.queueing.worker_limit = 500
    found.queueing.idle_timeout = 0.05
    found.queueing.error_delays = [1, 2, 4, 8, 15, 30]
    found.background.cancellation_polling = 5
    found.process.ultimate_exiting_timeout = 25
    found.persistence.finalizer = "rota.dev/none"  # there is none; but were there one, it would be ours
    found.persistence.consistency_timeout = 0
    return found
