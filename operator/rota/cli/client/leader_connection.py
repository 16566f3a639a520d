"""Connects to the leading operator through the cluster: the Lease names its pod, the API server connects to that pod.

If the operator authenticates users of the cluster, requests use a forwarded port: the API server's proxy would remove
the user's credentials from the request.
"""

import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from rota.cli.client.pod_http_client import OPERATOR_PORT, PodHttpClient
from rota.cli.client.requests import MAX_RESPONSE_BYTES, NoConnectionError, OperatorRequestError, SendRequest
from rota.cli.console.formatting import format_age
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.leader_election import PAGE_AUTH_ANNOTATION, PAGE_AUTH_KUBERNETES, Lease, LeaseSpec
from rota.kube.client.login.accounts import find_account
from rota.kube.client.login.kubeconfig import LoginError, LoginOptions
from rota.kube.client.login.session import Login
from rota.kube.client.paths import object_path, proxy_path
from rota.spec.names import is_dns_label, is_dns_subdomain
from rota.timestamps import parse_time

logging.getLogger("rota").addHandler(logging.NullHandler())  # failures are printed as one sentence, without log lines
# Appended to errors of commands that have the option --operator; `rota page` has not.
OPERATOR_OPTION_HINT = "or give --operator with its address"
REJECTED_LOGIN = "The API server rejects the credentials of the kubeconfig; log in again"
ANONYMOUS_USER = "system:anonymous"  # the user of requests without credentials


class _ResponseStatus(msgspec.Struct):
    """An error response of the API server itself, not of the pod behind it."""

    kind: str
    api_version: str = msgspec.field(name="apiVersion")
    message: str = ""


@asynccontextmanager
async def connect_through_cluster(
    namespace: str, lease: str, login_options: LoginOptions
) -> AsyncIterator[SendRequest]:
    """Yield a function that sends requests to the leading operator; each request reads the Lease again."""
    check_names(namespace, lease)
    try:
        login = await log_in(login_options)
    except NoConnectionError as error:
        raise _with_option_hint(error) from None
    async with login, Api(login) as api, PodHttpClient(api, login, namespace) as pods:

        async def send(request_path: str, params: Mapping[str, str]) -> tuple[int, bytes]:
            try:
                leader = await find_leader(api, namespace, lease)
                if leader.authenticates_users:
                    return await pods.fetch_body(leader.pod, request_path, params)
                path = proxy_path(namespace, leader.pod, OPERATOR_PORT, request_path)
                status, body = await api.read_through_proxy(path, params, MAX_RESPONSE_BYTES)
            except NoConnectionError as error:
                raise _with_option_hint(error) from None
            except NoResponseError as error:
                problem = f"{error}; check the kubeconfig and the cluster, {OPERATOR_OPTION_HINT}"
                raise OperatorRequestError(problem) from None
            # Only errors of the API server are raised here. Error responses of the operator are returned to the caller:
            # `fetch_response` reports them.
            refusal = "" if status == HTTPStatus.OK else _api_server_error(body)
            if refusal:
                raise OperatorRequestError(_describe_refusal(status, refusal, namespace, lease, leader))
            return status, body

        yield send


def _with_option_hint(error: NoConnectionError) -> OperatorRequestError:
    """Return the error with the hint; as its base class, so that the hint is not appended again."""
    return OperatorRequestError(f"{error}, {OPERATOR_OPTION_HINT}")


def check_names(namespace: str, lease: str) -> None:
    """Raise ValueError unless both are valid Kubernetes names."""
    if not is_dns_label(namespace):
        remedy = "give the operator's namespace, by default rota-system"
        raise ValueError(f"--operator-namespace {namespace!r} is not a valid name; {remedy}")
    if not is_dns_subdomain(lease):
        raise ValueError(f"--lease {lease!r} is not a valid name; give the operator's Lease, by default rota")


class LeadingPod(NamedTuple):
    """The leading pod of the operator, the Lease that it holds, and whether it authenticates users of the cluster."""

    pod: str
    lease: LeaseSpec
    authenticates_users: bool


async def log_in(login_options: LoginOptions) -> Login:
    """Log in to the API server; raise NoConnectionError if the account cannot be used."""
    try:
        return await Login.create(find_account(login_options), may_use_terminal=True)
    except LoginError as error:
        raise NoConnectionError(str(error)) from None


