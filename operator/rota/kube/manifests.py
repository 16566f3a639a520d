"""Pod templates with the sidecar in them, and the Deployment of a group: values in, values out.

What is put in can be taken out again. Almost all of it is known by its name; what is not (a grace period that was
raised, a list that was there but empty) is noted in one annotation of the template, if there is any such thing.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, NamedTuple, Self

from rota.kube.objects import (
    CONTROL,
    CONTROL_PORT,
    DOCUMENTS,
    GROUP_LABEL,
    KEY,
    REPORT_PORT,
    SIDECAR,
    WISH,
    Custom,
    key_secret_of,
    record_of,
)
from rota.kube.pod_template import check_template
from rota.kube.undo import noted, undone
from rota.spec import GroupSpec, Mistake

IMAGE: Final = "ghcr.io/rota-dev/rota-sidecar"
OURS: Final = {"app.kubernetes.io/managed-by": "rota"}
NOTE: Final = "rota.dev/sidecar"  # the image that was put in
BEFORE: Final = "rota.dev/before"  # what only a note can bring back
STATE: Final = "/var/lib/rota"
RUN: Final = "/run/rota"  # where the socket is for the sidecar's hook
STATE_LIMIT: Final = (
    "256Mi"  # the kubelet evicts a pod above it; the sidecar stops writing at notes.QUOTA_BYTES, below it
)

_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - where it lies, not what it is
# What an app's container waits for before it ends. That of earlier versions also began the drain.
_DRAINED, _DRAIN = "/v1/drained", "/v1/drain"
# Suffix of the annotation WISH. An operator that is rolled back to an earlier version does not recognise it and
# replaces the sidecar, which it could not preserve, because it does not know all of its volumes.
_WISH_SUFFIX = "-2"
_GRACE = 30  # seconds that Kubernetes gives a pod of which nothing is said
_AFTER_DRAIN = 15  # seconds from the end of a drain to the end of the pod
_RESOURCES = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
_SECURITY = {  # the container's own, because a pod's may say less
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}

Object = dict[str, Any]


def newest_image() -> str:
    """Return the image of the sidecar that is of this version."""
    return f"{IMAGE}:{version('rota-operator')}"


@dataclass(frozen=True, kw_only=True)
class SidecarSpec:
    """What the sidecar of a group's pods shall be."""

    image: str
    drain_timeout: float = 30.0
    resources: Mapping[str, Any] = field(default_factory=dict)  # none: ours
    credentials_secret: str = ""
    ca_secret: str = ""

    @classmethod
    def of(cls, spec: GroupSpec, image: str, drain_timeout: float) -> Self:
        """Return what a group asks for."""
        rocketmq = spec.broker.rocketmq
        credentials, authorities = rocketmq.credentials_secret, rocketmq.tls.ca_secret
        return cls(
            image=image,
            drain_timeout=drain_timeout,
            resources=spec.sidecar.resources,
            credentials_secret=credentials.name if credentials else "",
            ca_secret=authorities.name if authorities else "",
        )


class _Part(NamedTuple):
    """What is put in: the sidecar, and the volumes that nobody but it has."""

    container: Object
    volumes: list[Object]


class _Volume(NamedTuple):
    """A volume of ours, and where the sidecar has it."""

    name: str
    path: str
    source: Object
    told: str = ""  # the variable that says where


_NAMES = {"rota-documents", "rota-state", "rota-run", "rota-key", "rota-credentials", "rota-ca", "rota-no-token"}


def injected(pod_template: Mapping[str, Any], group: str, sidecar: SidecarSpec) -> Object:
    """Return a pod template with the group's label and the sidecar in it.

    One that has them already is brought up to date. What cannot be a pod template raises a `Mistake`.
    """
    template = uninjected(pod_template)
    return _with(template, group, sidecar.drain_timeout, _new_part(template, group, sidecar))


def uninjected(pod_template: Mapping[str, Any]) -> Object:
    """Return a pod template as it was before anything was put in; one in which nothing was stays as it is."""
    check_template(pod_template)
    template = dict(pod_template)
    if not _is_injected(template):
        return template
    found: Object = undone(_stripped(template), _annotations(template).get(BEFORE, ""))
    return found


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
    part, mark = _new_part(template, name, sidecar), wish + _WISH_SUFFIX
    if standing and not spec.sidecar.auto_upgrade and (existing := _part_as_wished(standing, wish)):
        part, mark = existing, _annotations(standing)[WISH]
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
            "template": _with(template, name, sidecar.drain_timeout, part),
        },
    }


def _part_as_wished(standing: Mapping[str, Any], wish: str) -> _Part | None:
    """Return what was put in already, by this version or an earlier one, if the user wants nothing else."""
    if _annotations(standing).get(WISH, "").removesuffix(_WISH_SUFFIX) != wish:
        return None
    return _part_of(standing["spec"]["template"])


