"""Rota on the ground: its kinds in an API server, objects of them, and what they say of themselves."""

from pathlib import Path
from typing import Any

import yaml

from ground.api import Api, ApiError, Object
from ground.poll import soon

CRDS = Path(__file__).parents[2] / "crds"
VERSION = "rota.dev/v1alpha1"

BUSY = {404, 429, 503}  # how the API server refuses requests for a kind whose definition has just changed


async def define(api: Api) -> dict[str, Object]:
    """Define the kinds, wait until objects of them are taken, and return the definitions by kind."""
    bodies: list[Object] = [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]
    return {body["spec"]["names"]["kind"]: await _defined(api, body) for body in bodies}


async def _defined(api: Api, body: Object) -> Object:
    where = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
    await api.patch(where, body, "apply")

    async def served() -> bool:  # and established: the API server serves objects as soon as it accepts the names
        try:
            await api.get(f"/apis/{VERSION}/{body['spec']['names']['plural']}")
        except ApiError as error:
            if error.status not in BUSY:
                raise
            return False
        return conditions(await api.get(where)).get("Established", {}).get("status") == "True"

    await soon(served)
    return await api.get(where)


def made(kind: str, name: str, **spec: Any) -> Object:
    """Return an object of one of the kinds."""
    return {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


# The other conditions of a group are its problems: those with status False are over.
PERMANENT = {"Ready", "Progressing", "Degraded", "Reconciling", "Stalled", "Accepted"}


def conditions(found: Object) -> dict[str, Object]:
    """Return an object's conditions by type, without problems that are over."""
    return {
        condition["type"]: condition
        for condition in found.get("status", {}).get("conditions") or []
        if condition["type"] in PERMANENT or condition["status"] == "True"
    }


def at_rest(group: Object, members: int) -> bool:
    """Whether so many members work all there is, and nothing goes on."""
    told = conditions(group)
    calm = [told.get(kind, {}).get("status") for kind in ("Ready", "Progressing")] == ["True", "False"]
    return calm and group["status"].get("members") == members
