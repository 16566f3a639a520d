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

from rota.kube.client.login.kubeconfig import Cluster, ExecPlugin, LoginError, read_regular_file, without_defaults
from rota.model import single_line

TIMEOUT_SECONDS = 30.0  # without a terminal
INTERACTIVE_TIMEOUT_SECONDS = 300.0  # a user may have to open a browser
MAX_OUTPUT_BYTES = 2**20
API_VERSIONS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_STDOUT: Final = 1
_STDERR: Final = 2
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
        version = single_line(plugin.api_version, 100)
        raise LoginError(f"{plugin.title} has version {version!r}; {' and '.join(API_VERSIONS)} are supported")
    has_terminal = may_use_terminal and sys.stdin is not None and sys.stdin.isatty()
    if plugin.interactive_mode == "Always" and not has_terminal:
        raise LoginError(f"{plugin.title} needs a terminal, and there is none; use a login that needs none")
    is_interactive = has_terminal and plugin.interactive_mode != "Never"
    return _parse_credential(plugin, await _run(plugin, cluster, is_interactive=is_interactive))


class _Process(asyncio.SubprocessProtocol):
    """Collects what a plugin prints, until it has ended and no process has its pipes open any more."""

    def __init__(self, plugin: ExecPlugin) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_exited = False
        self._plugin = plugin
        self._printed = {_STDOUT: bytearray(), _STDERR: bytearray()}

    @property
    def output(self) -> bytes:
        """The bytes of its standard output."""
        return bytes(self._printed[_STDOUT])

    @property
    def last_error_line(self) -> str:
        """The last line of its standard error; empty if it printed none, or printed it to the terminal."""
        lines = self._printed[_STDERR].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep what was printed, up to the limit."""
        printed = self._printed[fd]
        printed += data
        if len(printed) > MAX_OUTPUT_BYTES and not self.ended.done():
            problem = f"{self._plugin.title} printed more than {MAX_OUTPUT_BYTES >> 20} MiB; run it manually"
            self.ended.set_exception(LoginError(problem))

    def process_exited(self) -> None:
        """Record that the plugin itself has exited; its child processes may still have the pipes open."""
        self.has_exited = True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """End the wait: the plugin has exited, and its pipes are closed."""
        if not self.ended.done():
            self.ended.set_result(None)


async def _run(plugin: ExecPlugin, cluster: Cluster, *, is_interactive: bool) -> bytes:
    transport, process = await _start(plugin, cluster, is_interactive=is_interactive)
    timeout = INTERACTIVE_TIMEOUT_SECONDS if is_interactive else TIMEOUT_SECONDS
    try:
        async with asyncio.timeout(timeout):
            await process.ended
    except TimeoutError as error:
        problem = f"did not end within {timeout:g} s"
        if process.has_exited:
            problem = f"ended, but a process that it started kept its output open for {timeout:g} s"
        raise LoginError(f"{plugin.title} {problem}; run it manually") from error
    finally:
        _kill(transport, is_interactive=is_interactive)
    if code := transport.get_returncode():
        reason = f": {single_line(process.last_error_line, 200)}" if process.last_error_line else ""
        raise LoginError(f"{plugin.title} failed with exit code {code}{reason}; run it manually")
    return process.output


async def _start(
    plugin: ExecPlugin, cluster: Cluster, *, is_interactive: bool
) -> tuple[asyncio.SubprocessTransport, _Process]:
    environment = {variable.name: variable.value for variable in plugin.env or []}
    exec_info = _exec_info(plugin, cluster, is_interactive=is_interactive)
    try:
        return await asyncio.get_running_loop().subprocess_exec(
            lambda: _Process(plugin),
            plugin.command,
            *(plugin.args or []),
            env={**os.environ, **environment, "KUBERNETES_EXEC_INFO": exec_info},
            stdin=None if is_interactive else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if is_interactive else asyncio.subprocess.PIPE,
            start_new_session=not is_interactive,  # its children are killed together with it
        )
    except FileNotFoundError as error:
        hint = f": {single_line(plugin.install_hint, 300)}" if plugin.install_hint else ""
        raise LoginError(f"{plugin.title} was not found; install it{hint}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LoginError(f"{plugin.title} cannot be started: {reason}") from error


def _exec_info(plugin: ExecPlugin, cluster: Cluster, *, is_interactive: bool) -> str:
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
        with suppress(OSError):  # the login reports a file that cannot be read
            authority = base64.b64encode(read_regular_file(Path(cluster.certificate_authority))).decode()
    configs = (extension.extension for extension in cluster.extensions if extension.name == CONFIG_EXTENSION)
    fields = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": authority,
        "proxy-url": cluster.proxy_url,
        "disable-compression": cluster.disable_compression,
        "config": next(configs, None),
    }
    return without_defaults(fields)


def _kill(transport: asyncio.SubprocessTransport, *, is_interactive: bool) -> None:
    """Kill a plugin and, without a terminal, its child processes; then close its pipes without waiting.

    A process that a plugin moved to another session keeps the pipes open, and is not waited for.
    """
    with suppress(ProcessLookupError):
        if is_interactive:
            transport.kill()
        else:
            os.killpg(transport.get_pid(), signal.SIGKILL)
    transport.close()


def _parse_credential(plugin: ExecPlugin, output: bytes) -> ExecCredential:
    try:
        response = msgspec.json.decode(output, type=_Response)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The output may hold a secret, so only the decoder's message is shown.
        raise LoginError(f"{plugin.title} printed no ExecCredential: {single_line(str(error), 200)}") from error
    if response.api_version != plugin.api_version:
        version = single_line(response.api_version, 100)
        raise LoginError(f"{plugin.title} printed version {version!r} instead of {plugin.api_version}")
    credential = response.status
    if bool(credential.client_certificate_data) != bool(credential.client_key_data):
        raise LoginError(f"{plugin.title} printed a certificate without its key, or a key alone; run it manually")
    if not credential.token and not credential.client_certificate_data:
        raise LoginError(f"{plugin.title} printed neither a token nor a certificate; run it manually")
    return credential
