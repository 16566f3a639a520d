"""Manifest of the sidecar as this version injects it into pods: its container, volumes and mounts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, NamedTuple, Self

from rota.kube.client.objects import (
    ASSIGNMENT_MOUNT_PATH,
    CONTROL_PORT,
    CONTROL_PORT_NAME,
    KEY_MOUNT_PATH,
    REPORT_PORT,
    assignment_name,
    key_secret_name,
)
from rota.kube.client.pod_status import SIDECAR_CONTAINER
from rota.spec import GroupSpec, Reference

JsonObject = dict[str, Any]  # a manifest, or a part of one, as decoded from JSON

IMAGE: Final = "ghcr.io/rota-dev/rota-sidecar"
STATE_MOUNT_PATH: Final = "/var/lib/rota"
RUN_MOUNT_PATH: Final = "/run/rota"  # directory of the socket for the sidecar's preStop hook
# The kubelet evicts a pod whose state is larger; the sidecar stops writing earlier, at limited_files.QUOTA_BYTES.
STATE_SIZE_LIMIT: Final = "256Mi"
_TOKEN_MOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - a path, not a secret
_DEFAULT_RESOURCES = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
_SECURITY_CONTEXT = {  # set on the container, because the pod's may be weaker
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}

VOLUME_NAMES: Final = {  # all that a sidecar may have: removal recognises the injected volumes by these names
    "rota-documents",
    "rota-state",
    "rota-run",
    "rota-key",
    "rota-credentials",
    "rota-ca",
    "rota-client",
    "rota-no-token",
}


def default_image() -> str:
    """Return the sidecar image of this version."""
    return f"{IMAGE}:{version('rota-operator')}"


@dataclass(frozen=True, kw_only=True)
class SidecarSpec:
    """Settings of the sidecar of a group's pods."""

    image: str
    drain_timeout: float = 30.0  # in seconds, for the pod's grace period
    resources: Mapping[str, Any] = field(default_factory=dict)  # empty: the defaults
    credentials_secret: str = ""
    ca_secret: str = ""
    client_certificate_secret: str = ""  # tls.clientSecret

    @classmethod
    def from_spec(cls, spec: GroupSpec, image: str, drain_timeout: float) -> Self:
        """Return the settings that a group's spec asks for."""
        rocketmq = spec.broker.rocketmq
        return cls(
            image=image,
            drain_timeout=drain_timeout,
            resources=spec.sidecar.resources,
            credentials_secret=_secret_name(rocketmq.credentials_secret),
            ca_secret=_secret_name(rocketmq.tls.ca_secret),
            client_certificate_secret=_secret_name(rocketmq.tls.client_secret),
        )


def _secret_name(secret: Reference | None) -> str:
    return secret.name if secret else ""


class SidecarPart(NamedTuple):
    """The injected part of a pod template: the sidecar, and the volumes that only the sidecar mounts."""

    container: JsonObject
    volumes: list[JsonObject]


class _SidecarVolume(NamedTuple):
    """A volume of the sidecar, and its mount path."""

    name: str
    mount_path: str
    source: JsonObject
    env_name: str = ""  # the environment variable with the path

    @property
    def mount(self) -> JsonObject:
        return {"name": self.name, "mountPath": self.mount_path}

    @property
    def manifest(self) -> JsonObject:
        return {"name": self.name, **self.source}


def build_part(template: JsonObject, group: str, sidecar: SidecarSpec) -> SidecarPart:
    """Return the sidecar as this version injects it.

    Its state is on a volume of the app if the app mounts one at STATE_MOUNT_PATH, else on an emptyDir.
    """
    read_only = [*_volumes(group, sidecar)]
    state = _SidecarVolume("rota-state", STATE_MOUNT_PATH, {"emptyDir": {"sizeLimit": STATE_SIZE_LIMIT}}, "ROTA_STATE")
    run = _SidecarVolume("rota-run", RUN_MOUNT_PATH, {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}, "ROTA_RUN")
    app_mount = _app_state_mount(template["spec"])
    mounts = [volume.mount | {"readOnly": True} for volume in read_only]
    mounts += [app_mount or state.mount, run.mount]
    injected = [*read_only, run] if app_mount else [*read_only, state, run]
    # `state` sets the variable with the path, which is the same on the app's volume.
    container = _container(sidecar, [*read_only, state, run], mounts)
    return SidecarPart(container, [volume.manifest for volume in injected])


