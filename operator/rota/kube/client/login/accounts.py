"""The accounts to log in with: the pod's service account, or a user of a kubeconfig.

Each login reads the credentials again. The Kubernetes client (`kubernetes.aio`) reads the pod's account, and turns a
kubeconfig's fields into its configuration. Files and inline data of a kubeconfig are read here: the client would write
inline data to temporary files.
"""

import asyncio
import base64
import binascii
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

from rota.kube.client.login.env_proxy import proxy_for
from rota.kube.client.login.exec_plugin import ExecCredential, run_exec_plugin
from rota.kube.client.login.kubeconfig import (
    DEFAULT_FILE,
    Cluster,
    ExecPlugin,
    Impersonation,
    Kubeconfig,
    KubeconfigUser,
    LoginError,
    LoginOptions,
    check_server,
    read_kubeconfig,
    read_regular_file,
    without_defaults,
)
from rota.model import single_line
from rota.tls import KeyPair

EXPIRY_MARGIN = timedelta(seconds=120)  # how long before its expiry the credential of an exec plugin is renewed
UNLIMITED_CONNECTIONS: Final = 0
_LOAD_ERRORS: Final = (config.ConfigException, OSError, ValueError, TypeError, AttributeError, KeyError)

Header = tuple[str, str]
FileStamps = tuple[tuple[str, int, int], ...]  # path, time and size of each kubeconfig


@dataclass(frozen=True, slots=True)
class LoginCredentials:
    """How to reach an API server, and with which headers and which certificate."""

    configuration: Configuration = field(repr=False, compare=False)
    server: str
    headers: tuple[Header, ...] = field(repr=False)
    certificate: KeyPair | None = field(repr=False)
    connection_settings: tuple[object, ...] = field(repr=False)  # a change of any of them requires new connections


class Account(Protocol):
    """An account at one API server."""

    async def log_in(self, *, is_forced: bool = False, may_use_terminal: bool = False) -> LoginCredentials:
        """Return valid credentials; do not reuse the last ones if `is_forced`. Raise LoginError on failure."""


def find_account(options: LoginOptions) -> Account:
    """Return the account that the options name. Raise LoginError if none exists."""
    if options.uses_pod_account:
        return PodAccount(options)
    if not options.names_kubeconfig and not any(map(os.path.exists, options.files)):
        reason = f"There is no kubeconfig ({DEFAULT_FILE}) and no service account"
        raise LoginError(f"{reason}; set KUBECONFIG to the cluster's file")
    return KubeconfigAccount(options)


class PodAccount:
    """The service account of the pod. Its token is in a file, which the kubelet renews."""

    def __init__(self, options: LoginOptions) -> None:
        self._impersonation = Impersonation(options.impersonate, options.impersonate_groups)

    async def log_in(self, *, is_forced: bool = False, may_use_terminal: bool = False) -> LoginCredentials:  # noqa: ARG002
        """Read the account's files."""
        configuration = Configuration(connection_pool_maxsize=UNLIMITED_CONNECTIONS)
        try:
            config.load_incluster_config(configuration)
        except _LOAD_ERRORS as error:
            raise LoginError(f"The pod's service account cannot be used: {single_line(str(error), 300)}") from error
        check_server(configuration.host, "KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT")
        return _credentials(configuration, self._impersonation, certificate=None)


class _PluginCredential(NamedTuple):
    """The last credential of an exec plugin."""

    plugin: ExecPlugin
    credential: ExecCredential