def owner(body: Custom) -> Object:
    """Return the reference by which what we make goes away with its group."""
    who = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup"}
    named = {"name": body.metadata.name, "uid": body.metadata.uid}
    return {**who, **named, "controller": True, "blockOwnerDeletion": False}


# What is put in.


def _with(template: Object, group: str, drain_timeout: float, part: _Part) -> Object:
    """Put it in, and note what could not be told afterwards."""
    spec = template["spec"]
    _refuse_namesakes(spec, part)
    image = str(part.container["image"])
    made = _marked(template, {GROUP_LABEL: group}, {NOTE: image}) | {
        "spec": {
            **spec,
            "initContainers": [*(spec.get("initContainers") or []), part.container],  # the app's own do not wait
            "containers": [_draining(container, _drain_path(part)) for container in spec["containers"]],
            "volumes": [*(spec.get("volumes") or []), *part.volumes],
            **_grace(spec, drain_timeout),
        },
    }
    note = noted(_stripped(made), template)
    return _marked(made, {}, {BEFORE: note}) if note else made


def _marked(template: Object, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Object:
    metadata = template.get("metadata") or {}
    marked = {
        **metadata,
        "labels": {**(metadata.get("labels") or {}), **labels},
        "annotations": {**(metadata.get("annotations") or {}), **annotations},
    }
    return {**template, "metadata": marked}


def _grace(spec: Object, drain_timeout: float) -> Object:
    """Return the grace period, raised if a drain would not fit into it."""
    given, needed = spec.get("terminationGracePeriodSeconds"), math.ceil(drain_timeout) + _AFTER_DRAIN
    return {"terminationGracePeriodSeconds": needed} if (_GRACE if given is None else given) < needed else {}


def _draining(container: Object, path: str) -> Object:
    """Let the sidecar drain before an app's container ends, where the app has nothing else to do then."""
    lifecycle = container.get("lifecycle") or {}
    if lifecycle.get("preStop"):
        return container
    return {**container, "lifecycle": {**lifecycle, "preStop": {"httpGet": {"path": path, "port": REPORT_PORT}}}}


def _drain_path(part: _Part) -> str:
    """Return what app containers request of this sidecar before they end: that of earlier versions has no own hook."""
    return _DRAINED if part.container.get("lifecycle") else _DRAIN


def _new_part(template: Object, group: str, sidecar: SidecarSpec) -> _Part:
    """Return the sidecar as this version makes it."""
    volumes = [*_volumes(group, sidecar)]
    mounts: list[Object] = [{"name": it.name, "mountPath": it.path, "readOnly": True} for it in volumes]
    kept = _state_of_app(template["spec"])
    state = _Volume("rota-state", STATE, {"emptyDir": {"sizeLimit": STATE_LIMIT}}, "ROTA_STATE")
    run = _Volume("rota-run", RUN, {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}, "ROTA_RUN")
    mounts.append(kept or {"name": state.name, "mountPath": state.path})
    mounts.append({"name": run.name, "mountPath": run.path})
    told = {it.told: it.path for it in [*volumes, state, run] if it.told}
    made = [*volumes, *([] if kept else [state]), run]
    return _Part(_container(sidecar, told, mounts), [{"name": it.name, **it.source} for it in made])


def _volumes(group: str, sidecar: SidecarSpec) -> Iterator[_Volume]:
    """Yield what the sidecar only reads."""
    documents = {"configMap": {"name": record_of(group), "optional": True}}  # pods may come before the first one
    yield _Volume("rota-documents", DOCUMENTS, documents, "ROTA_DOCUMENTS")
    yield _Volume("rota-key", KEY, {"secret": {"secretName": key_secret_of(group), "optional": True}}, "ROTA_KEY")
    if sidecar.credentials_secret:
        source = {"secret": {"secretName": sidecar.credentials_secret}}
        yield _Volume("rota-credentials", "/etc/rota-credentials", source, "ROTA_CREDENTIALS")
    if sidecar.ca_secret:
        yield _Volume("rota-ca", "/etc/rota-ca", {"secret": {"secretName": sidecar.ca_secret}}, "ROTA_CA")
    yield _Volume("rota-no-token", _TOKEN, {"emptyDir": {}})  # covers the pod's, for this container only


def _state_of_app(spec: Object) -> Object | None:
    """Return how the app mounts a volume where the sidecar's state lies: then that is where it lies."""
    for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
        for mount in container.get("volumeMounts") or []:
            if mount["mountPath"].rstrip("/") == STATE:
                where = {key: mount[key] for key in ("name", "subPath", "subPathExpr") if key in mount}
                return {**where, "mountPath": STATE}
    return None


def _container(sidecar: SidecarSpec, told: Mapping[str, str], mounts: list[Object]) -> Object:
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
        "HOST_IP": "status.hostIP",
    }
    return {
        "name": SIDECAR,
        "image": sidecar.image,
        "command": ["python", "-m", "rota.sidecar"],
        "restartPolicy": "Always",  # this makes it a sidecar: it starts before the app and ends after it
        "env": [
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
            *({"name": name, "value": path} for name, path in told.items()),
        ],
        "ports": [
            {"name": "rota-report", "containerPort": REPORT_PORT},
            {"name": CONTROL, "containerPort": CONTROL_PORT},
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-m", "rota.sidecar.prestop"]}}},
        "startupProbe": _probe("/healthz", period=1, timeout=2, failures=60),
        "readinessProbe": _probe("/readyz", period=1, timeout=1, failures=2),  # who hangs is not Ready within 4 s
        "livenessProbe": _probe("/healthz", period=10, timeout=5, failures=6),
        "resources": dict(sidecar.resources) or _RESOURCES,
        "securityContext": _SECURITY,
        "volumeMounts": mounts,
    }


def _probe(path: str, *, period: int, timeout: int, failures: int) -> Object:
    """Return a probe of the pod's own address: without a host the kubelet asks there."""
    timing = {"periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}
    return {"httpGet": {"path": path, "port": REPORT_PORT}, **timing}


def _wish(template: Object, sidecar: SidecarSpec) -> str:
    """Return a digest of what the user wants the pods to be; only the sidecar's version is not their wish."""
    secrets = [sidecar.credentials_secret, sidecar.ca_secret]
    wanted = [template, dict(sidecar.resources), secrets, _grace(template["spec"], sidecar.drain_timeout)]
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]


# What is taken out.


def _is_injected(template: Mapping[str, Any]) -> bool:
    return NOTE in _annotations(template) or _sidecar(template["spec"]) is not None


def _annotations(body: Mapping[str, Any]) -> Mapping[str, str]:
    return (body.get("metadata") or {}).get("annotations") or {}


def _sidecar(spec: Mapping[str, Any]) -> Object | None:
    return next((it for it in spec.get("initContainers") or [] if it["name"] == SIDECAR), None)


def _part_of(template: Mapping[str, Any]) -> _Part | None:
    """Return what an earlier version put in."""
    spec = template["spec"]
    container, own = _sidecar(spec), _own(spec)
    return _Part(container, [it for it in spec["volumes"] if it["name"] in own]) if container else None


def _own(spec: Mapping[str, Any]) -> set[str]:
    """Return which volumes are ours: nobody but the sidecar has them."""
    every = [*spec["containers"], *(spec.get("initContainers") or [])]
    mounted = {mount["name"] for it in every if it["name"] != SIDECAR for mount in it.get("volumeMounts") or []}
    ours = {mount["name"] for mount in (_sidecar(spec) or {}).get("volumeMounts") or []}
    return (ours & _NAMES) - mounted


def _stripped(template: Object) -> Object:
    """Take out what is known by its name; what is empty then goes, too."""
    metadata, spec = template.get("metadata") or {}, template["spec"]
    own = _own(spec)
    labels = {key: text for key, text in (metadata.get("labels") or {}).items() if key != GROUP_LABEL}
    annotations = {key: text for key, text in _annotations(template).items() if key not in {NOTE, BEFORE}}
    init = [it for it in spec.get("initContainers") or [] if it["name"] != SIDECAR]
    volumes = [it for it in spec.get("volumes") or [] if it["name"] not in own]
    containers = [_undrained(it) for it in spec["containers"]]
    bare = _set(spec, initContainers=init, volumes=volumes, containers=containers)
    return _set(template, metadata=_set(metadata, labels=labels, annotations=annotations), spec=bare)


def _undrained(container: Object) -> Object:
    lifecycle = container.get("lifecycle") or {}
    asked = (lifecycle.get("preStop") or {}).get("httpGet") or {}
    if asked.get("path") not in {_DRAIN, _DRAINED} or asked.get("port") != REPORT_PORT:
        return container
    return _set(container, lifecycle=_set(lifecycle, preStop=None))


def _set(found: Mapping[str, Any], **parts: Any) -> Object:
    """Return a mapping with some of its parts changed, without those that are empty."""
    changed = {**found, **parts}
    return {key: part for key, part in changed.items() if part or key not in parts}


def _refuse_namesakes(spec: Object, part: _Part) -> None:
    if any(it["name"] == SIDECAR for it in spec["containers"]):
        raise Mistake(f"spec.template.spec.containers has a {SIDECAR}, as the sidecar is called; rename it")
    for name in sorted({it["name"] for it in part.volumes} & {it["name"] for it in spec.get("volumes") or []}):
        raise Mistake(f"spec.template.spec.volumes has a {name}, as a volume of the sidecar is called; rename it")
