"""Types of Kubernetes objects, with the fields that the operator uses; no other field is kept in memory."""

import re
from collections.abc import Container, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from rota.documents import GZIP_KEY, PLAIN_KEY
from rota.kube.client.deployment_status import DeploymentStatus, RolloutState
from rota.kube.client.pod_status import PodStatus, sidecars_in, trim_status
from rota.model import Holder, Poke

GROUP_LABEL = "rota.dev/group"
# On a pod: its last poke (`rota.model.Poke`). Any changed annotation makes the kubelet refresh the mounted volumes.
POKE_ANNOTATION = "rota.dev/generation"
# On a pod: fingerprint of the newest key of its group, changed for the same effect.
KEY_FINGERPRINT_ANNOTATION = "rota.dev/key"
# On a Deployment: digest of the desired template and sidecar, without the sidecar's version.
TEMPLATE_DIGEST_ANNOTATION = "rota.dev/wish"
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
ASSIGNMENT_MOUNT_PATH = "/etc/rota"  # where the sidecar mounts the group's assignment
KEY_MOUNT_PATH = "/etc/rota-key"  # where the sidecar mounts the group's key
REPORT_PORT = 9911  # the sidecar's port for probes and metrics; in pods without a control port also for reports, drains
CONTROL_PORT = 9913  # the sidecar's port for reports and drains
CONTROL_PORT_NAME = "rota-control"  # the name of the control port in a pod's spec
SETTINGS_KEY = "group.json"  # the key of the group's settings in its ConfigMap
MAX_SPEC_BYTES = 128 * 1024  # of a group's or policy's spec, which can take 20 times as much as Python objects
MAX_DEPLOYMENT_BYTES = 2 * MAX_SPEC_BYTES  # of a Deployment's spec: a group's template, the sidecar and defaults
MAX_LABELS = 100  # labels that are kept of an object
ObjectKey = tuple[str, str]  # namespace and name of an object

_ASSIGNMENT_SUFFIX = "-rota"  # suffix of the name of an assignment's ConfigMap

T = TypeVar("T")


def assignment_name(group: str) -> str:
    """Return the name of the ConfigMap with a group's assignment."""
    return group + _ASSIGNMENT_SUFFIX


def key_secret_name(group: str) -> str:
    """Return the name of the Secret with a group's key."""
    return f"{assignment_name(group)}-key"


class OwnerReference(Struct, frozen=True, rename="camel"):
    """The uid of an owner, and whether the owner controls the object."""

    uid: str
    controller: bool = False


class Metadata(Struct, frozen=True, rename="camel"):
    """Metadata of any object."""

    name: str
    uid: str = ""
    namespace: str = ""
    resource_version: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []

    @property
    def key(self) -> ObjectKey:
        """Its namespace and name."""
        return self.namespace, self.name

    @property
    def version_number(self) -> int:
        """The resource version as a number, which only grows: it orders states that arrive from several watches."""
        return int(self.resource_version) if self.resource_version.isdecimal() else 0

    @property
    def group_key(self) -> ObjectKey:
        """The namespace and name of the group in its label."""
        return self.namespace, self.labels.get(GROUP_LABEL, "")

    def is_owned_by(self, uid: str) -> bool:
        """Whether the object with this uid controls it."""
        return OwnerReference(uid, controller=True) in self.owner_references


def _trim_metadata(metadata: Metadata, annotations: Container[str]) -> Metadata:
    """Return metadata with these annotations only, and a bounded number of labels and owners.

    If no owner is the controller, the first owner is kept: Rota adopts a ConfigMap only if it has no owner.
    A tenant can fill an object up to 1.5 MiB, and objects are kept for as long as they exist.
    """
    labels = metadata.labels
    if len(labels) > MAX_LABELS:
        labels = _keep_keys(labels, {GROUP_LABEL}) | dict([*labels.items()][:MAX_LABELS])
    owners = metadata.owner_references
    return replace(
        metadata,
        labels=labels,
        annotations=_keep_keys(metadata.annotations, annotations),
        owner_references=[owner for owner in owners if owner.controller] or owners[:1],
    )


def _keep_keys(values: Mapping[str, T], keys: Container[str]) -> dict[str, T]:
    return {key: value for key, value in values.items() if key in keys}


class PartialObjectMetadata(Struct, frozen=True):
    """An object of which only the metadata matter."""

    metadata: Metadata


class _Mount(Struct, frozen=True, rename="camel"):
    name: str
    mount_path: str


class _Port(Struct, frozen=True, rename="camel"):
    container_port: int
    name: str = ""


class _Container(Struct, frozen=True, rename="camel"):
    name: str
    volume_mounts: list[_Mount] = []
    ports: list[_Port] = []


class _ConfigMapSource(Struct, frozen=True):
    name: str = ""


class _Volume(Struct, frozen=True, rename="camel"):
    name: str
    config_map: _ConfigMapSource = _ConfigMapSource()


