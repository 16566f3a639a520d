"""Requests to the operator through the cluster: its Lease names the pod that leads, and the API server connects to it.

An operator that serves users of the cluster is asked through a forwarded port: the API server's proxy would remove the
user's credentials from the request.
"""

import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from rota.cli.client.pod_sessions import OTHERWISE, PORT, PodSessions
from rota.cli.client.requests import MOST, Ask, NoAnswer
from rota.cli.console.formatting import ago
from rota.kube.client.api import Api, ApiError, Unanswered
from rota.kube.client.leader_election import KUBERNETES, PAGE_AUTH, Lease, LeaseSpec
from rota.kube.client.login.accounts import find_account
from rota.kube.client.login.kubeconfig import LoginError, LoginOptions
from rota.kube.client.login.session import Login
from rota.kube.client.paths import object_path, proxy_path
from rota.spec.names import is_dns_label, is_dns_subdomain
from rota.timestamps import parse_time

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
    check_names(namespace, lease)
    async with await log_in(options) as login, Api(login) as api, PodSessions(api, login, namespace) as sessions:

        async def ask(asked: str, params: Mapping[str, str]) -> tuple[int, bytes]:
            try:
                leader = await find_leader(api, namespace, lease)
                if leader.authenticates:
                    return await sessions.read(leader.pod, asked, params)
                path = proxy_path(namespace, leader.pod, PORT, asked)
                status, body = await api.read_through_proxy(path, params, MOST)
            except Unanswered as error:
                raise NoAnswer(f"{error}; look at the kubeconfig and its cluster, {OTHERWISE}") from None
            if status != HTTPStatus.OK and (refusal := _of_the_server(body)):
                raise NoAnswer(_refused(status, refusal, namespace, lease, leader))
            return status, body

        yield ask


def check_names(namespace: str, lease: str) -> None:
    """Raise ValueError unless both can be names."""
    for option, name, is_valid in (
        ("--operator-namespace", namespace, is_dns_label),
        ("--lease", lease, is_dns_subdomain),
    ):
        if not is_valid(name):
            raise ValueError(
                f"{option} {name!r} is no name; give that of the operator's, rota-system and rota by default"
            )


class Leading(NamedTuple):
    """The pod that leads."""

    pod: str
    lease: LeaseSpec
    authenticates: bool  # whether it wants to know its users


async def log_in(options: LoginOptions) -> Login:
    """Log in to the API server; raise NoAnswer if the account cannot be used."""
    try:
        return await Login.create(find_account(options), may_use_terminal=True)
    except LoginError as error:
        raise NoAnswer(f"{error}, {OTHERWISE}") from None


async def find_leader(api: Api, namespace: str, name: str) -> Leading:
    """Return the pod that holds the Lease."""
    try:
        lease = await api.get(object_path("leases", namespace, name), Lease)
    except ApiError as error:
        raise NoAnswer(_without_lease(error, namespace, name)) from None
    holder = _holder_of(lease.spec, namespace, name)
    return Leading(holder, lease.spec, lease.metadata.annotations.get(PAGE_AUTH) == KUBERNETES)


def _holder_of(found: LeaseSpec, namespace: str, lease: str) -> str:
    if not found.holder_identity:
        renewed = f", which was last renewed {ago(found.renew_time)}" if found.renew_time else ""
        told = f"Nobody leads: no one holds the Lease {lease} in namespace {namespace}{renewed}"
        raise NoAnswer(f"{told}; see whether the operator runs. Until then conditions of groups stay as they are")
    if not is_dns_subdomain(found.holder_identity):
        raise NoAnswer(
            f"The Lease {lease} in namespace {namespace} is held by {found.holder_identity!r}, which is no pod; "
            "give --operator with its address"
        )
    return found.holder_identity


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


def _refused(status: int, message: str, namespace: str, lease: str, leader: Leading) -> str:
    """Say why the pod that leads cannot be asked."""
    pod, found = leader.pod, leader.lease
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
