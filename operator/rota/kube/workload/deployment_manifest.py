"""Manifest of the Deployment of a group that has a template; pure functions."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from rota.kube.client.objects import GROUP_LABEL, TEMPLATE_DIGEST_ANNOTATION, CustomResource
from rota.kube.workload.injection import annotations_of, find_part, grace_period, remove_sidecar, with_sidecar
from rota.kube.workload.sidecar_container import JsonObject, SidecarPart, SidecarSpec, build_part
from rota.spec import GroupSpec

MANAGED_BY_LABELS: Final = {"app.kubernetes.io/managed-by": "rota"}
# End of the digest in the annotation's value. Earlier operators, which do not know all volumes of this sidecar, write
# no such suffix. After a rollback they find an unknown digest, and replace the sidecar instead of keeping a part of it.
_DIGEST_SUFFIX = "-2"


def build_manifest(
    body: CustomResource, spec: GroupSpec, sidecar: SidecarSpec, current: Mapping[str, Any] | None = None
) -> JsonObject:
    """Return the Deployment of a group that has a template, as a body for a server-side apply.

    `current` is the existing Deployment; None: there is none. Without autoUpgrade, its sidecar container and volumes
    stay as an earlier version of the operator made them, until the user changes template or sidecar settings: an
    upgrade of the operator must not roll pods.
    """
    name = body.metadata.name
    template = remove_sidecar(spec.template or {})
    digest = _template_digest(template, sidecar)
    part = build_part(template, name, sidecar)
    digest_annotation = digest + _DIGEST_SUFFIX
    if current and not spec.sidecar.auto_upgrade:
        existing_part = _part_if_unchanged(current, digest)
        if existing_part:
            part = existing_part
            digest_annotation = annotations_of(current)[TEMPLATE_DIGEST_ANNOTATION]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "namespace": body.metadata.namespace,
            "labels": {GROUP_LABEL: name, **MANAGED_BY_LABELS},
            "annotations": {TEMPLATE_DIGEST_ANNOTATION: digest_annotation},
            "ownerReferences": [owner_reference(body)],
        },
        "spec": {
            **({} if spec.replicas is None else {"replicas": spec.replicas}),  # left out: an autoscaler may set it
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


def _part_if_unchanged(current: Mapping[str, Any], digest: str) -> SidecarPart | None:
    """Return the sidecar that is in the Deployment; None if the user has changed template or settings since then."""
    if annotations_of(current).get(TEMPLATE_DIGEST_ANNOTATION, "").removesuffix(_DIGEST_SUFFIX) != digest:
        return None
    return find_part(current["spec"]["template"])


def owner_reference(body: CustomResource) -> JsonObject:
    """Return the owner reference to a group, with which an object is deleted when the group is deleted."""
    kind = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup"}
    identity = {"name": body.metadata.name, "uid": body.metadata.uid}
    return {**kind, **identity, "controller": True, "blockOwnerDeletion": False}


def _template_digest(template: JsonObject, sidecar: SidecarSpec) -> str:
    """Return a digest of all that the user can specify about the pods; the sidecar's image is no part of it."""
    secrets = [sidecar.credentials_secret, sidecar.ca_secret]
    # Only if set: otherwise the digest would differ from those of earlier versions, and all pods would be rolled.
    if sidecar.client_certificate_secret:
        secrets.append(sidecar.client_certificate_secret)
    parts = [template, dict(sidecar.resources), secrets, grace_period(template["spec"], sidecar.drain_timeout)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
