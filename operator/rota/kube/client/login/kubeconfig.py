"""Reads kubeconfigs as kubectl does: of several files, the first that names something counts.

What is read is checked here, so that the Kubernetes client gets a configuration it can use and a user gets a sentence.
"""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import msgspec
import yaml

from rota.model import plain

DEFAULT_FILE: Final = "~/.kube/config"
_SECTIONS: Final = ("clusters", "contexts", "users")
_PATHS: Final = {
    "clusters": ("cluster", ("certificate-authority",)),
    "users": ("user", ("client-certificate", "client-key", "tokenFile")),
}


class LoginError(ValueError):
    """There is no way to log in to the API server; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class LoginOptions:
    """Which account to use, as kubectl's options name it."""

    kubeconfig: str | None = None
    context: str | None = None
    impersonate: str = ""
    impersonate_groups: Sequence[str] = ()


class EnvVar(msgspec.Struct, frozen=True):
    """An environment variable of a login program."""

    name: str
    value: str


class LoginProgram(msgspec.Struct, frozen=True, rename="camel"):
    """A program that prints credentials, `exec` in a kubeconfig."""

    command: str
    api_version: str = "client.authentication.k8s.io/v1"
    args: list[str] | None = None
    env: list[EnvVar] | None = None
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    provide_cluster_info: bool = False


class _Cluster(msgspec.Struct, frozen=True, rename="kebab"):
    server: str
    proxy_url: str = ""


class _User(msgspec.Struct, frozen=True, rename="kebab"):
    exec: LoginProgram | None = None
    impersonated_user: str = msgspec.field(name="as", default="")
    impersonated_groups: list[str] | None = msgspec.field(name="as-groups", default=None)


