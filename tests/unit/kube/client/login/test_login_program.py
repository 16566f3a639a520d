"""Login programs: what they are told, what they give, and one sentence for each way in which they fail."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ground.poll import soon
from rota.kube.client.login import login_program
from rota.kube.client.login.kubeconfig import EnvVar, LoginError, LoginProgram
from rota.kube.client.login.login_program import run_login_program

VERSION = "client.authentication.k8s.io/v1"
CLUSTER = {"server": "https://one", "certificate-authority-data": "Q0E=", "extensions": []}


def python(text: str, **fields: Any) -> LoginProgram:
    """Return a login program that is a few lines of Python."""
    return LoginProgram(command=sys.executable, args=["-c", text], **fields)


def printing(status: Any, version: str = VERSION) -> LoginProgram:
    response = json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})
    return python(f"print({response!r})")


async def test_login_program_gives_a_token_with_its_expiry() -> None:
    given = await run_login_program(printing({"token": "t", "expirationTimestamp": "2030-01-01T00:00:00Z"}), CLUSTER)
    assert (given.token, given.expiration_timestamp and given.expiration_timestamp.year) == ("t", 2030)


async def test_login_program_gets_its_environment_and_the_cluster_it_asks_for() -> None:
    text = (
        "import json, os; info = json.loads(os.environ['KUBERNETES_EXEC_INFO']);"
        "told = json.dumps([os.environ['REGION'], 'PATH' in os.environ, info]);"
        f"print(json.dumps(dict(apiVersion='{VERSION}', kind='ExecCredential', status=dict(token=told))))"
    )
    program = python(text, env=[EnvVar("REGION", "eu")], provide_cluster_info=True)
    region, has_path, info = json.loads((await run_login_program(program, CLUSTER)).token)
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
            LoginProgram(command="rota-no-such-program", install_hint="get it from example.org"),
            "rota-no-such-program is not there; install it: get it from example.org",
        ),
        (LoginProgram(command="/"), "/ cannot be started: Permission denied"),
        (LoginProgram(command="a\0b"), "cannot be started: embedded null byte"),
        (
            python("import sys; print('noise', file=sys.stderr); sys.exit('no session, run aws sso login')"),
            "failed with exit code 1: no session, run aws sso login; run it by hand",
        ),
        (python("import os; os.abort()"), "failed with exit code -6; run it by hand"),
        (python("print('not json')"), "printed no ExecCredential: JSON is malformed"),
        (python("print('[' * 100000)"), "printed no ExecCredential"),
        (python("print('x' * 2**21)"), "printed more than 1 MiB; run it by hand"),
        (python("input()"), "failed with exit code 1: EOFError: EOF when reading a line; run it by hand"),
        (printing({}), "printed neither a token nor a certificate with its key; run it by hand"),
        (printing({"clientCertificateData": "c"}), "printed neither a token nor a certificate with its key"),
        (printing({"token": 5}), "printed no ExecCredential: Expected `str`, got `int`"),
        (printing({"token": "t"}, "v0"), f"answered in version 'v0' instead of {VERSION}"),
        (
            python("", api_version="client.authentication.k8s.io/v1alpha1"),
            "speaks 'client.authentication.k8s",
        ),
        (python("", interactive_mode="Always"), "asks for a terminal, and there is none; use a login that needs none"),
    ],
)
async def test_login_program_failure_is_one_sentence(program: LoginProgram, sentence: str) -> None:
    with pytest.raises(LoginError) as refused:
        await run_login_program(program, CLUSTER)
    assert str(refused.value).startswith("The kubeconfig's login program ")
    assert sentence in str(refused.value)
    assert str(refused.value).isprintable()


async def test_login_program_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_program, "TIMEOUT_SECONDS", 1.0)
    text = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    with pytest.raises(LoginError, match=r"printed no credential within 1 s; run it by hand"):
        await run_login_program(python(text), CLUSTER)
    pid = (tmp_path / "pid").read_text()

    async def has_ended() -> bool:
        return not _runs(pid)

    await soon(has_ended)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
