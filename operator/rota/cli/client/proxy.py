"""Reaching the operator through the cluster: its Lease says which pod leads, and the API server passes questions on."""

import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

import msgspec

from rota.cli.client.requests import MOST, Ask, NoAnswer
from rota.cli.console.formatting import ago
from rota.kube.client.api import Api, ApiError, Unanswered
from rota.kube.client.leader_election import Lease, LeaseSpec
from rota.kube.client.login.accounts import find_account
from rota.kube.client.login.kubeconfig import LoginError, LoginOptions
from rota.kube.client.login.session import Login
from rota.kube.client.paths import object_path, proxy_path
from rota.spec.names import is_dns_label, is_dns_subdomain
from rota.timestamps import parse_time

PORT = 8080
OTHERWISE = "or give --operator with its address, as after kubectl port-forward"

logging.getLogger("rota").addHandler(logging.NullHandler())  # what fails is one sentence, without lines of a log
ANONYMOUS = "system:anonymous"  # the user of requests without credentials


class _Status(msgspec.Struct):
    """How the API server itself says no, and no pod behind it."""

    kind: str
    api_version: str = msgspec.field(name="apiVersion")
    message: str = ""


@asynccontextmanager
async def through(namespace: str, lease: str, options: LoginOptions) -> AsyncIterator[Ask]:
    """Yield a way to ask the operator that leads; each request reads the Lease again."""
    for option, name, is_valid in (
        ("--operator-namespace", namespace, is_dns_label),
        ("--lease", lease, is_dns_subdomain),
    ):
        if not is_valid(name):
            raise ValueError(
                f"{option} {name!r} is no name; give that of the operator's, rota-system and rota by default"
            )
    async with await _log_in(options) as login, Api(login) as api:

        async def ask(asked: str, params: Mapping[str, str]) -> tuple[int, bytes]:
            try:
                found = await _who_leads(api, namespace, lease)
                pod = found.holder_identity or ""
                status, body = await api.read_through_proxy(proxy_path(namespace, pod, PORT, asked), params, MOST)
            except Unanswered as error:
                raise NoAnswer(f"{error}; look at the kubeconfig and its cluster, {OTHERWISE}") from None
            if status != HTTPStatus.OK and (refusal := _of_the_server(body)):
                raise NoAnswer(_refused(status, refusal, namespace, lease, found))
            return status, body

        yield ask


async def _log_in(options: LoginOptions) -> Login:
    try:
        return await Login.create(find_account(options), may_use_terminal=True)
    except LoginError as error:
        raise NoAnswer(f"{error}, {OTHERWISE}") from None


async def _who_leads(api: Api, namespace: str, lease: str) -> LeaseSpec:
    try:
        found = (await api.get(object_path("leases", namespace, lease), Lease)).spec
    except ApiError as error:
        raise NoAnswer(_without_lease(error, namespace, lease)) from None
    if not found.holder_identity:
        renewed = f", which was last renewed {ago(found.renew_time)}" if found.renew_time else ""
        told = f"Nobody leads: no one holds the Lease {lease} in namespace {namespace}{renewed}"
        raise NoAnswer(f"{told}; see whether the operator runs. Until then conditions of groups stay as they are")
    if not is_dns_subdomain(found.holder_identity):
        raise NoAnswer(
            f"The Lease {lease} in namespace {namespace} is held by {found.holder_identity!r}, which is no pod; "
            "give --operator with its address"
        )
    return found


def _without_lease(error: ApiError, namespace: str, lease: str) -> str:
    if error.unknown:
        return (
            f"There is no Lease {lease} in namespace {namespace}; see whether the operator runs, "
            f"give --operator-namespace or --lease, {OTHERWISE}"
        )
    if error.status == HTTPStatus.UNAUTHORIZED or ANONYMOUS in str(error):
        return _unauthorized()
    if error.status == HTTPStatus.FORBIDDEN and "impersonate" in str(error):
        return f"The API server does not let you impersonate that user: {error}; leave out --as, {OTHERWISE}"
    if error.status == HTTPStatus.FORBIDDEN:
        return (
            f"You may not read the Lease {lease} in namespace {namespace}; ask for the right to get leases, {OTHERWISE}"
        )
    return f"The Lease {lease} in namespace {namespace} cannot be read: {error}; try again, {OTHERWISE}"


def _unauthorized() -> str:
    return f"The API server rejects the credentials of the kubeconfig; log in again, {OTHERWISE}"


def _refused(status: int, message: str, namespace: str, lease: str, found: LeaseSpec) -> str:
    """Say why the pod that leads cannot be asked."""
    pod = found.holder_identity
    if status == HTTPStatus.UNAUTHORIZED:
        return _unauthorized()
    if status == HTTPStatus.FORBIDDEN:
        right = f"ask for the right to get pods/proxy in namespace {namespace}"
        return f"You may not ask pod {pod}, which leads; {right}, {OTHERWISE}"
    overdue = _overdue_seconds(found)
    if overdue > 0:
        renewed = f", last renewed {ago(found.renew_time)}" if found.renew_time else ""
        late = f"{pod} should have renewed the Lease {lease} {overdue:.0f} s ago{renewed}, and cannot be reached"
        return f"Nobody leads: {late}; see whether the operator's pods run in namespace {namespace}"
    if status == HTTPStatus.NOT_FOUND:
        gone = f"{pod} holds the Lease {lease}, and is no pod in namespace {namespace}"
        return f"The operator cannot be asked: {gone}; wait until another one leads, {OTHERWISE}"
    return f"The API server cannot reach pod {pod} in namespace {namespace}: {message}; try again, {OTHERWISE}"


def _overdue_seconds(lease: LeaseSpec) -> float:
    """Return for how long the Lease should have been renewed, by this machine's clock."""
    renewed = parse_time(lease.renew_time)
    return 0.0 if renewed is None else time.time() - renewed - (lease.lease_duration_seconds or 0)


def _of_the_server(body: bytes) -> str:
    """Return what the API server itself says, or nothing where a pod answers."""
    try:
        told = msgspec.json.decode(body, type=_Status)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return told.message or "it gives no reason" if told.kind == "Status" else ""
