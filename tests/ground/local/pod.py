"""The life of one pod: volumes, init containers one after another, sidecars, main containers, an orderly end.

Not supported: image pulls, resource limits, security contexts, user and mount namespaces, activeDeadlineSeconds,
Events, `kubectl logs` and `exec` (logs are next to the pod's folder), persistent volume claims, grpc probes.
"""

import asyncio
import contextlib
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ground.api import GONE, ApiError
from ground.local import volumes
from ground.local.containers import Container, NotYet, Site
from ground.local.processes import wait_for_first
from ground.local.status import (
    ContainerStatus,
    PodProgress,
    State,
    Terminated,
    Waiting,
    build_pod_status,
    covers,
    is_sidecar,
    restore_status,
    timestamp,
)
from ground.report import Missing, say

Object = dict[str, Any]
RestartRule = Callable[[Terminated], bool]

_RETRY = 0.3  # seconds until a missing object is requested again
_LONGEST_BACKOFF = 300.0
_FORGIVEN_AFTER = 600.0  # seconds; the back-off of a container that ran so long starts at zero again
_GRACE = 30


class Pod:
    """One pod bound to the agent's node; `run` is its whole life."""

    def __init__(self, pod: Object, address: str, site: Site) -> None:
        meta = pod["metadata"]
        self.object = pod
        self.site = site
        self.uid = meta["uid"]
        self.path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        self.title = f"{meta['namespace']}/{meta['name']}"
        self._folder = site.folder / "pods" / f"{meta['namespace']}_{meta['name']}" / self.uid[:8]
        facts = {"status.podIP": address, "status.podIPs": address, "status.hostIP": site.address}
        self._sources = volumes.Sources(site.api, pod, facts)
        self._progress = PodProgress(address, site.address)
        self._conditions: list[Object] = (pod.get("status") or {}).get("conditions") or []
        self._deleted = asyncio.Event()
        self._vanished = asyncio.Event()
        self._stopping = asyncio.Event()
        self._poke = asyncio.Event()
        self._status_changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self.containers = self._make_containers()
        self._note_deletion()

    async def run(self) -> None:
        """Run the pod until its last process has ended and its object may be deleted."""
        reporting = asyncio.create_task(self._report())
        try:
            if (self.object.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}:
                await self._run_containers()
                self._progress = replace(self._progress, over=True)
                self._status_changed.set()
                await reporting
            await self._deleted.wait()
            await self._delete_object()
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            reporting.cancel()

    def update(self, pod: Object) -> None:
        """Take over a change of the pod's object."""
        old, new = self.object["metadata"], pod["metadata"]
        if any(old.get(part) != new.get(part) for part in ("annotations", "labels")):
            self._poke.set()
        self.object = self._sources.pod = pod
        self._note_deletion()
        self._status_changed.set()

    def on_object_deleted(self) -> None:
        """Kill the pod at once: its object has been deleted."""
        for event in (self._deleted, self._stopping, self._vanished):
            event.set()
        self.kill()

    def kill(self) -> None:
        """Kill the pod's processes at once."""
        for container in self.containers.values():
            container.signal(signal.SIGKILL)

    async def shut_down(self) -> None:
        """Stop the containers quickly and without a report, because the agent ends."""
        await asyncio.gather(*(container.shut_down() for container in self.containers.values()))

    def _note_deletion(self) -> None:
        if self.object["metadata"].get("deletionTimestamp"):
            self._deleted.set()
            self._stopping.set()

    def _make_containers(self) -> dict[str, Container]:
        spec = self.object["spec"]
        status = self.object.get("status") or {}
        inits = spec.get("initContainers") or []
        entries = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
        earlier = {entry["name"]: restore_status(entry["name"], entry) for entry in entries}
        initial = Waiting("PodInitializing" if inits else "ContainerCreating")
        containers = {}
        for declared in [*inits, *spec["containers"]]:
            name = declared["name"]
            present = earlier.get(name) or ContainerStatus(name, declared.get("image", ""), initial)
            containers[name] = container = Container(declared, present, self._sources, self._folder, self.site)
            container.changed = self._status_changed.set
        return containers

    async def _run_containers(self) -> None:
        """Run all containers; return when all have ended, because they completed or the pod is deleted."""
        sidecars: list[asyncio.Task[None]] = []
        completing = asyncio.create_task(self._run_to_completion(sidecars))
        refreshing = asyncio.create_task(self._refresh())
        try:
            await wait_for_first(completing, self._stopping.wait())
            self._stopping.set()
            await self._end()
            await asyncio.gather(completing, *sidecars)
        except Exception:  # noqa: BLE001 - a bug of ours: print all of it, and fail this pod instead of all pods
            say(f"{self.title}: {traceback.format_exc()}")
            self.kill()
        finally:
            for task in (completing, refreshing, *sidecars):
                task.cancel()

    async def _run_to_completion(self, sidecars: list[asyncio.Task[None]]) -> None:
        """Prepare, initialise, run the main containers to their end."""
        spec = self.object["spec"]
        policy = spec.get("restartPolicy", "Always")
        states = [container.status.state for container in self.containers.values()]
        if policy == "Never" and any(map(_ended_with_agent, states)):
            return
        if not await self._prepare():
            return
        for init in spec.get("initContainers") or []:
            container = self.containers[init["name"]]
            if is_sidecar(init):
                sidecars.append(asyncio.create_task(self._run_with_restarts(container, lambda _: True)))
                await wait_for_first(container.has_started_once.wait(), self._stopping.wait())
                if self._stopping.is_set():
                    return
            else:
                await self._run_with_restarts(container, lambda ended: ended.code != 0 and policy != "Never")
                if _exit_code(container.status.state) != 0:
                    return
        rules: dict[str, RestartRule] = {"Always": lambda _: True, "OnFailure": lambda ended: ended.code != 0}
        mains = [self.containers[main["name"]] for main in spec["containers"]]
        await asyncio.gather(*(self._run_with_restarts(main, rules.get(policy, lambda _: False)) for main in mains))

    async def _prepare(self) -> bool:
        """Create the volumes as soon as the objects that they need exist; return False if the pod ends before."""
        while not self._stopping.is_set():
            try:
                await self._write_volumes()
            except (Missing, ApiError, *GONE) as error:
                for container in self.containers.values():
                    if isinstance(container.status.state, Waiting):
                        container.update_status(
                            state=Waiting(container.status.state.reason, f"waiting for volumes: {error}")
                        )
                await self._pause(_RETRY)
            else:
                self._progress = replace(self._progress, prepared=True)
                self._status_changed.set()
                return True
        return False

    async def _write_volumes(self) -> None:
        async with self._writing:  # a slow reader must not restore files that a later one has replaced
            for volume in self.object["spec"].get("volumes") or []:
                content = await volumes.read_files(volume, self._sources)
                if self._stopping.is_set():  # the files of a terminating pod do not change, as on a real node
                    return
                volumes.write_volume(volume, self._folder / "volumes", content)

    async def _refresh(self) -> None:
        """Update the volumes about once a minute, and at once when the pod's metadata changes."""
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), self.site.sync_seconds * random.uniform(1, 1.5))
            self._poke.clear()
            if self._progress.prepared:
                try:
                    await self._write_volumes()
                except (Missing, ApiError, *GONE) as error:
                    say(f"{self.title}: volumes stay as they are: {error}")

    async def _run_with_restarts(self, container: Container, may_restart: RestartRule) -> None:
        """Run a container, and restart it with growing delays, until its rule forbids a restart or the pod ends."""
        crashes = 0
        if isinstance(container.status.state, Terminated) and not may_restart(container.status.state):
            return
        while await self._wait_until_startable(container):
            began = time.monotonic()
            ended = await container.run()
            if self._stopping.is_set() or not may_restart(ended):
                return
            crashes = 1 if time.monotonic() - began >= _FORGIVEN_AFTER else crashes + 1
            if crashes > 1:
                delay = min(self.site.backoff_seconds * 2 ** (crashes - 2), _LONGEST_BACKOFF)
                message = f"back-off {delay:g}s restarting failed container={container.name} pod={self.title}"
                container.update_status(state=Waiting("CrashLoopBackOff", message), last=ended)
                await self._pause(delay)

    async def _wait_until_startable(self, container: Container) -> bool:
        """Wait until a container can start; return False if the pod ends before."""
        while not self._stopping.is_set():
            try:
                if container.prepared:
                    await self._write_volumes()
                await container.prepare()
            except NotYet as error:
                container.update_status(state=Waiting(error.reason, str(error)))
                await self._pause(_RETRY)
            except (Missing, ApiError, *GONE) as error:
                if container.prepared:  # the previous command and variables remain valid
                    return not self._stopping.is_set()
                say(f"{self.title}: {container.name} waits: {error}")
                await self._pause(_RETRY)
            else:
                return not self._stopping.is_set()
        return False

    async def _end(self) -> None:
        """Stop running containers: main and init containers at once, then sidecars in reverse order."""
        if self._vanished.is_set():
            return
        spec, meta = self.object["spec"], self.object["metadata"]
        requested = spec.get("terminationGracePeriodSeconds", _GRACE)
        grace = meta.get("deletionGracePeriodSeconds", requested)
        mains = [container for container in self.containers.values() if not is_sidecar(container.spec)]
        sidecars = [container for container in self.containers.values() if is_sidecar(container.spec)]
        ends = [container.stop(grace) for container in mains]
        ends += [container.stop(grace, [*mains, *sidecars[place + 1 :]]) for place, container in enumerate(sidecars)]
        await asyncio.gather(*ends)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _report(self) -> None:
        """Write the status after each change, until the final one is written or the object is deleted."""
        self._status_changed.set()
        while not self._vanished.is_set():
            await self._status_changed.wait()
            self._status_changed.clear()
            over = self._progress.over
            try:
                await self._write_status()
            except ApiError as error:
                if error.status in {404, 409}:  # the object is deleted, or another pod has its name now
                    return
                say(f"{self.title}: status not written: {error}")
                await asyncio.sleep(_RETRY)
                self._status_changed.set()
            except GONE:
                await asyncio.sleep(_RETRY)
                self._status_changed.set()
            else:
                if over:
                    return

    async def _write_status(self) -> None:
        statuses = {name: container.status for name, container in self.containers.items()}
        status = build_pod_status(self.object, statuses, self._progress, self._conditions, timestamp())
        self._conditions = status["conditions"]
        if covers(self.object.get("status") or {}, status):
            return
        patch = dict(status)
        if "podIPs" in status:
            patch["podIPs"] = [{"$patch": "replace"}, *status["podIPs"]]  # else they are merged by address
        body = {"metadata": {"uid": self.uid}, "status": patch}
        self.object = self._sources.pod = await self.site.api.patch(f"{self.path}/status", body, "strategic")

    async def _delete_object(self) -> None:
        """Delete the pod's object for good, now that its last process has ended."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        while not self._vanished.is_set():
            try:
                await self.site.api.delete(self.path, body)
            except ApiError as error:
                if error.status in {404, 409}:
                    return
            except GONE:
                pass
            else:
                return
            await asyncio.sleep(_RETRY)


def _ended_with_agent(state: State) -> bool:
    return isinstance(state, Terminated) and state.reason == "ContainerStatusUnknown"


def _exit_code(state: State) -> int | None:
    return state.code if isinstance(state, Terminated) else None
