"""Runs the login program that a kubeconfig names: a client-go credential plugin, such as those of EKS and GKE."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

import msgspec

from rota.kube.client.login.kubeconfig import LoginError, LoginProgram
from rota.model import plain

TIMEOUT_SECONDS = 30.0  # without a terminal
INTERACTIVE_TIMEOUT_SECONDS = 300.0  # a user may have to open a browser
MAX_OUTPUT_BYTES = 2**20
API_VERSIONS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
# What a program that asks for it is told of the cluster.
_CLUSTER_FIELDS: Final = (
    "server",
    "tls-server-name",
    "insecure-skip-tls-verify",
    "certificate-authority-data",
    "proxy-url",
)


class Credential(msgspec.Struct, frozen=True, rename="camel"):
    """What a login program gives: a token, a client certificate, or both."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _Response(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    status: Credential


async def run_login_program(program: LoginProgram, cluster: Mapping[str, Any]) -> Credential:
    """Run a login program and return its credential. Raise LoginError if it is missing, fails, hangs or prints none."""
    if program.api_version not in API_VERSIONS:
        known = " and ".join(API_VERSIONS)
        raise LoginError(f"{_name(program)} speaks {plain(program.api_version, 100)!r}; versions {known} are known")
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if program.interactive_mode == "Always" and not has_terminal:
        raise LoginError(f"{_name(program)} asks for a terminal, and there is none; use a login that needs none")
    is_interactive = has_terminal and program.interactive_mode != "Never"
    return _credential(program, await _output(program, cluster, is_interactive=is_interactive))


async def _output(program: LoginProgram, cluster: Mapping[str, Any], *, is_interactive: bool) -> bytes:
    process = await _start(program, cluster, is_interactive=is_interactive)
    timeout = INTERACTIVE_TIMEOUT_SECONDS if is_interactive else TIMEOUT_SECONDS
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError as error:
        raise LoginError(f"{_name(program)} printed no credential within {timeout:g} s; run it by hand") from error
    finally:
        if process.returncode is None:
            _kill(process, is_interactive=is_interactive)
            await process.wait()
    if process.returncode:
        lines = (errors or b"").decode(errors="replace").strip().splitlines()
        said = f": {plain(lines[-1], 200)}" if lines else ""
        raise LoginError(f"{_name(program)} failed with exit code {process.returncode}{said}; run it by hand")
    return output


async def _start(
    program: LoginProgram, cluster: Mapping[str, Any], *, is_interactive: bool
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            program.command,
            *(program.args or []),
            env={**os.environ, **_environment(program, cluster, is_interactive=is_interactive)},
            stdin=None if is_interactive else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if is_interactive else asyncio.subprocess.PIPE,
            start_new_session=not is_interactive,  # so that all it started can be ended with it
        )
    except FileNotFoundError as error:
        hint = f": {plain(program.install_hint, 300)}" if program.install_hint else ""
        raise LoginError(f"{_name(program)} is not there; install it{hint}") from error
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise LoginError(f"{_name(program)} cannot be started: {said}") from error


def _environment(program: LoginProgram, cluster: Mapping[str, Any], *, is_interactive: bool) -> dict[str, str]:
    spec: dict[str, Any] = {"interactive": is_interactive}
    if program.provide_cluster_info:
        spec["cluster"] = {name: cluster[name] for name in _CLUSTER_FIELDS if name in cluster}
    info = {"apiVersion": program.api_version, "kind": "ExecCredential", "spec": spec}
    own = {variable.name: variable.value for variable in program.env or []}
    return {**own, "KUBERNETES_EXEC_INFO": json.dumps(info)}


def _kill(process: asyncio.subprocess.Process, *, is_interactive: bool) -> None:
    with suppress(ProcessLookupError):
        if is_interactive:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _credential(program: LoginProgram, output: bytes) -> Credential:
    if len(output) > MAX_OUTPUT_BYTES:
        raise LoginError(f"{_name(program)} printed more than {MAX_OUTPUT_BYTES >> 20} MiB; run it by hand")
    try:
        response = msgspec.json.decode(output, type=_Response)
    except (msgspec.DecodeError, RecursionError) as error:  # the output may hold a secret, so it is not repeated
        raise LoginError(f"{_name(program)} printed no ExecCredential: {plain(str(error), 200)}") from error
    if response.api_version != program.api_version:
        said = plain(response.api_version, 100)
        raise LoginError(f"{_name(program)} answered in version {said!r} instead of {program.api_version}")
    credential = response.status
    has_certificate = bool(credential.client_certificate_data and credential.client_key_data)
    if not credential.token and not has_certificate:
        raise LoginError(f"{_name(program)} printed neither a token nor a certificate with its key; run it by hand")
    return credential


def _name(program: LoginProgram) -> str:
    return f"The kubeconfig's login program {plain(program.command.replace(chr(0), ' '), 200)}"
