"""Kubeconfigs for tests, and logins with them."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from rota.kube.client.api import Api
from rota.kube.client.login.accounts import find_account
from rota.kube.client.login.kubeconfig import LoginOptions
from rota.kube.client.login.session import Login

PROGRAMS = "client.authentication.k8s.io/v1"  # the version of login programs


def a_kubeconfig(
    path: Path, server: str, user: Mapping[str, Any] | None = None, cluster: Mapping[str, Any] | None = None
) -> Path:
    """Write a kubeconfig with one context, and return its path."""
    content = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me", "namespace": "shop"}}],
        "clusters": [{"name": "one", "cluster": {"server": server, **(cluster or {})}}],
        "users": [{"name": "me", "user": user or {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def with_user(path: Path, kubeconfig: Path, user: dict[str, Any], **cluster: Any) -> Path:
    """Write a kubeconfig of the same cluster with another user, and return its path."""
    content = yaml.safe_load(kubeconfig.read_text())
    content["users"][0]["user"] = user
    content["clusters"][0]["cluster"] |= cluster
    path.write_text(json.dumps(content))
    return path


async def log_in(kubeconfig: Path, **options: Any) -> Login:
    """Log in with a kubeconfig."""
    return await Login.create(find_account(LoginOptions(kubeconfig=str(kubeconfig), **options)))


@asynccontextmanager
async def an_api(kubeconfig: Path, **options: Any) -> AsyncIterator[Api]:
    """Connect to the cluster of a kubeconfig."""
    async with await log_in(kubeconfig, **options) as login, Api(login) as api:
        yield api


@asynccontextmanager
async def a_proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """Run a proxy that opens tunnels; yield its URL and the list of tunnels' targets."""
    targets: list[str] = []

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        targets.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        host, _, port = targets[-1].rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", targets


def unverified() -> ssl.SSLContext:
    """Return TLS settings that accept every certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