class _Context(msgspec.Struct, frozen=True):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """One context of a kubeconfig, with its cluster and its user."""

    context: str
    cluster: Mapping[str, Any]
    user: dict[str, Any]
    server: str
    proxy: str
    login_program: LoginProgram | None
    impersonated_user: str
    impersonated_groups: Sequence[str]

    def with_user(self, user: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a kubeconfig with this context alone, and another user."""
        return {
            "current-context": "this",
            "contexts": [{"name": "this", "context": {"cluster": "this", "user": "this"}}],
            "clusters": [{"name": "this", "cluster": dict(self.cluster)}],
            "users": [{"name": "this", "user": user}],
        }


def kubeconfig_files(named: str | None = None) -> list[Path]:
    """Return the files to read: the one that was named, those in KUBECONFIG, or the one in the home directory."""
    if named is not None:
        return [Path(named).expanduser()]
    listed = os.environ.get("KUBECONFIG") or DEFAULT_FILE
    return [Path(name.strip()).expanduser() for name in listed.split(os.pathsep) if name.strip()]


def read_kubeconfig(files: list[Path], context: str | None = None) -> Kubeconfig:
    """Read one context, by default the current one. Raise LoginError if it is not there or cannot be used."""
    existing = [path for path in files if path.exists()]
    if not existing:
        missing = (
            f"The kubeconfig {files[0]} cannot be read: No such file or directory" if files else "KUBECONFIG is empty"
        )
        raise LoginError(f"{missing}; set KUBECONFIG to the cluster's file")
    configs = [(path, _read_file(path)) for path in existing]
    name = context or next((it["current-context"] for _, it in configs if it.get("current-context")), None)
    if not isinstance(name, str):
        raise LoginError("The kubeconfig has no current context; run kubectl config use-context, or give --context")
    _, entry = _find(configs, "contexts", name)
    chosen = _as(entry.get("context"), _Context, f"context {name!r}")
    cluster_file, entry = _find(configs, "clusters", chosen.cluster)
    cluster = _with_absolute_paths(entry, "clusters", cluster_file)
    address = _as(cluster, _Cluster, f"cluster {chosen.cluster!r}")
    user_file, user = None, dict[str, Any]()
    if chosen.user:
        user_file, entry = _find(configs, "users", chosen.user)
        user = _with_absolute_paths(entry, "users", user_file)
    checked = _as(user, _User, f"user {chosen.user!r}")
    return Kubeconfig(
        context=name,
        cluster=cluster,
        user=user,
        server=_server(address.server),
        proxy=_proxy(address.proxy_url),
        login_program=_with_absolute_command(checked.exec, user_file),
        impersonated_user=checked.impersonated_user,
        impersonated_groups=checked.impersonated_groups or (),
    )


def namespace_of_context(files: list[Path], context: str | None = None) -> str:
    """Return the namespace that a context names; empty if it names none."""
    configs = [(path, _read_file(path)) for path in files if path.exists()]
    name = context or next((it["current-context"] for _, it in configs if it.get("current-context")), "")
    _, entry = _find(configs, "contexts", name)
    namespace: str = _as(entry.get("context"), _Context, f"context {name!r}").namespace
    return namespace


def impersonation(user: str, groups: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the headers with which a request is made in the name of another user."""
    if groups and not user:
        raise LoginError("--as-group names a group without a user; give --as, too")
    if user:
        yield "Impersonate-User", user
    for group in groups:
        yield "Impersonate-Group", group


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoginError(f"The kubeconfig {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LoginError(f"The kubeconfig {path} is no text in UTF-8; correct it") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LoginError(f"The kubeconfig {path} is no YAML; correct it") from error
    if config is None:
        return {}
    is_usable = isinstance(config, dict) and all(isinstance(config.get(it) or [], list) for it in _SECTIONS)
    if not is_usable:
        raise LoginError(f"The kubeconfig {path} has no lists of clusters, contexts and users; correct it")
    return config  # type: ignore[no-any-return]


def _find(configs: list[tuple[Path, Mapping[str, Any]]], section: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Return the first entry with a name, and its file."""
    for path, entry in _entries(configs, section):
        if entry.get("name") == name:
            return path, entry
    kind = section.removesuffix("s")
    raise LoginError(f"The kubeconfig has no {kind} {plain(str(name), 100)!r}; kubectl config view shows what it has")


def _entries(configs: list[tuple[Path, Mapping[str, Any]]], section: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path, config in configs:
        for entry in config.get(section) or []:
            if isinstance(entry, dict):
                yield path, entry


def _as(value: object, kind: Any, name: str) -> Any:
    try:
        return msgspec.convert({} if value is None else value, kind)
    except msgspec.ValidationError as error:
        raise LoginError(f"The kubeconfig's {plain(name, 120)} cannot be used: {error}; correct it") from error


def _with_absolute_paths(entry: Mapping[str, Any], section: str, path: Path) -> dict[str, Any]:
    """Return what an entry holds; paths in it are relative to its file."""
    key, fields = _PATHS[section]
    found = entry.get(key) or {}
    if not isinstance(found, dict):
        raise LoginError(f"The kubeconfig {path} has a {key} that is no object; correct it")
    values = copy.deepcopy(found)
    for field in fields:
        if values.get(field):
            values[field] = str(path.absolute().parent / str(values[field]))
    return values


def _with_absolute_command(program: LoginProgram | None, path: Path | None) -> LoginProgram | None:
    """Return a login program with its path; one with a slash in it is relative to its kubeconfig."""
    if program is None or path is None or os.sep not in program.command:
        return program
    return msgspec.structs.replace(program, command=str(path.absolute().parent / program.command))


def _server(url: str) -> str:
    parts = _url(url)
    if parts is None or parts.scheme not in {"http", "https"}:
        raise LoginError(f"The kubeconfig's server {plain(url, 200)!r} is no address; write it as https://HOST:PORT")
    return url.rstrip("/")


def _proxy(url: str) -> str:
    parts = _url(url)
    if url and (parts is None or parts.scheme not in {"http", "https"}):
        raise LoginError("The kubeconfig's proxy-url is no address that can be used; write it as http://HOST:PORT")
    return url


def _url(text: str) -> SplitResult | None:
    """Return the parts of a URL; none if it has no host or a port that is none."""
    try:
        parts = urlsplit(text)
        is_usable = bool(parts.hostname) and parts.port != 0 and text.isprintable() and " " not in text
    except ValueError:
        return None
    return parts if is_usable else None
