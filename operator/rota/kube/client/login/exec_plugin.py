"""Runs the exec plugin of a kubeconfig: a credential plugin of client-go, such as the ones for EKS and GKE."""

import asyncio
import base64
import json
import os
import signal
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from rota.kube.client.login.kubeconfig import Cluster, ExecPlugin, LoginError
from rota.model import plain

TIMEOUT_SECONDS = 30.0  # without a terminal
INTERACTIVE_TIMEOUT_SECONDS = 300.0  # a user may have to open a browser
MAX_OUTPUT_BYTES = 2**20
API_VERSIONS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
CONFIG_EXTENSION: Final = "client.authentication.k8s.io/exec"


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """The `status` that a plugin prints: a token, a client certificate, or both."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _Response(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    status: ExecCredential


async def run_exec_plugin(plugin: ExecPlugin, cluster: Cluster, *, may_use_terminal: bool = False) -> ExecCredential:
    """Run a plugin and return its credential. Raise LoginError if it is missing, fails, hangs or prints none."""
    if plugin.api_version not in API_VERSIONS:
        versions = " and ".join(API_VERSIONS)
        raise LoginError(f"{_name(plugin)} has version {plain(plugin.api_version, 100)!r}; {versions} are supported")
    has_terminal = may_use_terminal and sys.stdin is not None and sys.stdin.isatty()
    if plugin.interactive_mode == "Always" and not has_terminal:
        raise LoginError(f"{_name(plugin)} needs a terminal, and there is none; use a login that needs none")
    is_interactive = has_terminal and plugin.interactive_mode != "Never"
    return _parse_credential(plugin, await _run(plugin, cluster, is_interactive=is_interactive))


async def _run(plugin: ExecPlugin, cluster: Cluster, *, is_interactive: bool) -> bytes:
    process = await _start(plugin, cluster, is_interactive=is_interactive)
    timeout = INTERACTIVE_TIMEOUT_SECONDS if is_interactive else TIMEOUT_SECONDS
    try:
        async with asyncio.timeout(timeout):
            output, errors = await asyncio.gather(_read(plugin, process.stdout), _read(plugin, process.stderr))
            code = await process.wait()
    except TimeoutError as error:
        raise LoginError(f"{_name(plugin)} did not end within {timeout:g} s; run it by hand") from error
    finally:
        _kill(process, is_interactive=is_interactive)
    if code:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = f": {plain(lines[-1], 200)}" if lines else ""
        raise LoginError(f"{_name(plugin)} failed with exit code {code}{reason}; run it by hand")
    return output


async def _start(plugin: ExecPlugin, cluster: Cluster, *, is_interactive: bool) -> asyncio.subprocess.Process:
    environment = {variable.name: variable.value for variable in plugin.env or []}
    try:
        return await asyncio.create_subprocess_exec(
            plugin.command,
            *(plugin.args or []),
            env={**os.environ, **environment, "KUBERNETES_EXEC_INFO": _exec_info(plugin, cluster, is_interactive)},
            stdin=None if is_interactive else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if is_interactive else asyncio.subprocess.PIPE,
            start_new_session=not is_interactive,  # its children are killed together with it
        )
    except FileNotFoundError as error:
        hint = f": {plain(plugin.install_hint, 300)}" if plugin.install_hint else ""
        raise LoginError(f"{_name(plugin)} was not found; install it{hint}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LoginError(f"{_name(plugin)} cannot be started: {reason}") from error


async def _read(plugin: ExecPlugin, stream: asyncio.StreamReader | None) -> bytes:
    output = bytearray()
    while stream and (chunk := await stream.read(2**16)):
        output += chunk
        if len(output) > MAX_OUTPUT_BYTES:
            raise LoginError(f"{_name(plugin)} printed more than {MAX_OUTPUT_BYTES >> 20} MiB; run it by hand")
    return bytes(output)


def _exec_info(plugin: ExecPlugin, cluster: Cluster, is_interactive: bool) -> str:  # noqa: FBT001 - a field of it
    spec: dict[str, Any] = {"interactive": is_interactive}
    if plugin.provide_cluster_info:
        spec["cluster"] = _cluster_info(cluster)
    try:
        return json.dumps({"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec})
    except (TypeError, ValueError, RecursionError) as error:
        raise LoginError(f"The extension of the cluster for {plugin.command!r} is not JSON: {error}") from error


def _cluster_info(cluster: Cluster) -> dict[str, Any]:
    authority = cluster.certificate_authority_data
    if cluster.certificate_authority and not authority:
        with suppress(OSError):  # the login reports it
            authority = base64.b64encode(Path(cluster.certificate_authority).read_bytes()).decode()
    fields = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": authority,
        "proxy-url": cluster.proxy_url,
        "disable-compression": cluster.disable_compression,
        "config": next((it.extension for it in cluster.extensions if it.name == CONFIG_EXTENSION), None),
    }
    return {name: value for name, value in fields.items() if value}


def _kill(process: asyncio.subprocess.Process, *, is_interactive: bool) -> None:
    """Kill a plugin and, without a terminal, its child processes; then close its pipes without waiting.

    A process that a plugin moved to another session keeps the pipes open, and asyncio would wait for it.
    """
    with suppress(ProcessLookupError):
        if is_interactive:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process._transport.close()  # type: ignore[attr-defined] # noqa: SLF001 - asyncio has no public way


def _parse_credential(plugin: ExecPlugin, output: bytes) -> ExecCredential:
    try:
        response = msgspec.json.decode(output, type=_Response)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the output may hold a secret
        raise LoginError(f"{_name(plugin)} printed no ExecCredential: {plain(str(error), 200)}") from error
    if response.api_version != plugin.api_version:
        version = plain(response.api_version, 100)
        raise LoginError(f"{_name(plugin)} printed version {version!r} instead of {plugin.api_version}")
    credential = response.status
    if bool(credential.client_certificate_data) != bool(credential.client_key_data):
        raise LoginError(f"{_name(plugin)} printed a certificate without its key, or a key alone; run it by hand")
    if not credential.token and not credential.client_certificate_data:
        raise LoginError(f"{_name(plugin)} printed neither a token nor a certificate; run it by hand")
    return credential


def _name(plugin: ExecPlugin) -> str:
    return f"The exec plugin {plain(plugin.command.replace(chr(0), ' '), 200)} of the kubeconfig"
