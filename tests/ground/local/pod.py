"""The life of one pod: volumes, init containers one after another, sidecars, main containers, an orderly end.

Not there: image pulls, resource limits, security contexts, user and mount namespaces, activeDeadlineSeconds, Events,
`kubectl logs` and `exec` (logs lie beside the pod's folder), persistent volume claims, grpc probes.
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
from ground.local.processes import first
from ground.local.status import Ended, Seen, Stage, State, Waiting, covers, pod_status, restored, sidecar, stamp
from ground.report import Missing, say

Object = dict[str, Any]
Again = Callable[[Ended], bool]

_RETRY = 0.3  # seconds until something that was missing is looked for again
_LONGEST_BACKOFF = 300.0
_FORGIVEN_AFTER = 600.0  # a container that ran so long starts with no back-off again
_GRACE = 30


class Pod:
    """One pod bound to the agent's node; `run` lives its whole life."""

    def __init__(self, pod: Object, address: str, site: Site) -> None:
        meta = pod["metadata"]
        self.object, self.site, self.uid = pod, site, meta["uid"]
        self.path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        self.title = f"{meta['namespace']}/{meta['name']}"
        self._folder = site.folder / "pods" / f"{meta['namespace']}_{meta['name']}" / self.uid[:8]
        facts = {"status.podIP": address, "status.podIPs": address, "status.hostIP": site.address}
        self._sources = volumes.Sources(site.api, pod, facts)
        self._stage = Stage(address, site.address)
        self._conditions: list[Object] = (pod.get("status") or {}).get("conditions") or []
        self._deleted, self._vanished, self._stopping, self._poke, self._dirty = (asyncio.Event() for _ in range(5))
        self._writing = asyncio.Lock()
        self.containers = self._make_containers()
        self._look()

    async def run(self) -> None:
        """Live the pod's life until its object may be gone and nothing of it runs."""
        reporting = asyncio.create_task(self._report())
        try:
            if (self.object.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}:
                await self._live()
                self._stage = replace(self._stage, over=True)
                self._dirty.set()
                await reporting
            await self._deleted.wait()
            await self._let_go()
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            reporting.cancel()

    def update(self, pod: Object) -> None:
        """Take note of a change of the pod's object."""
        old, new = self.object["metadata"], pod["metadata"]
        if any(old.get(part) != new.get(part) for part in ("annotations", "labels")):
            self._poke.set()
        self.object = self._sources.pod = pod
        self._look()
        self._dirty.set()

    def vanish(self) -> None:
        """End it at once: its object is gone."""
        for event in (self._deleted, self._stopping, self._vanished):
            event.set()
        self.kill()

    def kill(self) -> None:
        """End its processes at once."""
        for container in self.containers.values():
            container.signal(signal.SIGKILL)

    async def shut(self) -> None:
        """End its containers quickly and without a word, because the agent ends."""
        await asyncio.gather(*(container.shut() for container in self.containers.values()))

    def _look(self) -> None:
        if self.object["metadata"].get("deletionTimestamp"):
            self._deleted.set()
            self._stopping.set()

    def _make_containers(self) -> dict[str, Container]:
        spec, status = self.object["spec"], self.object.get("status") or {}
        inits = spec.get("initContainers") or []
        kept = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
        earlier = {entry["name"]: restored(entry["name"], entry) for entry in kept}
        first = Waiting("PodInitializing" if inits else "ContainerCreating")
        made = {}
        for one in [*inits, *spec["containers"]]:
            seen = earlier.get(one["name"]) or Seen(one["name"], one.get("image", ""), first)
            made[one["name"]] = container = Container(one, seen, self._sources, self._folder, self.site)
            container.changed = self._dirty.set
        return made

    async def _live(self) -> None:
        """Run everything; return once nothing runs any more, be it done or told to end."""
        sidecars: list[asyncio.Task[None]] = []
        working = asyncio.create_task(self._work(sidecars))
        refreshing = asyncio.create_task(self._refresh())
        try:
            await first(working, self._stopping.wait())
            self._stopping.set()
            await self._end()
            await asyncio.gather(working, *sidecars)
        except Exception:  # noqa: BLE001 - a bug of ours; say all, and fail this pod instead of all others
            say(f"{self.title}: {traceback.format_exc()}")
            self.kill()
        finally:
            for task in (working, refreshing, *sidecars):
                task.cancel()

    async def _work(self, sidecars: list[asyncio.Task[None]]) -> None:
        """Prepare, initialise, run the main containers to their end."""
        spec = self.object["spec"]
        policy = spec.get("restartPolicy", "Always")
        if policy == "Never" and any(_lost(c.seen.state) for c in self.containers.values()):
            return
        if not await self._prepare():
            return
        for init in spec.get("initContainers") or []:
            container = self.containers[init["name"]]
            if sidecar(init):
                sidecars.append(asyncio.create_task(self._keep(container, lambda _: True)))
                await first(container.once_started.wait(), self._stopping.wait())
                if self._stopping.is_set():
                    return
            else:
                await self._keep(container, lambda ended: ended.code != 0 and policy != "Never")
                if _code(container.seen.state) != 0:
                    return
        again: dict[str, Again] = {"Always": lambda _: True, "OnFailure": lambda ended: ended.code != 0}
        mains = [self.containers[main["name"]] for main in spec["containers"]]
        await asyncio.gather(*(self._keep(main, again.get(policy, lambda _: False)) for main in mains))

    async def _prepare(self) -> bool:
        """Make the volumes as soon as all they are made of is there; return False if the pod ends before."""
        while not self._stopping.is_set():
            try:
                await self._write_volumes()
            except (Missing, ApiError, *GONE) as trouble:
                for container in self.containers.values():
                    if isinstance(container.seen.state, Waiting):
                        container.see(state=Waiting(container.seen.state.reason, f"waiting for volumes: {trouble}"))
                await self._pause(_RETRY)
            else:
                self._stage = replace(self._stage, prepared=True)
                self._dirty.set()
                return True
        return False

    async def _write_volumes(self) -> None:
        async with self._writing:  # a slow reader must not put back what a later one has replaced
            for volume in self.object["spec"].get("volumes") or []:
                content = await volumes.files(volume, self._sources)
                if self._stopping.is_set():  # a terminating pod's files stay as they are, on a real node too
                    return
                volumes.write(volume, self._folder / "volumes", content)

    async def _refresh(self) -> None:
        """Bring the volumes up to date about once a minute, and at once when the pod's metadata changes."""
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poke.wait(), self.site.sync_seconds * random.uniform(1, 1.5))
            self._poke.clear()
            if self._stage.prepared:
                try:
                    await self._write_volumes()
                except (Missing, ApiError, *GONE) as trouble:
                    say(f"{self.title}: volumes stay as they are: {trouble}")

    async def _keep(self, container: Container, again: Again) -> None:
        """Run a container, and again with growing delays, until it has ended for good or the pod ends."""
        crashes = 0
        if isinstance(container.seen.state, Ended) and not again(container.seen.state):
            return
        while await self._ready(container):
            began = time.monotonic()
            ended = await container.run()
            if self._stopping.is_set() or not again(ended):
                return
            crashes = 1 if time.monotonic() - began >= _FORGIVEN_AFTER else crashes + 1
            if crashes > 1:
                delay = min(self.site.backoff_seconds * 2 ** (crashes - 2), _LONGEST_BACKOFF)
                message = f"back-off {delay:g}s restarting failed container={container.name} pod={self.title}"
                container.see(state=Waiting("CrashLoopBackOff", message), last=ended)
                await self._pause(delay)

    async def _ready(self, container: Container) -> bool:
        """Wait until a container can start; return False if the pod ends before."""
        while not self._stopping.is_set():
            try:
                if container.prepared:
                    await self._write_volumes()
                await container.prepare()
            except NotYet as trouble:
                container.see(state=Waiting(trouble.reason, str(trouble)))
                await self._pause(_RETRY)
            except (Missing, ApiError, *GONE) as trouble:
                if container.prepared:  # what it was started with before will do
                    return not self._stopping.is_set()
                say(f"{self.title}: {container.name} waits: {trouble}")
                await self._pause(_RETRY)
            else:
                return not self._stopping.is_set()
        return False

    async def _end(self) -> None:
        """End what runs: main and init containers at once, sidecars after those and in reverse order."""
        if self._vanished.is_set():
            return
        spec, meta = self.object["spec"], self.object["metadata"]
        asked = spec.get("terminationGracePeriodSeconds", _GRACE)
        grace = meta.get("deletionGracePeriodSeconds", asked)
        first = [c for c in self.containers.values() if not sidecar(c.spec)]
        later = [c for c in self.containers.values() if sidecar(c.spec)]
        ends = [container.stop(grace) for container in first]
        ends += [container.stop(grace, [*first, *later[place + 1 :]]) for place, container in enumerate(later)]
        await asyncio.gather(*ends)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _report(self) -> None:
        """Write the status each time it changed, until the final one is written or nobody wants it."""
        self._dirty.set()
        while not self._vanished.is_set():
            await self._dirty.wait()
            self._dirty.clear()
            over = self._stage.over
            try:
                await self._write_status()
            except ApiError as error:
                if error.status in {404, 409}:  # gone, or another pod has its name now
                    return
                say(f"{self.title}: status not written: {error}")
                await asyncio.sleep(_RETRY)
                self._dirty.set()
            except GONE:
                await asyncio.sleep(_RETRY)
                self._dirty.set()
            else:
                if over:
                    return

    async def _write_status(self) -> None:
        seen = {name: container.seen for name, container in self.containers.items()}
        status = pod_status(self.object, seen, self._stage, self._conditions, stamp())
        self._conditions = status["conditions"]
        if covers(self.object.get("status") or {}, status):
            return
        patch = dict(status)
        if "podIPs" in status:
            patch["podIPs"] = [{"$patch": "replace"}, *status["podIPs"]]  # else they are merged by address
        body = {"metadata": {"uid": self.uid}, "status": patch}
        self.object = self._sources.pod = await self.site.api.patch(f"{self.path}/status", body, "strategic")

    async def _let_go(self) -> None:
        """Delete the object for good: nothing of the pod runs any more."""
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


def _lost(state: State) -> bool:
    return isinstance(state, Ended) and state.reason == "ContainerStatusUnknown"


def _code(state: State) -> int | None:
    return state.code if isinstance(state, Ended) else None
