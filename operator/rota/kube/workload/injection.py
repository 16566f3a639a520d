"""Injection of the sidecar into pod templates, and its removal; pure functions.

Removal restores the original template. It recognises almost all injected parts by name; other changes (a raised grace
period, a list that was present but empty) are recorded in an annotation of the template, which is added only for them.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from rota.kube.client.objects import GROUP_LABEL, REPORT_PORT
from rota.kube.client.pod_status import SIDECAR
from rota.kube.workload.reverse_patch import apply_patch, make_patch
from rota.kube.workload.sidecar_container import VOLUME_NAMES, Object, SidecarPart, SidecarSpec, new_part
from rota.kube.workload.template_check import check_template
from rota.spec import InvalidSpecError

NOTE: Final = "rota.dev/sidecar"  # the injected image
BEFORE: Final = "rota.dev/before"  # the changes that are not recognised by name

# Paths of the app containers' preStop request, which waits for the drain. That of earlier versions also started it.
_DRAINED, _DRAIN = "/v1/drained", "/v1/drain"
_GRACE = 30  # seconds; the default of Kubernetes
_AFTER_DRAIN = 15  # seconds from the end of a drain to the end of the pod


def inject(pod_template: Mapping[str, Any], group: str, sidecar: SidecarSpec) -> Object:
    """Return a pod template with the group's label and the sidecar in it.

    A template that has them already is brought up to date. Raise InvalidSpecError for an invalid pod template.
    """
    template = remove_sidecar(pod_template)
    return with_sidecar(template, group, sidecar.drain_timeout, new_part(template, group, sidecar))


def remove_sidecar(pod_template: Mapping[str, Any]) -> Object:
    """Return a pod template as it was before the injection; one without sidecar is returned unchanged."""
    check_template(pod_template)
    template = dict(pod_template)
    if not _is_injected(template):
        return template
    original: Object = apply_patch(_stripped(template), annotations_of(template).get(BEFORE, ""))
    return original


# Injection.


def with_sidecar(template: Object, group: str, drain_timeout: float, part: SidecarPart) -> Object:
    """Inject the sidecar, and annotate the changes that removal would not recognise."""
    spec = template["spec"]
    _refuse_namesakes(spec, part)
    image = str(part.container["image"])
    injected_template = _marked(template, {GROUP_LABEL: group}, {NOTE: image}) | {
        "spec": {
            **spec,
            "initContainers": [*(spec.get("initContainers") or []), part.container],  # last: the app's do not wait
            "containers": [_draining(container, _drain_path(part)) for container in spec["containers"]],
            "volumes": [*(spec.get("volumes") or []), *part.volumes],
            **grace_period(spec, drain_timeout),
        },
    }
    note = make_patch(_stripped(injected_template), template)
    return _marked(injected_template, {}, {BEFORE: note}) if note else injected_template


def _marked(template: Object, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Object:
    metadata = template.get("metadata") or {}
    marked = {
        **metadata,
        "labels": {**(metadata.get("labels") or {}), **labels},
        "annotations": {**(metadata.get("annotations") or {}), **annotations},
    }
    return {**template, "metadata": marked}


def grace_period(spec: Object, drain_timeout: float) -> Object:
    """Return the field with a longer grace period if a drain would not fit into the current one, else nothing."""
    current, needed = spec.get("terminationGracePeriodSeconds"), math.ceil(drain_timeout) + _AFTER_DRAIN
    return {"terminationGracePeriodSeconds": needed} if (_GRACE if current is None else current) < needed else {}


def _draining(container: Object, path: str) -> Object:
    """Add a preStop hook that waits for the sidecar's drain, unless the app's container has a preStop hook."""
    lifecycle = container.get("lifecycle") or {}
    if lifecycle.get("preStop"):
        return container
    return {**container, "lifecycle": {**lifecycle, "preStop": {"httpGet": {"path": path, "port": REPORT_PORT}}}}


def _drain_path(part: SidecarPart) -> str:
    """Return the path of the preStop request; a sidecar of earlier versions has no hook, so this starts its drain."""
    return _DRAINED if part.container.get("lifecycle") else _DRAIN


# Removal.


def _is_injected(template: Mapping[str, Any]) -> bool:
    return NOTE in annotations_of(template) or _sidecar(template["spec"]) is not None


def annotations_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of an object or a template, which may have none."""
    return (body.get("metadata") or {}).get("annotations") or {}


def _sidecar(spec: Mapping[str, Any]) -> Object | None:
    return next((container for container in spec.get("initContainers") or [] if container["name"] == SIDECAR), None)


def part_of(template: Mapping[str, Any]) -> SidecarPart | None:
    """Return the sidecar and the volumes that were injected; None if the template has no sidecar."""
    spec = template["spec"]
    sidecar, own = _sidecar(spec), _own(spec)
    return SidecarPart(sidecar, [volume for volume in spec["volumes"] if volume["name"] in own]) if sidecar else None


def _own(spec: Mapping[str, Any]) -> set[str]:
    """Return the names of the sidecar's volumes that no other container mounts."""
    containers = [*spec["containers"], *(spec.get("initContainers") or [])]
    mounted = {
        mount["name"]
        for container in containers
        if container["name"] != SIDECAR
        for mount in container.get("volumeMounts") or []
    }
    of_sidecar = {mount["name"] for mount in (_sidecar(spec) or {}).get("volumeMounts") or []}
    return (of_sidecar & VOLUME_NAMES) - mounted


def _stripped(template: Object) -> Object:
    """Remove all parts that are recognised by name, and fields that are empty then."""
    metadata, spec = template.get("metadata") or {}, template["spec"]
    own = _own(spec)
    labels = {key: text for key, text in (metadata.get("labels") or {}).items() if key != GROUP_LABEL}
    annotations = {key: text for key, text in annotations_of(template).items() if key not in {NOTE, BEFORE}}
    init = [container for container in spec.get("initContainers") or [] if container["name"] != SIDECAR]
    volumes = [volume for volume in spec.get("volumes") or [] if volume["name"] not in own]
    containers = [_undrained(container) for container in spec["containers"]]
    bare = _set(spec, initContainers=init, volumes=volumes, containers=containers)
    return _set(template, metadata=_set(metadata, labels=labels, annotations=annotations), spec=bare)


def _undrained(container: Object) -> Object:
    lifecycle = container.get("lifecycle") or {}
    request = (lifecycle.get("preStop") or {}).get("httpGet") or {}
    if request.get("path") not in {_DRAIN, _DRAINED} or request.get("port") != REPORT_PORT:
        return container
    return _set(container, lifecycle=_set(lifecycle, preStop=None))


def _set(mapping: Mapping[str, Any], **parts: Any) -> Object:
    """Return a mapping with these parts replaced; empty parts are removed."""
    changed = {**mapping, **parts}
    return {key: part for key, part in changed.items() if part or key not in parts}


def _refuse_namesakes(spec: Object, part: SidecarPart) -> None:
    if any(container["name"] == SIDECAR for container in spec["containers"]):
        raise InvalidSpecError(f"spec.template.spec.containers has a {SIDECAR}, as the sidecar is called; rename it")
    for name in sorted(
        {volume["name"] for volume in part.volumes} & {volume["name"] for volume in spec.get("volumes") or []}
    ):
        raise InvalidSpecError(
            f"spec.template.spec.volumes has a {name}, as a volume of the sidecar is called; rename it"
        )
