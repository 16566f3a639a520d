"""The accounts with which to log in: that of the pod, or a user of a kubeconfig.

Each gives the Kubernetes client's configuration, with credentials that were read just now.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.incluster_config import SERVICE_HOST_ENV_NAME, SERVICE_TOKEN_FILENAME

from rota.kube.client.login.env_proxy import proxy_for
from rota.kube.client.login.kubeconfig import (
    DEFAULT_FILE,
    Kubeconfig,
    LoginError,
    LoginOptions,
    impersonation,
    kubeconfig_files,
    read_kubeconfig,
)
from rota.kube.client.login.login_program import Credential, run_login_program
from rota.model import plain

EXPIRY_MARGIN = timedelta(seconds=60)  # a credential is renewed so long before it expires
UNLIMITED: Final = 0  # connections
_UNUSABLE: Final = (config.ConfigException, OSError, ValueError, TypeError, AttributeError, binascii.Error)


class Account(Protocol):
    """Something that can log in to one API server."""

    async def configure(self, *, is_forced: bool = False) -> Configuration:
        """Return the configuration with credentials that are valid now; forced: with others than before, if possible.

        Raise LoginError if there are none.
        """

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """The headers that name another user, in whose name the account asks."""


def find_account(options: LoginOptions) -> Account:
    """Return the account to use: of a kubeconfig that was named, of the pod, or else of the user's kubeconfig."""
    is_named = options.kubeconfig is not None or options.context is not None or os.environ.get("KUBECONFIG")
    has_pod_account = SERVICE_HOST_ENV_NAME in os.environ and Path(SERVICE_TOKEN_FILENAME).is_file()
    if has_pod_account and not is_named:
        return PodAccount(options)
    files = kubeconfig_files(options.kubeconfig)
    if not is_named and not any(path.exists() for path in files):
        told = f"There is no kubeconfig ({DEFAULT_FILE}) and no service account"
        raise LoginError(f"{told}; set KUBECONFIG to the cluster's file")
    return KubeconfigAccount(options)


class PodAccount:
    """The service account of the pod. Its token is in a file, which the kubelet renews."""

    def __init__(self, options: LoginOptions) -> None:
        self.headers = tuple(impersonation(options.impersonate, options.impersonate_groups))

    async def configure(self, *, is_forced: bool = False) -> Configuration:  # noqa: ARG002 - the file is read anyway
        """Read the account's files."""
        configuration = Configuration(connection_pool_maxsize=UNLIMITED)
        try:
            config.load_incluster_config(configuration)
        except _UNUSABLE as error:
            raise LoginError(f"The pod's service account cannot be used: {plain(str(error), 300)}") from error
        return configuration


class KubeconfigAccount:
    """A user of a kubeconfig, which is read again for each login: tokens and certificates in it may be renewed."""

    def __init__(self, options: LoginOptions) -> None:
        self.headers: Sequence[tuple[str, str]] = ()
        self._options = options
        self._context = options.context  # the one of the first login; a later change of the current one is ignored
        self._credential: Credential | None = None  # of the login program

    async def configure(self, *, is_forced: bool = False) -> Configuration:
        """Read the kubeconfig, and run its login program if its last credential expires or is rejected."""
        kubeconfig = read_kubeconfig(kubeconfig_files(self._options.kubeconfig), self._context)
        self._context = kubeconfig.context
        user = self._options.impersonate or kubeconfig.impersonated_user
        groups = self._options.impersonate_groups or kubeconfig.impersonated_groups
        self.headers = tuple(impersonation(user, groups))
        configuration = Configuration(connection_pool_maxsize=UNLIMITED)
        content = kubeconfig.with_user(await self._user(kubeconfig, is_forced=is_forced))
        try:
            await config.load_kube_config_from_dict(content, client_configuration=configuration)
        except _UNUSABLE as error:
            raise LoginError(f"The kubeconfig cannot be used: {plain(str(error), 300)}; correct it") from error
        configuration.host = kubeconfig.server
        configuration.proxy = kubeconfig.proxy or proxy_for(kubeconfig.server, os.environ)
        return configuration

    async def _user(self, kubeconfig: Kubeconfig, *, is_forced: bool) -> Mapping[str, Any]:
        """Return the user with what its login program gave, or with its token of OpenID Connect."""
        if kubeconfig.login_program:
            if is_forced or self._credential is None or _expires_soon(self._credential):
                self._credential = await run_login_program(kubeconfig.login_program, kubeconfig.cluster)
            return _as_user(self._credential)
        if provider := kubeconfig.user.get("auth-provider"):
            return {"token": _id_token(provider)}
        return kubeconfig.user


def _expires_soon(credential: Credential) -> bool:
    expiry = credential.expiration_timestamp
    return expiry is not None and expiry < datetime.now(UTC) + EXPIRY_MARGIN


def _as_user(credential: Credential) -> dict[str, str]:
    """Return a kubeconfig's user with a credential in it."""
    user = {"token": credential.token} if credential.token else {}
    if credential.client_certificate_data:
        user["client-certificate-data"] = _base64(credential.client_certificate_data)
        user["client-key-data"] = _base64(credential.client_key_data)
    return user


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class _Claims(msgspec.Struct, frozen=True):
    exp: float = 0.0


def _id_token(provider: Any) -> str:
    """Return the id-token of OpenID Connect.

    It is not renewed here: the Kubernetes client would ask the issuer without checking its certificate.
    """
    name = provider.get("name") if isinstance(provider, dict) else None
    settings = provider.get("config") if isinstance(provider, dict) else None
    token = settings.get("id-token") if isinstance(settings, dict) else None
    if name != "oidc":
        raise LoginError(
            f"The kubeconfig's auth-provider {plain(str(name), 100)!r} is no longer supported by Kubernetes; "
            "use a login program (exec)"
        )
    try:
        payload = str(token).split(".")[1]
        expiry = msgspec.json.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), type=_Claims).exp
    except (IndexError, ValueError) as error:
        raise LoginError(
            "The kubeconfig's auth-provider has no id-token that can be read; log in with kubectl"
        ) from error
    if expiry and expiry < datetime.now(UTC).timestamp():
        raise LoginError("The kubeconfig's id-token has expired; run any command of kubectl, which renews it")
    return str(token)
