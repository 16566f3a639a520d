"""Merges kubeconfigs as kubectl does: the first file that defines an entry wins.

All input is checked here, so that the Kubernetes client gets a usable configuration, and a user a clear message.
"""

import copy
import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
import yaml

from rota.kube.client.login.bounded_yaml import ExpansionError, load_yaml
from rota.model import single_line

T = TypeVar("T")
DEFAULT_FILE: Final = "~/.kube/config"
POD_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_FILE_BYTES: Final = 2**20
_SECTIONS: Final = ("clusters", "contexts", "users")
# What malformed YAML may raise: PyYAML converts scalars without checks.
_YAML_ERRORS = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)
# Fields of an entry that hold a path.
_PATHS: Final = {"cluster": ("certificate-authority",), "user": ("client-certificate", "client-key", "tokenFile")}


class LoginError(ValueError):
    """The operator cannot log in to the API server; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class LoginOptions:
    """The account to use, named as by kubectl's options."""

    kubeconfig: str | None = None
    context: str | None = None
    impersonate: str = ""
    impersonate_groups: Sequence[str] = ()
    prefers_kubeconfig: bool = False  # in a pod: use ~/.kube/config rather than the pod's account, as kubectl does

    @property
    def names_kubeconfig(self) -> bool:
        """Whether an option or KUBECONFIG names a kubeconfig."""
        return bool(self.kubeconfig or self.context or os.environ.get("KUBECONFIG"))

    @property
    def files(self) -> list[Path]:
        """The kubeconfigs to read: the given one, those in KUBECONFIG, or the one in the home directory."""
        if self.kubeconfig:
            return [Path(os.path.expanduser(self.kubeconfig))]  # noqa: PTH111 - pathlib fails for an unknown user
        names = (os.environ.get("KUBECONFIG") or DEFAULT_FILE).split(os.pathsep)
        return [Path(os.path.expanduser(name.strip())) for name in names if name.strip()]  # noqa: PTH111 - as above

    @property
    def uses_pod_account(self) -> bool:
        """Whether to use a pod's account: no option names a kubeconfig or context, and no preferred file exists."""
        if not (os.environ.get("KUBERNETES_SERVICE_HOST") and (POD_ACCOUNT / "token").is_file()):
            return False
        if self.kubeconfig or self.context:
            return False
        is_preferred = self.prefers_kubeconfig or self.names_kubeconfig
        return not (is_preferred and any(map(os.path.exists, self.files)))


class EnvVar(msgspec.Struct, frozen=True):
    """An environment variable of an exec plugin."""

    name: str
    value: str


class ExecPlugin(msgspec.Struct, frozen=True, rename="camel"):
    """A credential plugin, `exec` in a kubeconfig."""

    command: str
    api_version: str = "client.authentication.k8s.io/v1"
    args: list[str] | None = None
    env: list[EnvVar] | None = None
    install_hint: str = ""
    interactive_mode: str = "IfAvailable"
    provide_cluster_info: bool = False

    @property
    def title(self) -> str:
        """The subject of messages about it."""
        return f"The exec plugin {single_line(self.command.replace(chr(0), ' '), 200)} of the kubeconfig"


class _Extension(msgspec.Struct, frozen=True):
    name: str
    extension: Any = None


class Cluster(msgspec.Struct, frozen=True, rename="kebab"):
    """The cluster of a context."""

    server: str
    proxy_url: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    disable_compression: bool = False
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    extensions: list[_Extension] = []


class KubeconfigUser(msgspec.Struct, frozen=True, rename="kebab"):
    """The user of a context."""

    token: str = ""
    token_file: str = msgspec.field(name="tokenFile", default="")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    username: str = ""
    password: str = ""
    exec: ExecPlugin | None = None
    auth_provider: Any = None
    impersonated_user: str = msgspec.field(name="as", default="")
    impersonated_uid: str = msgspec.field(name="as-uid", default="")
    impersonated_groups: list[str] = msgspec.field(name="as-groups", default_factory=list)
    impersonated_extra: dict[str, list[str]] = msgspec.field(name="as-user-extra", default_factory=dict)


class _Context(msgspec.Struct, frozen=True):
    cluster: str = ""
    user: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """One context of a kubeconfig, with its cluster and its user. Paths are absolute."""

    context: str
    cluster: Cluster
    user: KubeconfigUser


class Impersonation(NamedTuple):
    """The user that requests impersonate."""

    user: str = ""
    groups: Sequence[str] = ()
    uid: str = ""
    extra: Mapping[str, Sequence[str]] = {}

    def headers(self) -> Iterator[tuple[str, str]]:
        """Yield the headers. Raise LoginError for groups, a uid or extra fields without a user."""
        if not self.user:
            if self.groups or self.uid or self.extra:
                raise LoginError("A group, uid or extra field to impersonate needs a user, too; give --as")
            return
        yield "Impersonate-User", self.user
        if self.uid:
            yield "Impersonate-Uid", self.uid
        for group in self.groups:
            yield "Impersonate-Group", group
        for name, values in self.extra.items():
            for value in values:
                yield f"Impersonate-Extra-{quote(name, safe='')}", value


class _KubeconfigFile(NamedTuple):
    path: Path
    content: Mapping[str, Any]


