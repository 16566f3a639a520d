"""Injection of the sidecar into pod templates, and its removal; pure functions.

`rota inject` uses both for users' manifests, the operator for the Deployments of groups with a template. Removal
restores the original template, and an injection starts with a removal. It recognises almost all injected parts by name;
other changes (a raised grace period, a list that was present but empty) are recorded in an annotation of the template,
the reverse patch, which is added only if there are such changes.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rota.kube.client.objects import GROUP_LABEL, REPORT_PORT
from rota.kube.client.pod_status import SIDECAR_CONTAINER
from rota.kube.workload.reverse_patch import apply_patch, make_patch
from rota.kube.workload.sidecar_container import VOLUME_NAMES, JsonObject, SidecarPart, SidecarSpec, build_part
from rota.kube.workload.template_check import check_template
from rota.spec import InvalidSpecError

IMAGE_ANNOTATION: Final = "rota.dev/sidecar"  # the injected image
REVERSE_PATCH_ANNOTATION: Final = "rota.dev/before"  # the changes that are not recognised by name

# Paths of the app containers' preStop request, which waits for the drain. The path of earlier versions also starts it.
_DRAINED_PATH = "/v1/drained"
_DRAIN_PATH = "/v1/drain"
_DEFAULT_GRACE_SECONDS = 30  # terminationGracePeriodSeconds of a pod that specifies none
_AFTER_DRAIN_SECONDS = 15  # part of the grace period in which the containers end after the drain


def inject(pod_template: Mapping[str, Any], group: str, sidecar: SidecarSpec) -> JsonObject:
    """Return a pod template with the group's label and the sidecar in it.

    A template that has them already is brought up to date. Raise InvalidSpecError for an invalid pod template.
    """
    template = remove_sidecar(pod_template)
    return with_sidecar(template, group, sidecar.drain_timeout, build_part(template, group, sidecar))


def remove_sidecar(pod_template: Mapping[str, Any]) -> JsonObject:
    """Return a pod template as it was before the injection; one without sidecar is returned unchanged."""
    check_template(pod_template)
    template = dict(pod_template)
    if not _is_injected(template):
        return template
    reverse_patch = annotations_of(template).get(REVERSE_PATCH_ANNOTATION, "")
    original: JsonObject = apply_patch(_strip_sidecar(template), reverse_patch)
    return original


# Injection.


def with_sidecar(template: JsonObject, group: str, drain_timeout: float, part: SidecarPart) -> JsonObject:
    """Inject the sidecar, and annotate the changes that removal would not recognise."""
    spec = template["spec"]
    _reject_name_clashes(spec, part)
    image = str(part.container["image"])
    injected_template = _with_metadata(template, {GROUP_LABEL: group}, {IMAGE_ANNOTATION: image}) | {
        "spec": {
            **spec,
            # Last, so that the app's init containers do not wait until the sidecar has started.
            "initContainers": [*(spec.get("initContainers") or []), part.container],
            "containers": [_with_drain_hook(container, _drain_path(part)) for container in spec["containers"]],
            "volumes": [*(spec.get("volumes") or []), *part.volumes],
            **grace_period(spec, drain_timeout),
        },
    }
    # What removal by name would not restore.
    reverse_patch = make_patch(_strip_sidecar(injected_template), template)
    if not reverse_patch:
        return injected_template
    return _with_metadata(injected_template, {}, {REVERSE_PATCH_ANNOTATION: reverse_patch})


def _with_metadata(template: JsonObject, labels: Mapping[str, str], annotations: Mapping[str, str]) -> JsonObject:
    metadata = template.get("metadata") or {}
    marked = {
        **metadata,
        "labels": {**(metadata.get("labels") or {}), **labels},
        "annotations": {**(metadata.get("annotations") or {}), **annotations},
    }
    return {**template, "metadata": marked}


def grace_period(spec: JsonObject, drain_timeout: float) -> JsonObject:
    """Return the field with a longer grace period if a drain would not fit into the specified one, else no field."""
    specified = spec.get("terminationGracePeriodSeconds")
    current = _DEFAULT_GRACE_SECONDS if specified is None else specified
    needed = math.ceil(drain_timeout) + _AFTER_DRAIN_SECONDS
    return {"terminationGracePeriodSeconds": needed} if current < needed else {}


def _with_drain_hook(container: JsonObject, path: str) -> JsonObject:
    """Add a preStop hook that waits for the sidecar's drain, unless the app's container has a preStop hook."""
    lifecycle = container.get("lifecycle") or {}
    if lifecycle.get("preStop"):
        return container
    return {**container, "lifecycle": {**lifecycle, "preStop": {"httpGet": {"path": path, "port": REPORT_PORT}}}}


def _drain_path(part: SidecarPart) -> str:
    """Return the path of the app containers' preStop request.

    A kept sidecar of an earlier version has no preStop hook of its own: then this request starts the drain, too.
    """
    return _DRAINED_PATH if part.container.get("lifecycle") else _DRAIN_PATH


# Removal.


def _is_injected(template: Mapping[str, Any]) -> bool:
    return IMAGE_ANNOTATION in annotations_of(template) or _find_sidecar(template["spec"]) is not None


def annotations_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of an object or a template, which may have none."""
    return (body.get("metadata") or {}).get("annotations") or {}


