"""A namespace of its own for one test, and helpers for common steps in it."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from ground.api import Api, ApiError, Object
from ground.local import LocalNode
from ground.poll import PATIENCE_SECONDS, soon

_COLLECTIONS = {
    "Pod": "/api/v1/namespaces/{}/pods",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
}
_RECONCILED = (
    "/apis/rota.dev/v1alpha1/namespaces/{}/consumergroups",
    "/apis/batch/v1/namespaces/{}/jobs",
    "/apis/apps/v1/namespaces/{}/deployments",
    "/apis/apps/v1/namespaces/{}/statefulsets",
    "/apis/apps/v1/namespaces/{}/replicasets",
    "/api/v1/namespaces/{}/pods",
)


@dataclass(frozen=True)
class Space:
    """A namespace whose pods run on the local node."""

    api: Api
    node: LocalNode
    name: str

    def path(self, kind: str, name: str = "") -> str:
        """Return the path of an object, or of the collection."""
        return _COLLECTIONS[kind].format(self.name) + (f"/{name}" if name else "")

    async def make(self, kind: str, name: str, **fields: Object) -> Object:
        """Create an object."""
        version = "apps/v1" if kind == "Deployment" else "v1"
        body = {"apiVersion": version, "kind": kind, "metadata": {"name": name, **fields.pop("metadata", {})}, **fields}
        return await self.api.create(self.path(kind), body)

    async def pod(self, name: str, *containers: Object, annotations: Object | None = None, **spec: object) -> Object:
        """Create a pod for the local node, without pulling its containers' images."""
        return await self.make(
            "Pod", name, metadata={"annotations": annotations or {}}, spec=self.spec(*containers, **spec)
        )

    def spec(self, *containers: Object, **spec: object) -> Object:
        """Return the spec of a pod for the local node."""
        placement = {"nodeSelector": self.node.selector, "tolerations": self.node.tolerations}
        return {**placement, "containers": list(containers), **spec}

    async def until(
        self, holds: Callable[[Object], bool], name: str, kind: str = "Pod", seconds: float = PATIENCE_SECONDS
    ) -> Object:
        """Wait until the condition holds for an object, and return the object."""
        resource: Object = {}
        try:
            async with asyncio.timeout(seconds):
                while not (resource and holds(resource)):
                    await asyncio.sleep(0.05 if resource else 0)
                    resource = await self.api.get(self.path(kind, name))
        except TimeoutError:
            raise AssertionError(f"{kind} {name} did not become as wanted: {resource.get('status')}") from None
        return resource

    async def wait_until_deleted(self, name: str, kind: str = "Pod", seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until an object is deleted."""
        with contextlib.suppress(ApiError):
            await self.until(lambda _: False, name, kind, seconds)

    def log(self, pod: str, container: str = "app") -> list[str]:
        """Return the lines that a container of a local pod has written so far."""
        path = self.node.log(self.name, pod, container)
        return path.read_text().splitlines() if path.exists() else []

    async def wait_for_line(self, line: str, pod: str, container: str = "app") -> None:
        """Wait until a container has written this line."""
        await self.eventually(lambda: line in self.log(pod, container))

    @staticmethod
    async def eventually(holds: Callable[[], bool]) -> None:
        """Wait until a condition holds whose change sends no event."""

        async def ask() -> bool:
            return holds()

        await soon(ask)

    def volume(self, pod: Object, name: str) -> Path:
        """Return the folder of a volume of a local pod."""
        uid: str = pod["metadata"]["uid"]
        return self.node.log(self.name, pod["metadata"]["name"], "").parent / uid[:8] / "volumes" / name


@contextlib.asynccontextmanager
async def space(api: Api, node: LocalNode) -> AsyncIterator[Space]:
    """Create a namespace that accepts pods, and stop its pods afterwards."""
    name = f"t-{secrets.token_hex(3)}"
    await api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    created = Space(api, node, name)
    try:
        async with asyncio.timeout(30):
            while not await api.list(f"/api/v1/namespaces/{name}/serviceaccounts"):  # noqa: ASYNC110 - polling will do
                await asyncio.sleep(0.05)
        yield created
    finally:
        await stop_namespace(api, name)


async def stop_namespace(api: Api, name: str) -> None:
    """Delete the objects in a test's namespace that controllers still reconcile; the others end with the control plane.

    Deleting the namespace itself would cost 0.25 s of CPU: every kind is listed. Owners are deleted before the objects
    that they would recreate.
    """
    for collection in _RECONCILED:
        try:
            await api.delete(collection.format(name))
        except ApiError as error:
            if error.status != 404:  # Rota's kinds may not be installed
                raise


def is_ready(pod: Object) -> bool:
    """Whether a pod is Ready."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def container(pod: Object, name: str = "app") -> Object:
    """Return the status of a pod's container; an empty one if the pod has none yet."""
    status = pod.get("status", {})
    statuses = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return next(
        (entry for entry in statuses if entry["name"] == name), {"state": {}, "lastState": {}, "restartCount": 0}
    )


def waits_for(message: str) -> Callable[[Object], bool]:
    """Return the condition that a pod's container waits with this message.

    A pod of a new namespace may wait for the namespace's root certificates first, with a message of its own.
    """
    return lambda pod: message in container(pod).get("state", {}).get("waiting", {}).get("message", "")
