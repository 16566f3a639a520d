"""Adds the sidecar to pod templates, and removes it: values in, values out.

What is put in can be taken out again. Almost all of it is known by its name; what is not (a grace period that was
raised, a list that was there but empty) is noted in one annotation of the template, if there is any such thing.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from rota.kube.client.objects import GROUP_LABEL, REPORT_PORT
from rota.kube.client.pod_status import SIDECAR
from rota.kube.workload.reverse_patch import noted, undone
from rota.kube.workload.sidecar_container import VOLUME_NAMES, Object, SidecarPart, SidecarSpec, new_part
from rota.kube.workload.template_check import check_template
from rota.spec import Mistake

NOTE: Final = "rota.dev/sidecar"  # the image that was put in
BEFORE: Final = "rota.dev/before"  # what only a note can bring back

# What an app's container waits for before it ends. That of earlier versions also began the drain.
_DRAINED, _DRAIN = "/v1/drained", "/v1/drain"
_GRACE = 30  # seconds that Kubernetes gives a pod of which nothing is said
_AFTER_DRAIN = 15  # seconds from the end of a drain to the end of the pod


def injected(pod_template: Mapping[str, Any], group: str, sidecar: SidecarSpec) -> Object:
    """Return a pod template with the group's label and the sidecar in it.

    One that has them already is brought up to date. What cannot be a pod template raises a `Mistake`.
    """
    template = uninjected(pod_template)
    return with_sidecar(template, group, sidecar.drain_timeout, new_part(template, group, sidecar))


def uninjected(pod_template: Mapping[str, Any]) -> Object:
    """Return a pod template as it was before anything was put in; one in which nothing was stays as it is."""
    check_template(pod_template)
    template = dict(pod_template)
    if not _is_injected(template):
        return template
    found: Object = undone(_stripped(template), annotations_of(template).get(BEFORE, ""))
    return found


# What is put in.


def with_sidecar(template: Object, group: str, drain_timeout: float, part: SidecarPart) -> Object:
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
            **grace_period(spec, drain_timeout),
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


def grace_period(spec: Object, drain_timeout: float) -> Object:
    """Return the grace period, raised if a drain would not fit into it."""
    given, needed = spec.get("terminationGracePeriodSeconds"), math.ceil(drain_timeout) + _AFTER_DRAIN
    return {"terminationGracePeriodSeconds": needed} if (_GRACE if given is None else given) < needed else {}


def _draining(container: Object, path: str) -> Object:
    """Let the sidecar drain before an app's container ends, where the app has nothing else to do then."""
    lifecycle = container.get("lifecycle") or {}
    if lifecycle.get("preStop"):
        return container
    return {**container, "lifecycle": {**lifecycle, "preStop": {"httpGet": {"path": path, "port": REPORT_PORT}}}}


def _drain_path(part: SidecarPart) -> str:
    """Return what app containers request of this sidecar before they end: that of earlier versions has no own hook."""
    return _DRAINED if part.container.get("lifecycle") else _DRAIN


# What is taken out.


def _is_injected(template: Mapping[str, Any]) -> bool:
    return NOTE in annotations_of(template) or _sidecar(template["spec"]) is not None


def annotations_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of an object or a template, which may have none."""
    return (body.get("metadata") or {}).get("annotations") or {}


def _sidecar(spec: Mapping[str, Any]) -> Object | None:
    return next((it for it in spec.get("initContainers") or [] if it["name"] == SIDECAR), None)


def part_of(template: Mapping[str, Any]) -> SidecarPart | None:
    """Return what an earlier version put in."""
    spec = template["spec"]
    container, own = _sidecar(spec), _own(spec)
    return SidecarPart(container, [it for it in spec["volumes"] if it["name"] in own]) if container else None


def _own(spec: Mapping[str, Any]) -> set[str]:
    """Return which volumes are ours: nobody but the sidecar has them."""
    every = [*spec["containers"], *(spec.get("initContainers") or [])]
    mounted = {mount["name"] for it in every if it["name"] != SIDECAR for mount in it.get("volumeMounts") or []}
    ours = {mount["name"] for mount in (_sidecar(spec) or {}).get("volumeMounts") or []}
    return (ours & VOLUME_NAMES) - mounted


def _stripped(template: Object) -> Object:
    """Take out what is known by its name; what is empty then goes, too."""
    metadata, spec = template.get("metadata") or {}, template["spec"]
    own = _own(spec)
    labels = {key: text for key, text in (metadata.get("labels") or {}).items() if key != GROUP_LABEL}
    annotations = {key: text for key, text in annotations_of(template).items() if key not in {NOTE, BEFORE}}
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


def _refuse_namesakes(spec: Object, part: SidecarPart) -> None:
    if any(it["name"] == SIDECAR for it in spec["containers"]):
        raise Mistake(f"spec.template.spec.containers has a {SIDECAR}, as the sidecar is called; rename it")
    for name in sorted({it["name"] for it in part.volumes} & {it["name"] for it in spec.get("volumes") or []}):
        raise Mistake(f"spec.template.spec.volumes has a {name}, as a volume of the sidecar is called; rename it")
