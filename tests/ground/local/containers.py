"""A container as a group of plain processes: how it is started, watched and ended."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ground.api import Api
from ground.local import probes
from ground.local.environment import expand, mount_paths, resolve_variables, rewriter
from ground.local.processes import VARIABLE, Process, kill_all, wait_for_first
from ground.local.status import ContainerStatus, Running, Terminated, timestamp
from ground.local.volumes import Sources
from ground.report import Missing, say

Object = dict[str, Any]

_TAG = "ROTA_GROUND"
_LEAST_GRACE = 2.0  # seconds that SIGTERM is given even if a preStop hook used up the grace, as the kubelet does
_SHUTDOWN_GRACE = 3.0  # when the agent itself is ended


@dataclass(frozen=True)
class Site:
    """The settings that all pods of an agent share."""

    api: Api
    web: aiohttp.ClientSession
    node: str
    address: str
    folder: Path
    images: Mapping[str, Sequence[str]]
    added_variables: Mapping[str, str]  # of every container, in addition to the usual ones
    sync_seconds: float
    backoff_seconds: float
    label: str
    guarded: bool = False  # the node is tainted: the cluster is not ours, and its other pods are not for this node

    def variables(self) -> dict[str, str]:
        """Return the variables of every container."""
        server = urlsplit(self.api.access.server)
        host = server.hostname or ""
        port = str(server.port or 443)
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        common = {"PATH": path, "LANG": "C.UTF-8", "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        ground = os.environ.get(_TAG)  # by which `Instance.down` finds containers, under a name other than the agent's
        tag = {_TAG: f"{ground}-pods"} if ground else {}
        return {**common, **self.added_variables, **tag}


class NotYet(Exception):  # noqa: N818 - it waits
    """A container cannot be started now; `reason` is the reason in its status."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Container:
    """One container of a pod; `status` is its part of the pod's status."""

    def __init__(self, spec: Object, status: ContainerStatus, sources: Sources, folder: Path, site: Site) -> None:
        self.spec = spec
        self.status = status
        self.name: str = spec["name"]
        self.address = sources.facts["status.podIP"]
        self.web = site.web
        self.stopping = False
        self.has_started_once = asyncio.Event()  # stays set over restarts: later containers have started
        self.changed: Callable[[], None] = lambda: None
        self._sources = sources
        self._site = site
        self._volumes = folder / "volumes"
        self._own = folder / self.name
        self._log = folder.parent / f"{self.name}.log"
        self._process: Process | None = None
        self._started = 0.0
        self._argv: list[str] = []
        self._env: dict[str, str] = {}
        self._rewrite = rewriter({})

    def update_status(self, **changes: Any) -> None:
        """Change the container's part of the pod's status."""
        self.status = replace(self.status, **changes)
        self.changed()

    @property
    def prepared(self) -> bool:
        """Whether command and variables were complete once."""
        return bool(self._argv)

    async def prepare(self) -> None:
        """Compute command and variables; raise `NotYet` if an object that they need is missing."""
        entry = self.spec.get("command") or self._site.images.get(_short(self.spec.get("image", "")))
        if not entry:
            sentence = f"Local pods run no images; give the container {self.name} a command, or the agent an --image"
            raise NotYet("ImageNotFound", f"{sentence} for {self.spec.get('image')}")
        common = self._site.variables() | {"ROTA_LOCAL": self.address}
        try:
            env = await resolve_variables(self.spec, common, self._sources)
        except Missing as missing:
            raise NotYet("CreateContainerConfigError", str(missing)) from None
        mounts = mount_paths(self.spec, self._sources.pod["spec"].get("volumes") or [], self._volumes)
        self._rewrite = rewriter(mounts)
        own = {"HOME": str(self._own), "TMPDIR": str(self._own / "tmp"), VARIABLE: f"{self._own}/"}
        self._env = own | {name: self._rewrite(text) for name, text in env.items()}
        self._argv = [self._rewrite(expand(part, env)) for part in [*entry, *(self.spec.get("args") or [])]]

    async def run(self) -> Terminated:
        """Run the container once, from its start to its end."""
        self._reset()
        started = timestamp()
        try:
            with self._log.open("ab") as log:
                self._process = Process(self._argv, self._env, self._cwd(), log)
        except OSError as error:
            return self._record_end(Terminated(128, "StartError", message=str(error), started=started))
        self._started = time.monotonic()
        hooks_and_probes = asyncio.create_task(self._attend(started))
        try:
            code = await self._process.wait()
        finally:
            hooks_and_probes.cancel()
        (fault,) = await asyncio.gather(hooks_and_probes, return_exceptions=True)
        if isinstance(fault, Exception):
            say(f"{self._own.parent}: hooks and probes of {self.name} stopped: {fault!r}")
        await kill_all(self._env[VARIABLE])
        reason = "Error" if code else "Completed"
        return self._record_end(
            Terminated(code if code >= 0 else 128 - code, reason, signal=max(0, -code), started=started)
        )

    async def stop(self, grace: float, after: Iterable["Container"] = ()) -> None:
        """Stop it as the kubelet does: preStop, SIGTERM after the containers `after` have ended, SIGKILL."""
        deadline = time.monotonic() + grace
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        first_call, self.stopping = not self.stopping, True
        if self._process is None:
            return
        if first_call and hook and grace > 0:
            await wait_for_first(self._hook("preStop", hook), self.ended(grace))
        for container in after:
            await container.ended(deadline - time.monotonic())
        if first_call:
            self.signal(signal.SIGTERM)
        if not await self.ended(max(_LEAST_GRACE, deadline - time.monotonic())):
            self.signal(signal.SIGKILL)
            await self.ended(None)

    async def shut_down(self) -> None:
        """Stop it because the agent ends; the agent's watcher kills processes that take too long."""
        self.signal(signal.SIGTERM)
        await self.ended(_SHUTDOWN_GRACE)

    def signal(self, number: int) -> None:
        """Signal the container's processes, if it runs."""
        if self._process:
            self._process.signal(number)

    async def ended(self, seconds: float | None) -> bool:
        """Wait for the end of the container's process; return False if `seconds` pass before."""
        if self._process is None:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), None if seconds is None else max(0.0, seconds))
            return True
        return False

    def port(self, name_or_number: int | str) -> int:
        """Return a port by number or by the name that the container declares."""
        if isinstance(name_or_number, int) or name_or_number.isdigit():
            return int(name_or_number)
        declared = {port.get("name"): port["containerPort"] for port in self.spec.get("ports") or []}
        if name_or_number not in declared:
            raise probes.Failure(f"container {self.name} declares no port {name_or_number}")
        return int(declared[name_or_number])

    async def execute(self, argv: Sequence[str]) -> int:
        """Run a command with the container's variables and in its folder; it is killed if the caller is cancelled."""
        process = Process([self._rewrite(part) for part in argv], self._env, self._cwd(), subprocess.DEVNULL)
        try:
            return await process.wait()
        finally:
            process.signal(signal.SIGKILL)

    def _cwd(self) -> Path:
        folder = self.spec.get("workingDir")
        return Path(self._rewrite(folder)) if folder else self._own

    def _reset(self) -> None:
        """Count a restart, and create empty folders, as a new container has."""
        last = self.status.state if isinstance(self.status.state, Terminated) else self.status.last
        restarts = self.status.restarts + (last is not None)
        self.stopping = False
        self.status = replace(self.status, id=f"local://{uuid.uuid4().hex}", last=last, restarts=restarts)
        shutil.rmtree(self._own, ignore_errors=True)
        (self._own / "tmp").mkdir(parents=True)

    def _record_end(self, terminated: Terminated) -> Terminated:
        self._process = None
        terminated = replace(terminated, finished=timestamp(), id=self.status.id)
        self.update_status(state=terminated, started=False, ready=False)
        return terminated

    async def _attend(self, started: str) -> None:
        """Run the postStart hook, then the probes, until cancelled."""
        hook = (self.spec.get("lifecycle") or {}).get("postStart")
        if hook and not await self._hook("postStart", hook):
            await self._fail("its postStart hook failed", {})
            return
        self.update_status(state=Running(started))
        probe = self.spec.get("startupProbe")
        if probe:
            failure = await anext(self._verdicts(probe))
            if failure:
                await self._fail(f"its startup probe failed: {failure}", probe)
                return
        self.update_status(started=True, ready="readinessProbe" not in self.spec)
        self.has_started_once.set()
        await asyncio.gather(self._keep_alive(), self._keep_ready())

    async def _keep_alive(self) -> None:
        probe = self.spec.get("livenessProbe")
        if probe:
            async for failure in self._verdicts(probe):
                if failure:
                    await self._fail(f"its liveness probe failed: {failure}", probe)
                    return

    async def _keep_ready(self) -> None:
        probe = self.spec.get("readinessProbe")
        if probe:
            async for failure in self._verdicts(probe):
                if self.status.ready == bool(failure):
                    self.update_status(ready=not failure)

    def _verdicts(self, probe: Object) -> AsyncIterator[probes.Failure | None]:
        ran = time.monotonic() - self._started
        return probes.verdicts(probe, lambda: probes.act(_handler(probe), self, probe.get("timeoutSeconds", 1)), ran)

    async def _hook(self, what: str, handler: Object) -> bool:
        try:
            await probes.act(handler, self)
        except probes.Failure as failure:
            say(f"{self._own.parent}: {what} of {self.name}: {failure}")
            return False
        return True

    async def _fail(self, cause: str, probe: Object) -> None:
        if self.stopping:  # the probes of a terminating pod do not end it a second time
            return
        say(f"{self._own.parent}: ending {self.name}, {cause}")
        grace = self._sources.pod["spec"].get("terminationGracePeriodSeconds", 30)
        await self.stop(probe.get("terminationGracePeriodSeconds", grace))


def _handler(probe: Object) -> Object:
    return {kind: probe[kind] for kind in ("exec", "httpGet", "tcpSocket", "grpc") if kind in probe}


def _short(image: str) -> str:
    """Return an image's name without registry, folders, tag and digest."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]
