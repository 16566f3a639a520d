"""`rota status` of an operator on a node, with the logins that kubectl has."""

import asyncio
import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from e2e.release import Installed
from logins import PROGRAMS, a_proxy, with_user

pytestmark = pytest.mark.node


async def status(kubeconfig: Path, *options: str) -> str:
    """Ask for all groups, and return what `rota` printed."""
    argv = [sys.executable, "-m", "rota.cli", "status", "-A", "-o", "json", "--kubeconfig", str(kubeconfig), *options]
    asked = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    return str(asked.stdout)


async def test_login_of_rota_status_takes_a_certificate_a_program_a_proxy_and_a_context(
    installed: Installed, tmp_path: Path
) -> None:
    admin = installed.node.kubeconfig
    content = yaml.safe_load(admin.read_text())
    user = content["users"][0]["user"]
    content["contexts"].append({**content["contexts"][0], "name": "another"})
    content["current-context"] = "gone"
    (tmp_path / "contexts").write_text(json.dumps(content))
    parts = {f"client{part}Data": f"client-{part.lower()}-data" for part in ("Certificate", "Key")}
    credential = {name: base64.b64decode(user[field]).decode() for name, field in parts.items()}
    response = {"apiVersion": PROGRAMS, "kind": "ExecCredential", "status": credential}
    (tmp_path / "response").write_text(json.dumps(response))
    program = {"exec": {"apiVersion": PROGRAMS, "command": "cat", "args": [str(tmp_path / "response")]}}
    async with a_proxy() as (url, asked):
        proxied = with_user(tmp_path / "proxied", admin, user, **{"proxy-url": url})
        shown = [
            await status(admin),
            await status(with_user(tmp_path / "program", admin, program)),
            await status(proxied),
            await status(tmp_path / "contexts", "--context", "another"),
        ]
    assert [json.loads(text)["operator"]["leads"] for text in shown] == [True] * 4
    assert len(asked) == 1
