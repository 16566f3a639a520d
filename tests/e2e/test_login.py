"""`rota status` of an operator on a node, with the logins that kubectl has."""

import asyncio
import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from e2e.release import SHOP, Installed
from ground.poll import soon
from kube.pages import ROOT
from logins import PROGRAMS, a_proxy, with_user

pytestmark = pytest.mark.node

ROLE = """
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: rota-reader, namespace: rota-system}
rules:
  - {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [rota], verbs: [get]}
  - {apiGroups: [""], resources: [pods/portforward], verbs: [get, create]}
"""


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
    assert asked, "all of it went through the proxy"


async def test_login_with_rights_in_one_namespace_sees_the_groups_of_that_one_only(
    installed: Installed, tmp_path: Path
) -> None:
    assert ROLE in f"\n{(ROOT / 'docs/command-line.md').read_text()}"
    kubectl = installed.node.kubectl
    account = f"--serviceaccount={SHOP}:viewer"
    spec = {"broker": {"rocketmq": {"nameServers": ["127.0.0.1:9"]}}, "subscriptions": [{"topic": "orders"}]}
    kubectl("apply", "-f-", feed=ROLE)
    installed.home("create", "rolebinding", "viewer", "--role=rota-reader", account)
    installed.shop("create", "serviceaccount", "viewer")
    installed.shop("create", "rolebinding", "viewer", "--clusterrole=view", account)
    group = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": "seen"}, "spec": spec}
    for namespace in (SHOP, "default"):
        kubectl("apply", f"--namespace={namespace}", "-f-", feed=json.dumps(group))
    kubeconfig = with_user(
        tmp_path / "viewer", installed.node.kubeconfig, {"token": installed.shop("create", "token", "viewer")}
    )
    try:

        async def shown(config: Path, *options: str) -> set[str]:
            groups = json.loads(await status(config, *options))["groups"]
            return {f"{it['namespace']}/{it['name']}" for it in groups}

        async def are_known() -> bool:
            return {f"{SHOP}/seen", "default/seen"} <= await shown(installed.node.kubeconfig)

        await soon(are_known)
        seen = await shown(kubeconfig)
        assert f"{SHOP}/seen" in seen
        assert not [name for name in seen if not name.startswith(f"{SHOP}/")]
        assert await shown(installed.node.kubeconfig, "--as", f"system:serviceaccount:{SHOP}:viewer") == seen
    finally:
        installed.home("delete", "rolebinding/viewer", "role/rota-reader")
        installed.shop("delete", "rolebinding/viewer", "serviceaccount/viewer", "cg/seen")
        kubectl("delete", "cg/seen", "--namespace=default")