async def find_leader(api: Api, namespace: str, name: str) -> LeadingPod:
    """Return the pod that holds the Lease.

    Raise NoConnectionError if the Lease is missing or unreadable, or its holder's name cannot be a pod's: the user may
    give another way to connect. Raise OperatorRequestError if no operator holds the Lease.
    """
    try:
        lease = await api.get(object_path("leases", namespace, name), Lease)
    except ApiError as error:
        raise NoConnectionError(_describe_lease_error(error, namespace, name)) from None
    holder = _leading_pod(lease.spec, namespace, name)
    page_auth = lease.metadata.annotations.get(PAGE_AUTH_ANNOTATION)
    return LeadingPod(holder, lease.spec, authenticates_users=page_auth == PAGE_AUTH_KUBERNETES)


def _leading_pod(spec: LeaseSpec, namespace: str, lease: str) -> str:
    if not spec.holder_identity:
        renewed = f" and was last renewed {format_age(spec.renew_time)}" if spec.renew_time else ""
        message = f"No operator is leader: the Lease {lease} in namespace {namespace} has no holder{renewed}"
        problem = f"{message}; check that the operator runs. Until then the conditions of groups are not updated"
        raise OperatorRequestError(problem)
    if not is_dns_subdomain(spec.holder_identity):
        held = f"The Lease {lease} in namespace {namespace} is held by {spec.holder_identity!r}"
        raise NoConnectionError(f"{held}, which is not a valid pod name; run the operator in the cluster")
    return spec.holder_identity


def _describe_lease_error(error: ApiError, namespace: str, lease: str) -> str:
    if error.is_not_found:
        remedy = "check that the operator runs, or give --operator-namespace or --lease"
        return f"There is no Lease {lease} in namespace {namespace}; {remedy}"
    if error.status == HTTPStatus.UNAUTHORIZED or ANONYMOUS_USER in str(error):
        return REJECTED_LOGIN
    if error.status == HTTPStatus.FORBIDDEN and "impersonate" in str(error):
        return f"The API server does not let you impersonate that user: {error}; remove --as"
    if error.status == HTTPStatus.FORBIDDEN:
        return f"You have no permission to read the Lease {lease} in namespace {namespace}; ask for get on leases"
    return f"The Lease {lease} in namespace {namespace} cannot be read: {error}; try again"


def _describe_refusal(status: int, message: str, namespace: str, lease: str, leader: LeadingPod) -> str:
    """Return the sentence for a request that the API server did not pass on to the leading pod."""
    pod = leader.pod
    spec = leader.lease
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{REJECTED_LOGIN}, {OPERATOR_OPTION_HINT}"
    if status == HTTPStatus.FORBIDDEN:
        permission = f"ask for get on pods/proxy in namespace {namespace}"
        return f"You have no permission to send requests to the leading pod {pod}; {permission}, {OPERATOR_OPTION_HINT}"
    overdue = _overdue_seconds(spec)
    if overdue > 0:
        renewed = f", last renewed {format_age(spec.renew_time)}" if spec.renew_time else ""
        late = f"{pod} should have renewed the Lease {lease} {overdue:.0f} s ago{renewed}, and cannot be reached"
        return f"No operator is leader: {late}; check that the operator's pods run in namespace {namespace}"
    if status == HTTPStatus.NOT_FOUND:
        missing = f"{pod} holds the Lease {lease}, but is not a pod in namespace {namespace}"
        remedy = f"wait until another pod becomes leader, {OPERATOR_OPTION_HINT}"
        return f"The operator cannot be reached: {missing}; {remedy}"
    remedy = f"try again, {OPERATOR_OPTION_HINT}"
    return f"The API server cannot reach pod {pod} in namespace {namespace}: {message}; {remedy}"


def _overdue_seconds(lease: LeaseSpec) -> float:
    """Return by how many seconds the renewal of the Lease is overdue, by this machine's clock; negative: not yet."""
    renewed = parse_time(lease.renew_time)
    return 0.0 if renewed is None else time.time() - renewed - (lease.lease_duration_seconds or 0)


def _api_server_error(body: bytes) -> str:
    """Return the error message of the API server itself; empty if the response comes from a pod."""
    try:
        status = msgspec.json.decode(body, type=_ResponseStatus)
    except (msgspec.DecodeError, RecursionError):
        return ""
    if status.kind != "Status":
        return ""
    return status.message or "no reason given"
