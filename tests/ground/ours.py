"""Rota on the ground: its kinds in an API server, objects of them, and their conditions."""

from pathlib import Path
from typing import Any

import yaml

from ground.api import Api, ApiError, Object
from ground.poll import soon

CRDS = Path(__file__).parents[2] / "crds"
VERSION = "rota.dev/v1alpha1"

BUSY = {404, 429, 503}  # status codes of the API server for a kind whose definition has just changed


async def define(api: Api) -> dict[str, Object]:
    """Define the kinds, wait until the API server accepts objects of them, and return the definitions by kind."""
    bodies: list[Object] = [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]
    return {body["spec"]["names"]["kind"]: await _defined(api, body) for body in bodies}


async def _defined(api: Api, body: Object) -> Object:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
    await api.patch(path, body, "apply")

    async def served() -> bool:  # and established: the API server serves objects as soon as it accepts the names
        try:
            await api.get(f"/apis/{VERSION}/{body['spec']['names']['plural']}")
        except ApiError as error:
            if error.status not in BUSY:
                raise
            return False
        return conditions(await api.get(path)).get("Established", {}).get("status") == "True"

    await soon(served)
    return await api.get(path)


def made(kind: str, name: str, **spec: Any) -> Object:
    """Return an object of one of the kinds."""
    return {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


# The other conditions of a group are its problems: those with status False are over.
PERMANENT = {"Ready", "Progressing", "Degraded", "Reconciling", "Stalled", "Accepted"}


def conditions(resource: Object) -> dict[str, Object]:
    """Return an object's conditions by type, without problems that are over."""
    return {
        condition["type"]: condition
        for condition in resource.get("status", {}).get("conditions") or []
        if condition["type"] in PERMANENT or condition["status"] == "True"
    }


def at_rest(group: Object, members: int) -> bool:
    """Whether this many members own all queues, and no handover is in progress."""
    statuses = {kind: condition.get("status") for kind, condition in conditions(group).items()}
    calm = (statuses.get("Ready"), statuses.get("Progressing")) == ("True", "False")
    return calm and group["status"].get("members") == members