def _volumes(group: str, sidecar: SidecarSpec) -> Iterator[_SidecarVolume]:
    """Yield the volumes that the sidecar only reads."""
    # "optional": a pod may start before the first assignment is written.
    documents = {"configMap": {"name": assignment_name(group), "optional": True}}
    yield _SidecarVolume("rota-documents", ASSIGNMENT_MOUNT_PATH, documents, "ROTA_DOCUMENTS")
    key = {"secret": {"secretName": key_secret_name(group), "optional": True}}
    yield _SidecarVolume("rota-key", KEY_MOUNT_PATH, key, "ROTA_KEY")
    if sidecar.credentials_secret:
        source = {"secret": {"secretName": sidecar.credentials_secret}}
        yield _SidecarVolume("rota-credentials", "/etc/rota-credentials", source, "ROTA_CREDENTIALS")
    if sidecar.ca_secret:
        yield _SidecarVolume("rota-ca", "/etc/rota-ca", {"secret": {"secretName": sidecar.ca_secret}}, "ROTA_CA")
    if sidecar.client_certificate_secret:
        source = {"secret": {"secretName": sidecar.client_certificate_secret}}
        yield _SidecarVolume("rota-client", "/etc/rota-client", source, "ROTA_CLIENT")
    # Hides the ServiceAccount's token from the sidecar, which does not talk to the API server.
    yield _SidecarVolume("rota-no-token", _TOKEN_MOUNT_PATH, {"emptyDir": {}})


def _app_state_mount(spec: JsonObject) -> JsonObject | None:
    """Return the mount of a volume that the app provides at STATE_MOUNT_PATH, for the sidecar to keep its state on."""
    for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
        for mount in container.get("volumeMounts") or []:
            if mount["mountPath"].rstrip("/") == STATE_MOUNT_PATH:
                source = {key: mount[key] for key in ("name", "subPath", "subPathExpr") if key in mount}
                return {**source, "mountPath": STATE_MOUNT_PATH}
    return None


def _container(sidecar: SidecarSpec, volumes: list[_SidecarVolume], mounts: list[JsonObject]) -> JsonObject:
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
        "HOST_IP": "status.hostIP",
    }
    return {
        "name": SIDECAR_CONTAINER,
        "image": sidecar.image,
        "command": ["python", "-m", "rota.sidecar"],
        "restartPolicy": "Always",  # this makes it a sidecar: it starts before the app and ends after it
        "env": [
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
            *({"name": volume.env_name, "value": volume.mount_path} for volume in volumes if volume.env_name),
        ],
        "ports": [
            {"name": "rota-report", "containerPort": REPORT_PORT},
            {"name": CONTROL_PORT_NAME, "containerPort": CONTROL_PORT},
        ],
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-m", "rota.sidecar.prestop"]}}},
        "startupProbe": _probe("/healthz", period=1, timeout=2, failures=60),
        "readinessProbe": _probe("/readyz", period=1, timeout=1, failures=2),  # if it hangs: not Ready within 4 s
        "livenessProbe": _probe("/healthz", period=10, timeout=5, failures=6),
        "resources": dict(sidecar.resources) or _DEFAULT_RESOURCES,
        "securityContext": _SECURITY_CONTEXT,
        "volumeMounts": mounts,
    }


def _probe(path: str, *, period: int, timeout: int, failures: int) -> JsonObject:
    """Return an HTTP probe; it names no host, so the kubelet requests the pod's own address."""
    timing = {"periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}
    return {"httpGet": {"path": path, "port": REPORT_PORT}, **timing}