class _PodSpec(Struct, frozen=True, rename="camel"):
    node_name: str = ""
    host_network: bool = False
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    volumes: list[_Volume] = []

    @property
    def mounts(self) -> list[_Mount]:
        """The mounts of all containers: of the sidecar alone, once the spec is trimmed."""
        mounts: list[_Mount] = []
        for container in (*self.init_containers, *self.containers):
            mounts += container.volume_mounts
        return mounts

    def volumes_mounted_at(self, path: str) -> set[str]:
        """Return the names of the volumes that are mounted at a path."""
        return {mount.name for mount in self.mounts if mount.mount_path == path}


_POD_ANNOTATIONS = frozenset({POKE_ANNOTATION, KEY_FINGERPRINT_ANNOTATION, DELETION_COST_ANNOTATION})


def _trim_pod_spec(spec: _PodSpec) -> _PodSpec:
    """Return the part of a pod's spec that concerns the sidecar and its ConfigMap."""
    init_containers = [*map(_trim_container, sidecars_in(spec.init_containers))]
    containers = [*map(_trim_container, sidecars_in(spec.containers))]
    trimmed = replace(spec, init_containers=init_containers, containers=containers)
    mounted = {mount.name for mount in trimmed.mounts}
    return replace(trimmed, volumes=[volume for volume in spec.volumes if volume.name in mounted])


def _trim_container(sidecar: _Container) -> _Container:
    """Return the container of a sidecar with Rota's mounts, and no port but the control port."""
    mounts = [mount for mount in sidecar.volume_mounts if mount.mount_path in {ASSIGNMENT_MOUNT_PATH, KEY_MOUNT_PATH}]
    control_ports = [port for port in sidecar.ports if port.name == CONTROL_PORT_NAME]
    return replace(sidecar, volume_mounts=mounts, ports=control_ports)


class Pod(Struct, frozen=True):
    """A pod of a group."""

    metadata: Metadata
    spec: _PodSpec = _PodSpec()
    status: PodStatus = PodStatus()

    def __post_init__(self) -> None:
        """Drop unused fields, to save memory."""
        force_setattr(self, "metadata", _trim_metadata(self.metadata, _POD_ANNOTATIONS))
        force_setattr(self, "spec", _trim_pod_spec(self.spec))
        force_setattr(self, "status", trim_status(self.status))

    @property
    def control_port(self) -> int:
        """The port at which the sidecar takes requests for reports and drains.

        With hostNetwork, a port in the spec does not count: a tenant could name any port of the node.
        """
        for sidecar in (*self.spec.init_containers, *self.spec.containers):
            if sidecar.ports and not self.spec.host_network:
                return sidecar.ports[0].container_port
        return CONTROL_PORT if self.has_key else REPORT_PORT

    @property
    def has_key(self) -> bool:
        """Whether the sidecar mounts the group's key: then a report that is not signed with it proves nothing."""
        return bool(self.spec.volumes_mounted_at(KEY_MOUNT_PATH))

    @property
    def mounted_group(self) -> str:
        """The group of the assignment that the sidecar mounts; the label may differ. Empty without a sidecar."""
        volume_names = self.spec.volumes_mounted_at(ASSIGNMENT_MOUNT_PATH)
        for volume in self.spec.volumes:
            config_map_name = volume.config_map.name
            if volume.name in volume_names and config_map_name.endswith(_ASSIGNMENT_SUFFIX):
                return config_map_name.removesuffix(_ASSIGNMENT_SUFFIX)
        return ""

    @property
    def labelled_group(self) -> str:
        """The group that its label names."""
        return self.metadata.group_key[1]

    @property
    def started(self) -> bool:
        """Whether the sidecar has ever run, even if it has stopped since."""
        return any(container.has_run for container in self.status.sidecar_statuses)

    @property
    def ready(self) -> bool:
        """Whether the pod's condition Ready is true."""
        return any(condition.is_ready for condition in self.status.conditions)

    @property
    def start_obstacle(self) -> str:
        """Why its containers cannot run, such as ImagePullBackOff; empty if nothing prevents them."""
        return self.status.start_obstacle

    @property
    def terminating(self) -> bool:
        """Whether its deletion was requested."""
        return self.metadata.deletion_timestamp is not None

    @property
    def ended(self) -> bool:
        """Whether all its containers have stopped for good."""
        return self.status.phase in {"Succeeded", "Failed"}

    @property
    def stopped(self) -> bool:
        """Whether its sidecar has stopped for good."""
        has_terminated = any(container.state.terminated is not None for container in self.status.sidecar_statuses)
        return self.ended or (self.terminating and has_terminated)

    @property
    def is_running(self) -> bool:
        """Whether its sidecar has started, and the pod has not ended."""
        return self.started and not self.ended

    @property
    def holder(self) -> Holder:
        """Its name and uid, as assignments name it."""
        return Holder(self.metadata.name, self.metadata.uid)

    @property
    def may_run(self) -> bool:
        """Whether its sidecar has started, and nothing shows that it has stopped."""
        return self.started and not self.stopped

    @property
    def planning_fields(self) -> tuple[object, ...]:
        """The fields that can change a plan, such as readiness: a pod that differs in others needs no reconcile."""
        identity = self.metadata.uid, self.status.pod_ip, self.labelled_group
        state = self.started, self.ready, self.terminating, self.ended
        return *identity, *state, self.start_obstacle, self.status.process_ended_at, self.poke, self.deletion_cost

    @property
    def poke(self) -> Poke:
        """The last poke that was written to its annotations."""
        return parse_poke(self.metadata.annotations)

    @property
    def deletion_cost(self) -> str:
        """Its pod deletion cost."""
        return self.metadata.annotations.get(DELETION_COST_ANNOTATION, "0")


