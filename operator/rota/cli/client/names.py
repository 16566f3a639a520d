"""How groups are named on the command line, and in which namespace a bare name is."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rota.cli.console.inputs import UNREADABLE
from rota.model import plain
from rota.spec.names import is_dns_label, is_dns_subdomain

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # where a pod is told its own
DEFAULT = "default"


def group_of(given: str, namespace: str | None) -> tuple[str, str]:
    """Read the name of a group, NAME or NAMESPACE/NAME; return its namespace and its name."""
    within, slash, name = given.rpartition("/")
    if not is_dns_subdomain(name) or (slash and not is_dns_label(within)):
        known = "kubectl get consumergroups -A shows them"
        raise ValueError(f"GROUP {plain(given, 100)!r} is no name; write NAME or NAMESPACE/NAME, {known}")
    if slash and namespace not in {None, within}:
        raise ValueError(f"GROUP {given} is in another namespace than --namespace {namespace}; leave one of them out")
    return within or namespace_of(namespace), name


def namespace_of(given: str | None) -> str:
    """Return the namespace that is meant: as given, or else where kubectl would look."""
    if given is None:
        return _own()
    if not is_dns_label(given):
        raise ValueError(f"--namespace {plain(given, 100)!r} is no name; give one that kubectl get namespaces shows")
    return given


def _own() -> str:
    """Return a pod's own namespace, or that of the kubeconfig's context; whoever needs the file tells what is wrong."""
    found = None
    with suppress(OSError, StopIteration, *UNREADABLE):
        found = ACCOUNT.read_text(encoding="utf-8").strip() if ACCOUNT.exists() else _of_the_context()
    return found if isinstance(found, str) and is_dns_label(found) else DEFAULT


def _of_the_context() -> Any:
    """Read it as kubectl does: of several files, the first that says something counts."""
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    read = [_yaml(Path(name.strip()).expanduser()) for name in files.split(os.pathsep) if name.strip()]
    current = next(config["current-context"] for config in read if config.get("current-context"))
    return next(
        it["context"].get("namespace")
        for config in read
        for it in config.get("contexts") or []
        if it["name"] == current
    )


def _yaml(path: Path) -> Mapping[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
