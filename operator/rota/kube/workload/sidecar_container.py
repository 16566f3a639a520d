"""Sidecar as this version injects it into pods: its container, volumes and mounts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, NamedTuple, Self

from rota.kube.client.objects import CONTROL, CONTROL_PORT, DOCUMENTS, KEY, REPORT_PORT, key_secret_of, record_of
from rota.kube.client.pod_status import SIDECAR
from rota.spec import GroupSpec, Reference

Object = dict[str, Any]  # of JSON

IMAGE: Final = "ghcr.io/rota-dev/rota-sidecar"
STATE: Final = "/var/lib/rota"
RUN: Final = "/run/rota"  # directory of the socket for the sidecar's preStop hook
STATE_LIMIT: Final = (
    "256Mi"  # the kubelet evicts a pod above it; the sidecar stops writing at limited_files.QUOTA_BYTES, below it
)
_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - a path, not a secret
_RESOURCES = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
_SECURITY = {  # of the container, because the pod's may be weaker
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


VOLUME_NAMES: Final = {
    "rota-documents",
    "rota-state",
    "rota-run",
    "rota-key",
    "rota-credentials",
    "rota-ca",
    "rota-client",
    "rota-no-token",
}


def newest_image() -> str:
    """Return the sidecar image of this version."""
    return f"{IMAGE}:{version('rota-operator')}"


@dataclass(frozen=True, kw_only=True)
class SidecarSpec:
    """Settings of the sidecar of a group's pods."""

    image: str
    drain_timeout: float = 30.0
    resources: Mapping[str, Any] = field(default_factory=dict)  # empty: the defaults
    credentials_secret: str = ""
    ca_secret: str = ""
    client_secret: str = ""

    @classmethod
    def of(cls, spec: GroupSpec, image: str, drain_timeout: float) -> Self:
        """Return the settings that a group's spec asks for."""
        rocketmq = spec.broker.rocketmq
        return cls(
            image=image,
            drain_timeout=drain_timeout,
            resources=spec.sidecar.resources,
            credentials_secret=_name(rocketmq.credentials_secret),
            ca_secret=_name(rocketmq.tls.ca_secret),
            client_secret=_name(rocketmq.tls.client_secret),
        )


def _name(secret: Reference | None) -> str:
    return secret.name if secret else ""


class SidecarPart(NamedTuple):
    """The injected part of a pod template: the sidecar, and the volumes that only the sidecar mounts."""

    container: Object
    volumes: list[Object]


class _Volume(NamedTuple):
    """A volume of the sidecar, and its mount path."""

    name: str
    path: str
    source: Object
    told: str = ""  # the environment variable with the path


def new_part(template: Object, group: str, sidecar: SidecarSpec) -> SidecarPart:
    """Return the sidecar as this version injects it."""
    volumes = [*_volumes(group, sidecar)]
    mounts: list[Object] = [{"name": volume.name, "mountPath": volume.path, "readOnly": True} for volume in volumes]
    app_mount = _state_of_app(template["spec"])
    state = _Volume("rota-state", STATE, {"emptyDir": {"sizeLimit": STATE_LIMIT}}, "ROTA_STATE")
    run = _Volume("rota-run", RUN, {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}, "ROTA_RUN")
    mounts.append(app_mount or {"name": state.name, "mountPath": state.path})
    mounts.append({"name": run.name, "mountPath": run.path})
    paths = {volume.told: volume.path for volume in [*volumes, state, run] if volume.told}
    added = [*volumes, *([] if app_mount else [state]), run]
    return SidecarPart(_container(sidecar, paths, mounts), [{"name": volume.name, **volume.source} for volume in added])


def _volumes(group: str, sidecar: SidecarSpec) -> Iterator[_Volume]:
    """Yield the volumes that the sidecar only reads."""
    documents = {"configMap": {"name": record_of(group), "optional": True}}  # pods may start before the first one
    yield _Volume("rota-documents", DOCUMENTS, documents, "ROTA_DOCUMENTS")
    yield _Volume("rota-key", KEY, {"secret": {"secretName": key_secret_of(group), "optional": True}}, "ROTA_KEY")
    if sidecar.credentials_secret:
        source = {"secret": {"secretName": sidecar.credentials_secret}}
        yield _Volume("rota-credentials", "/etc/rota-credentials", source, "ROTA_CREDENTIALS")
    if sidecar.ca_secret:
        yield _Volume("rota-ca", "/etc/rota-ca", {"secret": {"secretName": sidecar.ca_secret}}, "ROTA_CA")
    if sidecar.client_secret:
        source = {"secret": {"secretName": sidecar.client_secret}}
        yield _Volume("rota-client", "/etc/rota-client", source, "ROTA_CLIENT")
    yield _Volume("rota-no-token", _TOKEN, {"emptyDir": {}})  # hides the pod's token from this container


def _state_of_app(spec: Object) -> Object | None:
    """Return the mount of a volume that the app provides at STATE: the sidecar then keeps its state on it."""
    for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
        for mount in container.get("volumeMounts") or []:
            if mount["mountPath"].rstrip("/") == STATE:
                source = {key: mount[key] for key in ("name", "subPath", "subPathExpr") if key in mount}
                return {**source, "mountPath": STATE}
    return None


def _container(sidecar: SidecarSpec, paths: Mapping[str, str], mounts: list[Object]) -> Object:
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
            *({"name": name, "value": path} for name, path in paths.items()),
        ],
        "ports": [
            {"name": "rota-report", "containerPort": REPORT_PORT},
            {"name": CONTROL, "containerPort": CONTROL_PORT},
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-m", "rota.sidecar.prestop"]}}},
        "startupProbe": _probe("/healthz", period=1, timeout=2, failures=60),
        "readinessProbe": _probe("/readyz", period=1, timeout=1, failures=2),  # a hanging one loses Ready within 4 s
        "livenessProbe": _probe("/healthz", period=10, timeout=5, failures=6),
        "resources": dict(sidecar.resources) or _RESOURCES,
        "securityContext": _SECURITY,
        "volumeMounts": mounts,
    }


def _probe(path: str, *, period: int, timeout: int, failures: int) -> Object:
    """Return an HTTP probe; it names no host, so the kubelet requests the pod's own address."""
    timing = {"periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}
    return {"httpGet": {"path": path, "port": REPORT_PORT}, **timing}