def parse_poke(annotations: Mapping[str, str]) -> Poke:
    """Return the last poke in a pod's annotations; an invalid value counts as no poke."""
    match = re.fullmatch(r"(\d{1,16})-(\d{1,9})", annotations.get(POKE_ANNOTATION, ""), re.ASCII)
    return Poke(int(match[1]), int(match[2])) if match else Poke()


class ConfigMap(Struct, frozen=True, rename="camel", weakref=True):
    """The stored assignment of a group, or an object of that name that Rota did not create."""

    metadata: Metadata
    data: dict[str, str] = {}
    binary_data: dict[str, bytes] = {}

    def __post_init__(self) -> None:
        """Drop unused fields, to save memory."""
        force_setattr(self, "metadata", _trim_metadata(self.metadata, ()))
        force_setattr(self, "data", _keep_keys(self.data, {PLAIN_KEY, SETTINGS_KEY}))
        force_setattr(self, "binary_data", _keep_keys(self.binary_data, {GZIP_KEY}))

    @property
    def size_bytes(self) -> int:
        """The size of its contents in memory."""
        return sum(map(len, self.data.values())) + sum(map(len, self.binary_data.values()))


class Deployment(Struct, frozen=True):
    """A Deployment that Rota manages; `spec` is its JSON, which takes a tenth of the memory of the decoded objects."""

    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"null")
    status: DeploymentStatus = DeploymentStatus()

    def __post_init__(self) -> None:
        """Drop unused fields; without the copy, `spec` would keep the whole response in memory."""
        force_setattr(self, "metadata", _trim_metadata(self.metadata, {TEMPLATE_DIGEST_ANNOTATION}))
        is_too_large = len(bytes(self.spec)) > MAX_DEPLOYMENT_BYTES
        force_setattr(self, "spec", msgspec.Raw(b"") if is_too_large else self.spec.copy())

    @property
    def is_too_large(self) -> bool:
        """Whether its spec was not kept."""
        return not bytes(self.spec)

    @property
    def rollout(self) -> RolloutState:
        """The state of its rollout. Pods that fail after a complete rollout do not begin another one."""
        if self.status.observed_generation < self.metadata.generation:
            return RolloutState.UNDER_WAY
        reason = self.status.progressing.reason
        if reason == "ProgressDeadlineExceeded":
            return RolloutState.FAILED
        has_old_pods = self.status.replicas > self.status.updated_replicas
        return RolloutState.UNDER_WAY if has_old_pods or reason != "NewReplicaSetAvailable" else RolloutState.COMPLETE


class CustomResource(Struct, frozen=True):
    """A ConsumerGroup or a RebalancePolicy; `rota.spec` parses its spec."""

    metadata: Metadata
    spec: Any = None
    status: dict[str, Any] = {}
    too_large_bytes: int = 0  # size of a spec that was not kept because it is too large; 0: it was kept

    def __post_init__(self) -> None:
        """Drop unused fields, to save memory."""
        force_setattr(self, "metadata", _trim_metadata(self.metadata, ()))
        if (size := len(msgspec.json.encode(self.spec))) > MAX_SPEC_BYTES:
            force_setattr(self, "spec", None)
            force_setattr(self, "too_large_bytes", size)

    def has_same_spec(self, previous: "CustomResource | None") -> bool:
        """Whether `previous` is a version of the same object with an equal spec."""
        if previous is None or previous.metadata.uid != self.metadata.uid:
            return False
        return (previous.spec, previous.too_large_bytes) == (self.spec, self.too_large_bytes)

    @property
    def policy_name(self) -> str:
        """The name of the policy that a group refers to; empty if the reference is missing or malformed."""
        reference = self.spec.get("policyRef") if isinstance(self.spec, dict) else None
        name = reference.get("name") if isinstance(reference, dict) else None
        return name if isinstance(name, str) else ""


def part_to_cache(watched: Any) -> Any:
    """Return the part of an object that its deletion handler needs: a pod's last state, otherwise the metadata."""
    return watched if isinstance(watched, Pod) else type(watched)(watched.metadata)
