"""`rota inject`: adds the sidecar to manifests; documents without changes are printed byte for byte."""

# ruff: noqa: T201 - this module prints

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import yaml

from rota.cli.console.inputs import display_name, manifest_name, read_text, translate_yaml_errors
from rota.kube.client.objects import GROUP_LABEL
from rota.kube.workload.injection import inject, remove_sidecar
from rota.kube.workload.sidecar_container import IMAGE, SidecarSpec, default_image
from rota.kubectl_yaml import KubectlDumper, KubectlLoader
from rota.spec import InvalidSpecError, Seconds
from rota.spec.names import is_dns_subdomain

WORKLOAD_API_VERSIONS = {"Deployment": "apps/v1", "StatefulSet": "apps/v1", "DaemonSet": "apps/v1", "Pod": "v1"}
MAX_NAMED_OBJECTS = 5  # names of unchanged objects in the message
LINE_WIDTH = 1_000_000  # so long that PyYAML wraps no line

# Comments before a document, and its `---`.
_LEADING_COMMENTS = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n|---[ \t]*(?:#[^\n]*)?\n)*")


class InjectRequest(NamedTuple):
    """The change to make in each pod template."""

    group: str
    sidecar: SidecarSpec
    uninject: bool = False


def run(options: Mapping[str, Any]) -> None:
    """Print the manifests with the sidecar in them, and list unchanged objects on standard error."""
    filename = options["filename"]
    text, unchanged = rewrite_manifests(read_text(filename), display_name(filename), read_request(options))
    print(text, end="")
    if unchanged:
        more = f" and {len(unchanged) - MAX_NAMED_OBJECTS} more" if len(unchanged) > MAX_NAMED_OBJECTS else ""
        print(f"rota: unchanged: {', '.join(unchanged[:MAX_NAMED_OBJECTS])}{more}", file=sys.stderr)


def read_request(options: Mapping[str, Any]) -> InjectRequest:
    """Return the request from the command's options; raise ValueError for an invalid option."""
    if len(options["group"]) > 63 or not is_dns_subdomain(options["group"]):  # noqa: PLR2004 - a label's value
        raise ValueError(f"--group {options['group']!r} is not a valid ConsumerGroup name; give its metadata.name")
    for option in ("credentials_secret", "ca_secret", "client_secret"):
        if options[option] and not is_dns_subdomain(options[option]):
            raise ValueError(f"--{option.replace('_', '-')} {options[option]!r} is not a valid Secret name")
    image = options["image"] or default_image()
    if not re.fullmatch(r"\S+", image):
        raise ValueError(f"--image {image!r} is not a valid image; write it as {IMAGE}:1.0.0")
    try:
        drain_timeout = Seconds.parse(options["drain_timeout"])
    except ValueError as error:
        raise ValueError(f"--drain-timeout: {error}") from None
    sidecar = SidecarSpec(
        image=image,
        drain_timeout=drain_timeout,
        credentials_secret=options["credentials_secret"],
        ca_secret=options["ca_secret"],
        client_certificate_secret=options["client_secret"],
    )
    return InjectRequest(options["group"], sidecar, options["uninject"])


def rewrite_manifests(text: str, source_name: str, request: InjectRequest) -> tuple[str, list[str]]:
    """Return the manifests with the sidecar added or removed, and the names of unchanged objects.

    Workloads that have this very sidecar already are unchanged, too, but not named: they are as requested.
    """
    pieces: list[str] = []
    unchanged: list[str] = []
    has_workload = False
    for piece, document in _split_documents(text, source_name):
        changed = _inject_document(document, request)
        for previous, updated in zip(_iterate_objects(document), _iterate_objects(changed), strict=True):
            has_workload = has_workload or _is_workload(previous)
            is_as_requested = _is_workload(previous) and not request.uninject
            if previous == updated and not is_as_requested:
                unchanged.append(_describe_object(previous))
        if changed != document:
            piece = _leading_text(piece, first=not pieces) + _dump_document(changed)  # noqa: PLW2901 - the new text
        pieces.append(piece)
    if not has_workload:
        problem = f"{source_name} contains none of {', '.join(WORKLOAD_API_VERSIONS)}"
        raise ValueError(f"{problem}; add one, or let Rota create the pods by spec.template")
    return "".join(pieces), unchanged


def _split_documents(text: str, source_name: str) -> Iterator[tuple[str, Any]]:
    """Yield the text of each YAML document, with the comments before it, and its value."""
    with translate_yaml_errors(source_name, "Kubernetes manifests"):
        starts: list[int] = []
        for event in yaml.parse(text, KubectlLoader):
            mark = event.start_mark
            if isinstance(event, yaml.DocumentStartEvent) and mark:
                starts.append(mark.index)
        values = list(yaml.load_all(text, KubectlLoader))
    if not values:  # an empty text, or only comments
        return
    cuts = [0, *starts[1:], len(text)]  # the first piece includes comments before its document
    for (start, end), value in zip(pairwise(cuts), values, strict=True):
        yield text[start:end], value


def _leading_text(piece: str, *, first: bool) -> str:
    """Return the text before a document: its comments, and the separator from the previous document."""
    match = _LEADING_COMMENTS.match(piece)
    lead = match[0] if match else ""
    return lead if first or "---" in lead else f"---\n{lead}"


def _dump_document(document: Any) -> str:
    return yaml.dump(document, Dumper=KubectlDumper, sort_keys=False, allow_unicode=True, width=LINE_WIDTH)


def _iterate_objects(document: Any) -> Iterator[dict[Any, Any]]:
    """Yield the objects of a document: the document itself, or the items of a List."""
    if isinstance(document, dict):
        items = document.get("items")
        if document.get("kind") == "List" and isinstance(items, list):
            for item in items:
                yield from _iterate_objects(item)
        else:
            yield document


def _inject_document(document: Any, request: InjectRequest) -> Any:
    """Return a document with the sidecar added to or removed from all its pod templates."""
    if not isinstance(document, dict):
        return document
    if document.get("kind") == "List" and isinstance(document.get("items"), list):
        return {**document, "items": [_inject_document(item, request) for item in document["items"]]}
    if not _is_workload(document):
        return document
    try:
        return _inject_workload(document, request)
    except InvalidSpecError as mistake:
        message = str(mistake).removeprefix("spec.template.") if document["kind"] == "Pod" else str(mistake)
        raise ValueError(f"{_describe_object(document)}: {message}") from None


def _inject_workload(document: dict[Any, Any], request: InjectRequest) -> dict[Any, Any]:
    if document["kind"] == "Pod":
        return _inject_template(document, request)
    spec = document.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("template"), dict):
        raise InvalidSpecError("spec.template is missing")
    return {**document, "spec": {**spec, "template": _inject_template(spec["template"], request)}}


def _inject_template(template: dict[Any, Any], request: InjectRequest) -> dict[Any, Any]:
    """Add the sidecar; or, for `uninject`, remove it if the template has the label of the requested group.

    Raise InvalidSpecError for an invalid template, also if it has another label.
    """
    if not request.uninject:
        return inject(template, request.group, request.sidecar)
    without_sidecar = remove_sidecar(template)
    labels = (template.get("metadata") or {}).get("labels") or {}
    return without_sidecar if labels.get(GROUP_LABEL) == request.group else template


def _is_workload(document: dict[Any, Any]) -> bool:
    kind = document.get("kind")
    return isinstance(kind, str) and WORKLOAD_API_VERSIONS.get(kind) == document.get("apiVersion")


def _describe_object(document: dict[Any, Any]) -> str:
    name = manifest_name(document)
    return f"{document.get('kind', 'an object without a kind')}{f' {name}' if name else ''}"