class KubeconfigAccount:
    """A user of a kubeconfig.

    The files are read again for each login, because other programs renew tokens and certificates in them. The context
    and the server stay those of the first login.
    """

    def __init__(self, options: LoginOptions) -> None:
        self._options = options
        self._context = options.context
        self._server = ""
        self._cached_kubeconfig: tuple[FileStamps, Kubeconfig | None] = ((), None)
        self._plugin_credential: _PluginCredential | None = None

    async def log_in(self, *, is_forced: bool = False, may_use_terminal: bool = False) -> LoginCredentials:
        """Read the kubeconfig, and run its exec plugin if its last credential expires soon or `is_forced` is set."""
        kubeconfig = await asyncio.to_thread(self._read_if_changed)
        cluster = kubeconfig.cluster
        user = kubeconfig.user
        if self._server not in {"", cluster.server}:
            context = single_line(kubeconfig.context, 100)
            raise LoginError(f"The kubeconfig's context {context!r} names another server now; start again")
        token = await asyncio.to_thread(_token_of, user)
        certificate = await asyncio.to_thread(_certificate_of, user)
        if not token and user.exec:
            credential = await self._run_if_due(
                user.exec, cluster, is_forced=is_forced, may_use_terminal=may_use_terminal
            )
            token = credential.token
            if credential.client_certificate_data:
                certificate = KeyPair(credential.client_certificate_data, credential.client_key_data)
        elif not token and user.auth_provider is not None:
            token = _id_token_of(user.auth_provider)
        configuration = await _configure(kubeconfig, token)
        self._context = kubeconfig.context
        self._server = cluster.server
        return _credentials(configuration, self._impersonation_of(user), certificate)

    def _impersonation_of(self, user: KubeconfigUser) -> Impersonation:
        """Return the user to impersonate.

        - With the option --as, nothing is taken from the kubeconfig.
        - With --as-group alone, the user is the one that the kubeconfig impersonates.
        - Without either, all is taken from the kubeconfig.
        """
        name = self._options.impersonate
        groups = self._options.impersonate_groups
        if name or groups:
            return Impersonation(name or user.impersonated_user, groups)
        return Impersonation(
            user.impersonated_user, user.impersonated_groups, user.impersonated_uid, user.impersonated_extra
        )

    def _read_if_changed(self) -> Kubeconfig:
        """Read the kubeconfig, unless its files are unchanged since the last time."""
        files = self._options.files
        # Taken before the files are read: after a change during the read, the next login reads them again.
        stamps = tuple(filter(None, map(_file_stamp, files)))
        cached_stamps, kubeconfig = self._cached_kubeconfig
        if kubeconfig is None or cached_stamps != stamps:
            kubeconfig = read_kubeconfig(files, self._context)
            self._cached_kubeconfig = (stamps, kubeconfig)
        return kubeconfig

    async def _run_if_due(
        self, plugin: ExecPlugin, cluster: Cluster, *, is_forced: bool, may_use_terminal: bool
    ) -> ExecCredential:
        """Return the plugin's last credential while that is valid; otherwise, or if `is_forced`, run the plugin."""
        last = self._plugin_credential
        if last and last.plugin == plugin and not _expires_soon(last.credential) and not is_forced:
            return last.credential
        credential = await run_exec_plugin(plugin, cluster, may_use_terminal=may_use_terminal)
        self._plugin_credential = _PluginCredential(plugin, credential)
        return credential


def _file_stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path), status.st_mtime_ns, status.st_size


async def _configure(kubeconfig: Kubeconfig, token: str) -> Configuration:
    """Return the Kubernetes client's configuration of a kubeconfig, with a token."""
    cluster = kubeconfig.cluster
    user = kubeconfig.user
    server = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
    }
    login = {"token": token} if token else {"username": user.username, "password": user.password}
    content = {
        "current-context": "this",
        "contexts": [{"name": "this", "context": {"cluster": "this", "user": "this"}}],
        "clusters": [{"name": "this", "cluster": without_defaults(server)}],
        "users": [{"name": "this", "user": without_defaults(login)}],
    }
    configuration = Configuration(connection_pool_maxsize=UNLIMITED_CONNECTIONS)
    try:
        await config.load_kube_config_from_dict(content, client_configuration=configuration)
    except _LOAD_ERRORS as error:
        raise LoginError(f"The kubeconfig cannot be used: {single_line(str(error), 300)}; correct it") from error
    authority = await asyncio.to_thread(
        _read_field, cluster.certificate_authority_data, cluster.certificate_authority, "certificate authority"
    )
    configuration.ca_cert_data = authority or None
    configuration.proxy = cluster.proxy_url or proxy_for(cluster.server, os.environ)
    return configuration


