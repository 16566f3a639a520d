"""kopf's handlers and settings: kopf watches groups and policies and passes events on; it writes nothing.

Only `on.event` is used: no finalizer delays a deletion, no annotation is added, no log line becomes an Event.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import CoroutineType
from typing import Any

import kopf
import msgspec

from rota.aio import loop_time
from rota.kube.client.login.session import Login
from rota.kube.client.objects import CustomResource
from rota.kube.client.paths import GROUPS, POLICIES

API_VERSION = "rota.dev/v1alpha1"
REOPEN_SECONDS = 10.0  # minimum time between two sessions: kopf asks for a new one after each 401
SHUTDOWN_SECONDS = 20.0  # deadline for all tasks of kopf to end
RECANCEL_SECONDS = 1.0  # after which tasks that swallowed their cancellation are cancelled again

ResourceHandler = Callable[[CustomResource], None]
Task = asyncio.Task[Any]
_log = logging.getLogger(__name__)
_KOPF_FOLDER = f"{Path(kopf.__file__).parent}{os.sep}"


def build_registry(
    login: Login, groups: tuple[ResourceHandler, ResourceHandler], policies: tuple[ResourceHandler, ResourceHandler]
) -> kopf.OperatorRegistry:
    """Return kopf's handlers, which pass on changed and deleted groups and policies; kopf connects by this login."""
    handlers = kopf.OperatorRegistry()
    kopf.on.login(registry=handlers)(_session_opener(login))
    for resource, (on_upsert, on_delete) in ((GROUPS, groups), (POLICIES, policies)):
        kopf.on.event(API_VERSION, resource, registry=handlers, id=resource)(_event_handler(on_upsert, on_delete))
    return handlers


def _session_opener(login: Login) -> Callable[..., Any]:
    opened_at = -math.inf

    async def open_session(**_: Any) -> kopf.AiohttpSession:
        """Open a session for kopf, which closes it after a 401 and asks for another."""
        nonlocal opened_at
        await asyncio.sleep(max(0.0, opened_at + REOPEN_SECONDS - loop_time()))  # the first session is opened at once
        opened_at = loop_time()
        return kopf.AiohttpSession(server=login.server, aiohttp_session=login.open_session())

    return open_session


def _event_handler(on_upsert: ResourceHandler, on_delete: ResourceHandler) -> Callable[..., Any]:
    async def handle(event: Mapping[str, Any], **_: Any) -> None:
        handler = on_delete if event["type"] == "DELETED" else on_upsert
        handler(msgspec.convert(dict(event["object"]), CustomResource))

    return handle


async def run_tasks(root_tasks: Collection[Task]) -> None:
    """Wait until one of kopf's root tasks ends, end all tasks of kopf, and raise the error of that root task, if any.

    `kopf.run_tasks` takes every task that started after it for its own: it would wait 5 s for the operator's tasks,
    cancel them, and raise the error of a failed one. It may also wait for ever (see `_end_tasks`).
    """
    try:
        done, _ = await asyncio.wait(root_tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end_tasks(root_tasks)
    for task in done:
        if not task.cancelled():
            task.result()


async def _end_tasks(root_tasks: Collection[Task]) -> None:
    """Cancel all tasks of kopf until they have ended.

    Each watch of kopf has a second task, its pause-waiter. If both are cancelled while the watch is being opened, the
    watch ignores its cancellation, opens another one, and waits for a login that kopf does not provide any more. So
    pause-waiters are cancelled after all other tasks.
    """
    deadline = loop_time() + SHUTDOWN_SECONDS
    while tasks := [task for task in asyncio.all_tasks() if task in root_tasks or _is_kopf_task(task)]:
        if loop_time() > deadline:
            names = ", ".join(sorted(map(asyncio.Task.get_name, tasks)))
            _log.error("kopf tasks did not stop within %.0f s: %s", SHUTDOWN_SECONDS, names)
            return
        other_tasks = [task for task in tasks if not task.get_name().startswith("pause-waiter")]
        to_cancel = other_tasks or tasks
        for task in to_cancel:
            task.cancel()
        await asyncio.wait(to_cancel, timeout=RECANCEL_SECONDS)


def _is_kopf_task(task: Task) -> bool:
    coroutine = task.get_coro()
    return isinstance(coroutine, CoroutineType) and coroutine.cr_code.co_filename.startswith(_KOPF_FOLDER)


def build_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: detect a dead watch soon, write nothing to the cluster, end quickly. Times: seconds."""
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.peering.standalone = True  # leaders are elected by `leader_election`
    kopf_settings.posting.enabled = False
    kopf_settings.scanning.disabled = True
    kopf_settings.watching.server_timeout = 300  # the API server ends each watch after this time
    kopf_settings.watching.client_timeout = 330  # kopf ends a watch that the server did not end in time
    kopf_settings.watching.connect_timeout = 10
    kopf_settings.watching.inactivity_timeout = 70  # the server sends a bookmark every 60 s
    kopf_settings.watching.reconnect_backoff = 0.5
    kopf_settings.networking.request_timeout = 30
    kopf_settings.networking.connect_timeout = 5
    kopf_settings.networking.enforce_retry_after = True
    # kopf keeps a worker for each object until no event of it has come for idle_timeout: at most worker_limit /
    # idle_timeout objects pass in a second.
    kopf_settings.queueing.worker_limit = 500
    kopf_settings.queueing.idle_timeout = 0.05
    kopf_settings.queueing.error_delays = [1, 2, 4, 8, 15, 30]
    kopf_settings.background.cancellation_polling = 5
    kopf_settings.process.ultimate_exiting_timeout = SHUTDOWN_SECONDS + 5  # then kopf kills the process
    kopf_settings.persistence.finalizer = "rota.dev/none"  # no handler sets one; if one did, it would have Rota's name
    kopf_settings.persistence.consistency_timeout = 0
    return kopf_settings
