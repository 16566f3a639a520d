"""The Deployment of a group that has a template: values in, values out."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from rota.kube.client.objects import (
    GROUP_LABEL,
    WISH,
    Custom,
)
from rota.kube.workload.injection import annotations_of, grace_period, part_of, uninjected, with_sidecar
from rota.kube.workload.sidecar_container import Object, SidecarPart, SidecarSpec, new_part
from rota.spec import GroupSpec

OURS: Final = {"app.kubernetes.io/managed-by": "rota"}
# Suffix of the annotation WISH. An operator that is rolled back to an earlier version does not recognise it and
# replaces the sidecar, which it could not preserve, because it does not know all of its volumes.
_WISH_SUFFIX = "-2"


def deployment(
    body: Custom, spec: GroupSpec, sidecar: SidecarSpec, standing: Mapping[str, Any] | None = None
) -> Object:
    """Return the Deployment of a group that has a template, as a body for a server-side apply.

    `standing` is the Deployment as it is. Unless the group wants upgrades by themselves, its sidecar is left as an
    earlier version of the operator made it, to the last field, while the user wants nothing else: no fleet
    is rolled because the operator is a new one.
    """
    name = body.metadata.name
    template = uninjected(spec.template or {})
    wish = _wish(template, sidecar)
    part, mark = new_part(template, name, sidecar), wish + _WISH_SUFFIX
    if standing and not spec.sidecar.auto_upgrade and (existing := _part_as_wished(standing, wish)):
        part, mark = existing, annotations_of(standing)[WISH]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "namespace": body.metadata.namespace,
            "labels": {GROUP_LABEL: name, **OURS},
            "annotations": {WISH: mark},
            "ownerReferences": [owner(body)],
        },
        "spec": {
            **({} if spec.replicas is None else {"replicas": spec.replicas}),
            "selector": {"matchLabels": {GROUP_LABEL: name}},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {
                    "maxSurge": spec.rollout.max_surge,
                    "maxUnavailable": spec.rollout.max_unavailable,
                },
            },
            "template": with_sidecar(template, name, sidecar.drain_timeout, part),
        },
    }


def _part_as_wished(standing: Mapping[str, Any], wish: str) -> SidecarPart | None:
    """Return what was put in already, by this version or an earlier one, if the user wants nothing else."""
    if annotations_of(standing).get(WISH, "").removesuffix(_WISH_SUFFIX) != wish:
        return None
    return part_of(standing["spec"]["template"])


def owner(body: Custom) -> Object:
    """Return the reference by which what we make goes away with its group."""
    who = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup"}
    named = {"name": body.metadata.name, "uid": body.metadata.uid}
    return {**who, **named, "controller": True, "blockOwnerDeletion": False}


def _wish(template: Object, sidecar: SidecarSpec) -> str:
    """Return a digest of what the user wants the pods to be; only the sidecar's version is not their wish."""
    secrets = [sidecar.credentials_secret, sidecar.ca_secret]
    if sidecar.client_secret:  # only then: a new version of Rota must not roll fleets that do not use it
        secrets.append(sidecar.client_secret)
    wanted = [template, dict(sidecar.resources), secrets, grace_period(template["spec"], sidecar.drain_timeout)]
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