def _credentials(
    configuration: Configuration, impersonation: Impersonation, certificate: KeyPair | None
) -> LoginCredentials:
    authorization = str(configuration.api_key.get("BearerToken") or "").strip()
    headers = tuple(impersonation.headers())
    if authorization:
        headers = (("Authorization", authorization), *headers)
    for name, value in headers:
        if not (value.isascii() and value.isprintable()):
            subject = "The token" if name == "Authorization" else f"The value of {name}"
            raise LoginError(f"{subject} has characters that no header may have; correct the login")
    connection = (
        configuration.ca_cert_data,
        configuration.ssl_ca_cert,
        configuration.verify_ssl,
        configuration.tls_server_name,
        configuration.proxy,
        certificate,
    )
    return LoginCredentials(configuration, configuration.host.rstrip("/"), headers, certificate, connection)


def _token_of(user: KubeconfigUser) -> str:
    """Return the user's token; as in kubectl, a token file takes precedence over an inline token."""
    if not user.token_file:
        return user.token.strip()
    token = _read_field("", user.token_file, "token").strip()
    if not token:
        raise LoginError("The kubeconfig's token file is empty")
    return token


def _certificate_of(user: KubeconfigUser) -> KeyPair | None:
    certificate = _read_field(user.client_certificate_data, user.client_certificate, "client certificate")
    key = _read_field(user.client_key_data, user.client_key, "client key")
    if bool(certificate) != bool(key):
        raise LoginError("The kubeconfig's user has a client certificate without its key, or a key alone; correct it")
    return KeyPair(certificate, key) if certificate else None


def _read_field(data: str, path: str, name: str) -> str:
    """Return the content of a kubeconfig's field: inline in base64, or in a file."""
    try:
        if data:
            return base64.b64decode("".join(data.split()), validate=True).decode(errors="replace")
        return read_regular_file(Path(path)).decode(errors="replace") if path else ""
    except binascii.Error as error:
        raise LoginError(f"The kubeconfig's {name} is not valid base64; correct it") from error
    except (OSError, ValueError) as error:  # the message omits the path, which may be a secret in the wrong field
        reason = getattr(error, "strerror", None) or "it has an invalid path"
        raise LoginError(f"The file of the kubeconfig's {name} cannot be read: {reason}; correct it") from error


def _expires_soon(credential: ExecCredential) -> bool:
    expiry = credential.expiration_timestamp
    return expiry is not None and expiry < datetime.now(UTC) + EXPIRY_MARGIN


class _Claims(msgspec.Struct, frozen=True):
    exp: float = 0.0  # in seconds since 1970; 0: never expires


class _AuthProvider(msgspec.Struct, frozen=True):
    name: str
    config: dict[str, str] = {}


def _id_token_of(provider: Any) -> str:
    """Return the id-token of OpenID Connect, without renewing it.

    The Kubernetes client would renew it without verifying the issuer's certificate.
    """
    try:
        provider = msgspec.convert(provider, _AuthProvider)
    except msgspec.ValidationError as error:
        raise LoginError(f"The kubeconfig's auth-provider cannot be used: {single_line(str(error), 200)}") from error
    if provider.name != "oidc":
        name = single_line(provider.name, 100)
        raise LoginError(f"Kubernetes no longer supports the auth-provider {name!r} of the kubeconfig; use exec")
    token: str = provider.config.get("id-token", "").strip()
    try:
        payload = token.split(".")[1]
        claims = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))  # tokens omit the padding
        expiry = msgspec.json.decode(claims, type=_Claims).exp
    except (IndexError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise LoginError("The kubeconfig's auth-provider has no readable id-token; log in with kubectl") from error
    if expiry and expiry < datetime.now(UTC).timestamp():
        raise LoginError("The kubeconfig's id-token has expired; run any command of kubectl, which renews it")
    return token
