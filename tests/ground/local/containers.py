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
from ground.local.environment import expand, places, rewriter, variables
from ground.local.processes import VARIABLE, Process, clear, first
from ground.local.status import Ended, Running, Seen, stamp
from ground.local.volumes import Sources
from ground.report import Missing, say

Object = dict[str, Any]

_TAG = "ROTA_GROUND"
_LEAST_GRACE = 2.0  # seconds that SIGTERM is given even if a preStop hook used up the grace, as the kubelet does
_SHUTDOWN_GRACE = 3.0  # when the agent itself is ended


@dataclass(frozen=True)
class Site:
    """What all pods of an agent share."""

    api: Api
    web: aiohttp.ClientSession
    node: str
    address: str
    folder: Path
    images: Mapping[str, Sequence[str]]
    sync_seconds: float
    backoff_seconds: float
    label: str
    guarded: bool = False  # the node is tainted: the cluster is not ours, and its pods are not for us

    def variables(self) -> dict[str, str]:
        """Return what every container has in its environment."""
        server = urlsplit(self.api.access.server)
        host, port = server.hostname or "", str(server.port or 443)
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        made = {"PATH": path, "LANG": "C.UTF-8", "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        ground = os.environ.get(_TAG)  # so that whoever takes the ground down finds containers, but not as the agent
        return made | ({_TAG: f"{ground}-pods"} if ground else {})


class NotYet(Exception):  # noqa: N818 - it waits
    """A container cannot be started now; `reason` is the word for its status."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Container:
    """One container of a pod; `seen` is what the status shows of it."""

    def __init__(self, spec: Object, seen: Seen, sources: Sources, folder: Path, site: Site) -> None:
        self.spec, self.seen = spec, seen
        self.name: str = spec["name"]
        self.address = sources.facts["status.podIP"]
        self.web = site.web
        self.stopping = False
        self.once_started = asyncio.Event()  # stays set over restarts: those after it have begun
        self.changed: Callable[[], None] = lambda: None
        self._sources, self._site = sources, site
        self._volumes, self._own = folder / "volumes", folder / self.name
        self._log = folder.parent / f"{self.name}.log"
        self._process: Process | None = None
        self._started = 0.0
        self._argv: list[str] = []
        self._env: dict[str, str] = {}
        self._rewrite = rewriter({})

    def see(self, **changes: Any) -> None:
        """Change what the status shows."""
        self.seen = replace(self.seen, **changes)
        self.changed()

    @property
    def prepared(self) -> bool:
        """Whether it was ready to start once."""
        return bool(self._argv)

    async def prepare(self) -> None:
        """Work out command and variables; raise `NotYet` if something for them is missing."""
        entry = self.spec.get("command") or self._site.images.get(_short(self.spec.get("image", "")))
        if not entry:
            sentence = f"Local pods run no images; give the container {self.name} a command, or the agent an --image"
            raise NotYet("ImageNotFound", f"{sentence} for {self.spec.get('image')}")
        given = self._site.variables() | {"ROTA_LOCAL": self.address}
        try:
            made = await variables(self.spec, given, self._sources)
        except Missing as missing:
            raise NotYet("CreateContainerConfigError", str(missing)) from None
        mounts = places(self.spec, self._sources.pod["spec"].get("volumes") or [], self._volumes)
        self._rewrite = rewriter(mounts)
        own = {"HOME": str(self._own), "TMPDIR": str(self._own / "tmp"), VARIABLE: f"{self._own}/"}
        self._env = own | {name: self._rewrite(text) for name, text in made.items()}
        self._argv = [self._rewrite(expand(part, made)) for part in [*entry, *(self.spec.get("args") or [])]]

    async def run(self) -> Ended:
        """Run it once, from its start to its end."""
        self._begin()
        began = stamp()
        try:
            with self._log.open("ab") as log:
                self._process = Process(self._argv, self._env, self._cwd(), log)
        except OSError as error:
            return self._over(Ended(128, "StartError", message=str(error), started=began))
        self._started = time.monotonic()
        attending = asyncio.create_task(self._attend(began))
        try:
            code = await self._process.wait()
        finally:
            attending.cancel()
        (fault,) = await asyncio.gather(attending, return_exceptions=True)
        if isinstance(fault, Exception):
            say(f"{self._own.parent}: hooks and probes of {self.name} stopped: {fault!r}")
        await clear(self._env[VARIABLE])
        reason = "Error" if code else "Completed"
        return self._over(Ended(code if code >= 0 else 128 - code, reason, signal=max(0, -code), started=began))

    async def stop(self, grace: float, after: Iterable["Container"] = ()) -> None:
        """End it as the kubelet does: preStop, SIGTERM once those `after` which it goes have ended, SIGKILL."""
        deadline = time.monotonic() + grace
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        begin, self.stopping = not self.stopping, True
        if self._process is None:
            return
        if begin and hook and grace > 0:
            await first(self._hook("preStop", hook), self.ended(grace))
        for other in after:
            await other.ended(deadline - time.monotonic())
        if begin:
            self.signal(signal.SIGTERM)
        if not await self.ended(max(_LEAST_GRACE, deadline - time.monotonic())):
            self.signal(signal.SIGKILL)
            await self.ended(None)

    async def shut(self) -> None:
        """Let it end, because the agent ends; the agent's watcher kills what takes too long."""
        self.signal(signal.SIGTERM)
        await self.ended(_SHUTDOWN_GRACE)

    def signal(self, number: int) -> None:
        """Signal its processes, if it runs."""
        if self._process:
            self._process.signal(number)

    async def ended(self, seconds: float | None) -> bool:
        """Wait for the end of its process at most so long; return whether it came."""
        if self._process is None:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), None if seconds is None else max(0.0, seconds))
            return True
        return False

    def port(self, given: int | str) -> int:
        """Return a port by number or by the name that the container declares."""
        if isinstance(given, int) or given.isdigit():
            return int(given)
        declared = {port.get("name"): port["containerPort"] for port in self.spec.get("ports") or []}
        if given not in declared:
            raise probes.Failure(f"container {self.name} declares no port {given}")
        return int(declared[given])

    async def execute(self, argv: Sequence[str]) -> int:
        """Run a command with the container's variables and in its folder; killed if nobody waits for it any more."""
        process = Process([self._rewrite(part) for part in argv], self._env, self._cwd(), subprocess.DEVNULL)
        try:
            return await process.wait()
        finally:
            process.signal(signal.SIGKILL)

    def _cwd(self) -> Path:
        given = self.spec.get("workingDir")
        return Path(self._rewrite(given)) if given else self._own

    def _begin(self) -> None:
        """Count a restart, and give the container fresh folders, as a new one has."""
        last = self.seen.state if isinstance(self.seen.state, Ended) else self.seen.last
        restarts = self.seen.restarts + (last is not None)
        self.stopping = False
        self.seen = replace(self.seen, id=f"local://{uuid.uuid4().hex}", last=last, restarts=restarts)
        shutil.rmtree(self._own, ignore_errors=True)
        (self._own / "tmp").mkdir(parents=True)

    def _over(self, ended: Ended) -> Ended:
        self._process = None
        ended = replace(ended, finished=stamp(), id=self.seen.id)
        self.see(state=ended, started=False, ready=False)
        return ended

    async def _attend(self, began: str) -> None:
        """Run the postStart hook, then the probes, until cancelled."""
        hook = (self.spec.get("lifecycle") or {}).get("postStart")
        if hook and not await self._hook("postStart", hook):
            await self._fail("its postStart hook failed", {})
            return
        self.see(state=Running(began))
        probe = self.spec.get("startupProbe")
        if probe:
            failure = await anext(self._verdicts(probe))
            if failure:
                await self._fail(f"its startup probe failed: {failure}", probe)
                return
        self.see(started=True, ready="readinessProbe" not in self.spec)
        self.once_started.set()
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
                if self.seen.ready == bool(failure):
                    self.see(ready=not failure)

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

    async def _fail(self, why: str, probe: Object) -> None:
        if self.stopping:  # a pod that is being ended is not probed to death
            return
        say(f"{self._own.parent}: ending {self.name}, {why}")
        grace = self._sources.pod["spec"].get("terminationGracePeriodSeconds", 30)
        await self.stop(probe.get("terminationGracePeriodSeconds", grace))


def _handler(probe: Object) -> Object:
    return {kind: probe[kind] for kind in ("exec", "httpGet", "tcpSocket", "grpc") if kind in probe}


def _short(image: str) -> str:
    """Return an image's name without registry, folders, tag and digest."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]