def read_kubeconfig(files: Sequence[Path], context: str | None = None) -> Kubeconfig:
    """Read one context, by default the current one. Raise LoginError if it is missing or cannot be used."""
    contents = _read_files(files)
    name = context or _current_context(contents)
    if not name:
        raise LoginError("The kubeconfig has no current context; run kubectl config use-context, or give --context")
    chosen = _read_entry(contents, "context", name, _Context)
    cluster = _read_entry(contents, "cluster", chosen.cluster, Cluster)
    check_server(cluster.server, "server of the kubeconfig")
    check_proxy(cluster.proxy_url, "proxy-url of the kubeconfig")
    user = _read_entry(contents, "user", chosen.user, KubeconfigUser) if chosen.user else KubeconfigUser()
    return Kubeconfig(name, cluster, user)


def namespace_of_context(files: Sequence[Path], context: str | None = None) -> str:
    """Return the namespace of a context; empty if it names none."""
    contents = _read_files(files)
    return _read_entry(contents, "context", context or _current_context(contents), _Context).namespace


def read_regular_file(path: Path) -> bytes:
    """Return a file's content. Raise OSError if it is too large, or not a regular file: a pipe could block for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    return content


def _read_files(files: Sequence[Path]) -> list[_KubeconfigFile]:
    contents = [*filter(None, map(_read_file, dict.fromkeys(files)))]
    if not contents:
        missing = f"The kubeconfig {files[0]} does not exist" if files else "KUBECONFIG names no file"
        raise LoginError(f"{missing}; set KUBECONFIG to the cluster's file")
    return contents


def _read_file(path: Path) -> _KubeconfigFile | None:
    """Read a file; return None if it does not exist."""
    name = single_line(str(path), 300)
    try:
        content = load_yaml(read_regular_file(path).decode())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LoginError(f"The kubeconfig {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LoginError(f"The kubeconfig {name} is not UTF-8 text; correct it") from error
    except ExpansionError as error:
        raise LoginError(f"The kubeconfig {name} cannot be used: {error}; write the values out") from error
    except _YAML_ERRORS as error:
        raise LoginError(f"The kubeconfig {name} is not valid YAML; correct it") from error
    content = {} if content is None else content
    has_lists = isinstance(content, dict) and all(isinstance(content.get(section) or [], list) for section in _SECTIONS)
    if not has_lists:
        raise LoginError(f"The kubeconfig {name} has no lists of clusters, contexts and users; correct it")
    return _KubeconfigFile(path, content)


def _current_context(files: Sequence[_KubeconfigFile]) -> str:
    """Return the current context of the first file that names one; empty if none does."""
    names = (file.content.get("current-context") for file in files)
    name = next(filter(None, names), "")
    if not isinstance(name, str):
        raise LoginError("The kubeconfig's current-context is not a name; run kubectl config use-context")
    return name


def _read_entry(files: Sequence[_KubeconfigFile], kind: str, name: str, entry_type: type[T]) -> T:
    fields = _find_entry(files, kind, name)
    try:
        return msgspec.convert(fields, entry_type)
    except (msgspec.ValidationError, RecursionError) as error:
        title = single_line(f"{kind} {name!r}", 120)
        raise LoginError(f"The kubeconfig's {title} cannot be used: {single_line(str(error), 200)}") from error


def _find_entry(files: Sequence[_KubeconfigFile], kind: str, name: str) -> dict[str, Any]:
    """Return the first entry with a name, without fields that are null or empty."""
    for file in files:
        for entry in file.content.get(f"{kind}s") or []:
            if isinstance(entry, dict) and entry.get("name") == name:
                return _with_absolute_paths(entry.get(kind), kind, file.path)
    raise LoginError(f"The kubeconfig has no {kind} {single_line(name, 100)!r}; kubectl config view shows its entries")


def _with_absolute_paths(value: object, kind: str, path: Path) -> dict[str, Any]:
    """Return a copy of an entry with absolute paths: those in a kubeconfig are relative to its folder."""
    if not isinstance(value, dict | None):
        raise LoginError(f"The kubeconfig {single_line(str(path), 300)} has a {kind} that is not an object; correct it")
    fields = _without_empty(value or {})
    folder = path.absolute().parent
    for name in _PATHS.get(kind, ()):
        if isinstance(fields.get(name), str):
            fields[name] = str(folder / fields[name])
    if isinstance(fields.get("exec"), dict):
        plugin = _without_empty(fields["exec"])
        command = plugin.get("command")
        if isinstance(command, str) and os.sep in command:
            plugin["command"] = str(folder / command)
        fields["exec"] = plugin
    return fields


def without_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are set: null, false and empty values mean the default."""
    return {name: value for name, value in fields.items() if value}


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the fields that are neither null nor empty text; unlike in `without_defaults`, false stays."""
    return {name: copy.copy(value) for name, value in fields.items() if value is not None and value != ""}


def check_server(url: str, source: str) -> None:
    """Raise LoginError if a server's URL cannot be used. It may hold a password, so it is not repeated."""
    parts = _parse_url(url)
    if parts is None or parts.scheme not in {"http", "https"} or "@" in parts.netloc or parts.query or parts.fragment:
        raise LoginError(f"The {source} is not a valid URL; write it as https://HOST:PORT")


def check_proxy(url: str, source: str) -> None:
    """Raise LoginError if a proxy cannot be used. Its URL may hold a password, so it is not repeated."""
    if not url:
        return
    parts = _parse_url(url)
    if parts is None or parts.scheme not in {"http", "https"}:
        raise LoginError(f"The {source} is not supported; write it as http://HOST:PORT (SOCKS proxies cannot be used)")


def _parse_url(text: str) -> SplitResult | None:
    """Return the parts of a URL; None if it has no host, or a port that is not one."""
    try:
        parts = urlsplit(text)
        is_usable = bool(parts.hostname and parts.hostname.encode("idna")) and parts.port != 0
        is_usable &= text.isprintable() and " " not in text
    except ValueError:
        return None
    return parts if is_usable else None