def _find_sidecar(spec: Mapping[str, Any]) -> JsonObject | None:
    containers = spec.get("initContainers") or []
    return next((container for container in containers if container["name"] == SIDECAR_CONTAINER), None)


def find_part(template: Mapping[str, Any]) -> SidecarPart | None:
    """Return the sidecar and the volumes that were injected into a template; None if it has no sidecar.

    The operator injects them again, so that its own upgrade does not change the Deployment.
    """
    spec = template["spec"]
    sidecar = _find_sidecar(spec)
    if sidecar is None:
        return None
    own_names = _own_volume_names(spec)
    return SidecarPart(sidecar, [volume for volume in spec["volumes"] if volume["name"] in own_names])


def _own_volume_names(spec: Mapping[str, Any]) -> set[str]:
    """Return the names of the sidecar's volumes; a volume that another container mounts, too, is the app's."""
    mounted_by_others: set[str] = set()
    for container in (*spec["containers"], *(spec.get("initContainers") or [])):
        if container["name"] != SIDECAR_CONTAINER:
            mounted_by_others |= _names(container.get("volumeMounts"))
    sidecar = _find_sidecar(spec) or {}
    return (_names(sidecar.get("volumeMounts")) & VOLUME_NAMES) - mounted_by_others


def _names(parts: Iterable[Mapping[str, Any]] | None) -> set[str]:
    """Return the names of containers, volumes or mounts; a list of a manifest may be missing."""
    return {part["name"] for part in parts or ()}


def _strip_sidecar(template: JsonObject) -> JsonObject:
    """Remove all parts that are recognised by name, and fields that are empty afterwards."""
    metadata = template.get("metadata") or {}
    spec = template["spec"]
    own_names = _own_volume_names(spec)
    labels = _without(metadata.get("labels") or {}, GROUP_LABEL)
    annotations = _without(annotations_of(template), IMAGE_ANNOTATION, REVERSE_PATCH_ANNOTATION)
    init = [container for container in spec.get("initContainers") or [] if container["name"] != SIDECAR_CONTAINER]
    volumes = [volume for volume in spec.get("volumes") or [] if volume["name"] not in own_names]
    containers = [*map(_without_drain_hook, spec["containers"])]
    stripped_spec = _replace_parts(spec, initContainers=init, volumes=volumes, containers=containers)
    stripped_metadata = _replace_parts(metadata, labels=labels, annotations=annotations)
    return _replace_parts(template, metadata=stripped_metadata, spec=stripped_spec)


def _without(fields: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in fields.items() if name not in names}


def _without_drain_hook(container: JsonObject) -> JsonObject:
    lifecycle = container.get("lifecycle") or {}
    request = (lifecycle.get("preStop") or {}).get("httpGet") or {}
    if request.get("path") not in {_DRAIN_PATH, _DRAINED_PATH} or request.get("port") != REPORT_PORT:
        return container
    return _replace_parts(container, lifecycle=_replace_parts(lifecycle, preStop=None))


def _replace_parts(mapping: Mapping[str, Any], **parts: Any) -> JsonObject:
    """Return a mapping with these parts replaced; empty parts are removed."""
    changed = {**mapping, **parts}
    return {key: part for key, part in changed.items() if part or key not in parts}


def _reject_name_clashes(spec: JsonObject, part: SidecarPart) -> None:
    if SIDECAR_CONTAINER in _names(spec["containers"]):
        message = f"spec.template.spec.containers has a container named {SIDECAR_CONTAINER}, the sidecar's name"
        raise InvalidSpecError(f"{message}; rename it")
    if clashes := _names(part.volumes) & _names(spec.get("volumes")):
        message = f"spec.template.spec.volumes has a volume named {min(clashes)}, a name of a sidecar volume"
        raise InvalidSpecError(f"{message}; rename it")
