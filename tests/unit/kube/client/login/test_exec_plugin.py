"""Exec plugins: their environment, the credentials that they print, and a sentence for each kind of failure."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ground.poll import soon
from rota.kube.client.login import exec_plugin
from rota.kube.client.login.exec_plugin import CONFIG_EXTENSION, run_exec_plugin
from rota.kube.client.login.kubeconfig import Cluster, EnvVar, ExecPlugin, LoginError

VERSION = "client.authentication.k8s.io/v1"
CLUSTER = Cluster(server="https://one", certificate_authority_data="Q0E=")


def a_python_plugin(text: str, **fields: Any) -> ExecPlugin:
    """Return an exec plugin of a few lines of Python."""
    return ExecPlugin(command=sys.executable, args=["-c", text], **fields)


def a_plugin_printing(status: Any, version: str = VERSION) -> ExecPlugin:
    response = json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})
    return a_python_plugin(f"print({response!r})")


async def test_login_by_exec_plugin_gives_a_token_with_its_expiry() -> None:
    credentials = await run_exec_plugin(
        a_plugin_printing({"token": "t", "expirationTimestamp": "2030-01-01T00:00:00Z"}), CLUSTER
    )
    assert (credentials.token, credentials.expiration_timestamp and credentials.expiration_timestamp.year) == (
        "t",
        2030,
    )


async def test_login_by_exec_plugin_gets_its_environment_and_the_cluster_if_requested() -> None:
    text = (
        "import json, os; info = json.loads(os.environ['KUBERNETES_EXEC_INFO']);"
        "token = json.dumps([os.environ['REGION'], 'PATH' in os.environ, info]);"
        f"print(json.dumps(dict(apiVersion='{VERSION}', kind='ExecCredential', status=dict(token=token))))"
    )
    plugin = a_python_plugin(text, env=[EnvVar("REGION", "eu")], provide_cluster_info=True)
    region, has_path, info = json.loads((await run_exec_plugin(plugin, CLUSTER)).token)
    assert (region, has_path) == ("eu", True)
    assert info == {
        "apiVersion": VERSION,
        "kind": "ExecCredential",
        "spec": {
            "interactive": False,
            "cluster": {"server": "https://one", "certificate-authority-data": "Q0E="},
        },
    }


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (
            ExecPlugin(command="rota-no-such-program", install_hint="get it from example.org"),
            "rota-no-such-program of the kubeconfig was not found; install it: get it from example.org",
        ),
        (ExecPlugin(command="/"), "/ of the kubeconfig cannot be started: Permission denied"),
        (ExecPlugin(command="a\0b"), "cannot be started: embedded null byte"),
        (
            a_python_plugin("import sys; print('noise', file=sys.stderr); sys.exit('no session, run aws sso login')"),
            "failed with exit code 1: no session, run aws sso login; run it manually",
        ),
        (a_python_plugin("import os; os.abort()"), "failed with exit code -6; run it manually"),
        (a_python_plugin("print('not json')"), "printed no ExecCredential: JSON is malformed"),
        (a_python_plugin("print('[' * 100000)"), "printed no ExecCredential"),
        (a_python_plugin("while True: print('x' * 2**16)"), "printed more than 1 MiB; run it manually"),
        (a_python_plugin("input()"), "failed with exit code 1: EOFError: EOF when reading a line; run it manually"),
        (a_plugin_printing({}), "printed neither a token nor a certificate; run it manually"),
        (
            a_plugin_printing({"clientCertificateData": "c"}),
            "printed a certificate without its key, or a key alone; run it",
        ),
        (a_plugin_printing({"token": "t", "expirationTimestamp": "2030-01-01T00:00:00"}), "printed no ExecCredential"),
        (a_plugin_printing({"token": 5}), "printed no ExecCredential: Expected `str`, got `int`"),
        (a_plugin_printing({"token": "t"}, "v0"), f"printed version 'v0' instead of {VERSION}"),
        (
            a_python_plugin("", api_version="client.authentication.k8s.io/v1alpha1"),
            "has version 'client.authentication.k8s",
        ),
        (
            a_python_plugin("", interactive_mode="Always"),
            "needs a terminal, and there is none; use a login that needs none",
        ),
    ],
)
async def test_login_by_exec_plugin_failure_is_one_sentence(program: ExecPlugin, sentence: str) -> None:
    with pytest.raises(LoginError) as caught:
        await run_exec_plugin(program, CLUSTER)
    assert str(caught.value).startswith("The exec plugin ")
    assert sentence in str(caught.value)
    assert str(caught.value).isprintable()


async def test_login_by_exec_plugin_gets_the_authority_and_the_configuration_of_its_cluster(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("CA")
    extension = [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a"}}, {"name": "other"}]
    fields = {"server": "https://one", "certificate-authority": str(tmp_path / "ca.crt"), "extensions": extension}
    cluster = msgspec.convert(fields, Cluster)
    text = (
        "import json, os; cluster = json.loads(os.environ['KUBERNETES_EXEC_INFO'])['spec']['cluster'];"
        "status = dict(token=json.dumps([cluster['certificate-authority-data'], cluster['config']]));"
        f"print(json.dumps(dict(apiVersion='{VERSION}', kind='ExecCredential', status=status)))"
    )
    credentials = await run_exec_plugin(a_python_plugin(text, provide_cluster_info=True), cluster)
    assert json.loads(credentials.token) == ["Q0E=", {"audience": "a"}]


async def test_login_by_exec_plugin_that_hangs_is_ended_with_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_plugin, "TIMEOUT_SECONDS", 1.0)
    text = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    with pytest.raises(LoginError, match=r"did not end within 1 s; run it manually"):
        await run_exec_plugin(a_python_plugin(text), CLUSTER)
    pid = (tmp_path / "pid").read_text()

    async def has_ended() -> bool:
        return not _runs(pid)

    await soon(has_ended)


@pytest.mark.parametrize("session", ["same session", "another session"])
async def test_login_by_exec_plugin_whose_child_keeps_its_output_open_is_one_sentence(
    session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_plugin, "TIMEOUT_SECONDS", 1.0)
    options = f"start_new_session={session == 'another session'}"
    text = (
        "import subprocess, sys;"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], {options});"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    )
    try:
        with pytest.raises(LoginError) as caught:
            await run_exec_plugin(a_python_plugin(text), CLUSTER)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    sentence = " of the kubeconfig ended, but a process that it started kept its output open for 1 s; run it manually"
    assert str(caught.value) == f"The exec plugin {sys.executable}{sentence}"


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_login_by_exec_plugin_names_an_extension_of_the_cluster_that_is_not_json() -> None:
    plugin = a_python_plugin("", provide_cluster_info=True)
    text = f"name: {CONFIG_EXTENSION}\nextension: {{day: 2026-11-29}}"
    cluster = msgspec.convert({"server": "https://one", "extensions": [yaml.safe_load(text)]}, Cluster)
    with pytest.raises(LoginError, match=r"^The extension of the cluster for .* is not JSON: "):
        await run_exec_plugin(plugin, cluster)
