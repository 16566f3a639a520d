"""`rota inject`: the sidecar put into manifests; what it does not concern comes out to the byte as it came in."""

# ruff: noqa: T201 - this is where we speak

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import yaml

from rota.cli.console.inputs import UNREADABLE, spelled, text_of
from rota.kube.client.objects import GROUP_LABEL
from rota.kube.workload.injection import injected, uninjected
from rota.kube.workload.sidecar_container import IMAGE, SidecarSpec, newest_image
from rota.spec import Mistake, Seconds
from rota.spec.names import is_dns_subdomain

WORKLOADS = {"Deployment": "apps/v1", "StatefulSet": "apps/v1", "DaemonSet": "apps/v1", "Pod": "v1"}
MOST_NAMED = 5  # of what stays as it is
LINE_WIDTH = 1_000_000  # of YAML: no line is wrapped

_LEAD = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n|---[ \t]*(?:#[^\n]*)?\n)*")  # comments before it, and its beginning


class _Loader(yaml.SafeLoader):
    """YAML as kubectl reads it: there is no time in it, 12:30 is no number, and = is a text."""


class _Dumper(yaml.SafeDumper):
    """YAML as people write it: scripts line by line, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write all of it."""
        return data is data  # noqa: PLR0124 - whatever it is


def _prepare() -> None:
    kind = "tag:yaml.org,2002:{}".format
    others = {kind("timestamp"), kind("int"), kind("float"), kind("value")}
    known = yaml.SafeLoader.yaml_implicit_resolvers.items()
    _Loader.yaml_implicit_resolvers = {first: [it for it in them if it[0] not in others] for first, them in known}
    whole = re.compile(r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)\Z")
    fraction = re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9_]+)([eE][-+][0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z"
    )
    _Loader.add_implicit_resolver(kind("int"), whole, list("-+0123456789"))
    _Loader.add_implicit_resolver(kind("float"), fraction, list("-+0123456789."))
    _Dumper.add_representer(str, _written)


def _written(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write a text so that kubectl reads it as one: to it y is true, and 1e3 and 089 are numbers."""
    taken = re.fullmatch(r"[yYnN]|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+", text)
    style = "|" if "\n" in text else "'" if taken else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_prepare()


class Asked(NamedTuple):
    """What shall be done with each pod template."""

    group: str
    sidecar: SidecarSpec
    uninject: bool = False


def run(given: Mapping[str, Any]) -> None:
    """Read manifests, print them with the sidecar in them, and say what was none of its business."""
    text, stayed = rewritten(text_of(given["filename"]), spelled(given["filename"]), asked(given))
    print(text, end="")
    if stayed:
        more = f" and {len(stayed) - MOST_NAMED} more" if len(stayed) > MOST_NAMED else ""
        print(f"rota: left as they are: {', '.join(stayed[:MOST_NAMED])}{more}", file=sys.stderr)


def asked(given: Mapping[str, Any]) -> Asked:
    """Read the options."""
    if len(given["group"]) > 63 or not is_dns_subdomain(given["group"]):  # noqa: PLR2004 - a label's value
        raise ValueError(f"--group {given['group']!r} is no name of a ConsumerGroup; give its metadata.name")
    for option in ("credentials_secret", "ca_secret", "client_secret"):
        if given[option] and not is_dns_subdomain(given[option]):
            raise ValueError(f"--{option.replace('_', '-')} {given[option]!r} is no name of a Secret; give one")
    image = given["image"] or newest_image()
    if not re.fullmatch(r"\S+", image):
        raise ValueError(f"--image {image!r} is no image; write it as {IMAGE}:1.0.0")
    try:
        drain_timeout = Seconds.parse(given["drain_timeout"])
    except ValueError as error:
        raise ValueError(f"--drain-timeout: {error}") from None
    sidecar = SidecarSpec(
        image=image,
        drain_timeout=drain_timeout,
        credentials_secret=given["credentials_secret"],
        ca_secret=given["ca_secret"],
        client_secret=given["client_secret"],
    )
    return Asked(given["group"], sidecar, given["uninject"])


def rewritten(text: str, where: str, asked: Asked) -> tuple[str, list[str]]:
    """Return manifests with the sidecar put in or taken out, and the names of those that it does not concern."""
    pieces: list[str] = []
    stayed: list[str] = []
    concerned = False
    for piece, document in _documents(text, where):
        changed = _through(document, asked)
        for was, now in zip(_objects(document), _objects(changed), strict=True):
            concerned = concerned or _is_workload(was)
            if was == now and (asked.uninject or not _is_workload(was)):
                stayed.append(_named(was))
        pieces.append(piece if changed == document else _lead(piece, first=not pieces) + _dumped(changed))
    if not concerned:
        kinds = ", ".join(WORKLOADS)
        raise ValueError(f"{where} holds none of {kinds}; give it one, or let Rota run the pods by spec.template")
    return "".join(pieces), stayed


def _documents(text: str, where: str) -> Iterator[tuple[str, Any]]:
    """Yield each document as it is written and as a value."""
    try:
        begun = [it.start_mark for it in yaml.parse(text, _Loader) if isinstance(it, yaml.DocumentStartEvent)]
        values = list(yaml.load_all(text, _Loader))
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read; remove levels from it") from None
    except UNREADABLE as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{where} is no YAML{line}; give Kubernetes manifests") from None
    cuts = [0, *(mark.index for mark in begun[1:] if mark), len(text)]
    for (start, end), value in zip(pairwise(cuts), values, strict=bool(values)):
        yield text[start:end], value


def _lead(piece: str, *, first: bool) -> str:
    """Return what is written before a document: its comments, and what parts it from the one before."""
    found = _LEAD.match(piece)
    lead = found[0] if found else ""
    return lead if first or "---" in lead else f"---\n{lead}"


def _dumped(document: Any) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LINE_WIDTH)


def _objects(document: Any) -> Iterator[dict[Any, Any]]:
    """Yield the objects of a document: itself, or those of a List."""
    if isinstance(document, dict):
        items = document.get("items")
        if document.get("kind") == "List" and isinstance(items, list):
            for item in items:
                yield from _objects(item)
        else:
            yield document


def _through(document: Any, asked: Asked) -> Any:
    """Return a document with the sidecar put in or taken out wherever there are pods in it."""
    if not isinstance(document, dict):
        return document
    if document.get("kind") == "List" and isinstance(document.get("items"), list):
        return {**document, "items": [_through(item, asked) for item in document["items"]]}
    if not _is_workload(document):
        return document
    try:
        return _changed(document, asked)
    except Mistake as mistake:
        told = str(mistake).removeprefix("spec.template.") if document["kind"] == "Pod" else str(mistake)
        raise ValueError(f"{_named(document)}: {told}") from None


def _changed(document: dict[Any, Any], asked: Asked) -> dict[Any, Any]:
    if document["kind"] == "Pod":
        return _pods(document, asked)
    spec = document.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("template"), dict):
        raise Mistake("spec.template is missing; it says what the pods are")
    return {**document, "spec": {**spec, "template": _pods(spec["template"], asked)}}


def _pods(template: dict[Any, Any], asked: Asked) -> dict[Any, Any]:
    if not asked.uninject:
        return injected(template, asked.group, asked.sidecar)
    taken_out = uninjected(template)
    labels = (template.get("metadata") or {}).get("labels") or {}
    return taken_out if labels.get(GROUP_LABEL) == asked.group else template


def _is_workload(document: dict[Any, Any]) -> bool:
    kind = document.get("kind")
    return isinstance(kind, str) and WORKLOADS.get(kind) == document.get("apiVersion")


def _named(document: dict[Any, Any]) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{document.get('kind', 'an object without a kind')}{f' {name}' if name else ''}"
