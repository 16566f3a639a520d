"""`rota status` of an operator on a node, with the logins that kubectl supports."""

import asyncio
import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from e2e.release import GROUP_NAMESPACE, Installation
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
    """Run `rota status` for all groups and return its output."""
    argv = [sys.executable, "-m", "rota.cli", "status", "-A", "-o", "json", "--kubeconfig", str(kubeconfig), *options]
    completed = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return str(completed.stdout)


async def test_login_of_rota_status_takes_a_certificate_a_program_a_proxy_and_a_context(
    installation: Installation, tmp_path: Path
) -> None:
    admin = installation.node.kubeconfig
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
    async with a_proxy() as (url, requests):
        proxied = with_user(tmp_path / "proxied", admin, user, **{"proxy-url": url})
        outputs = [
            await status(admin),
            await status(with_user(tmp_path / "program", admin, program)),
            await status(proxied),
            await status(tmp_path / "contexts", "--context", "another"),
        ]
    assert [json.loads(text)["operator"]["leads"] for text in outputs] == [True] * 4
    assert requests, "the request used the proxy"


async def test_login_with_rights_in_one_namespace_lists_only_the_groups_of_that_namespace(
    installation: Installation, tmp_path: Path
) -> None:
    assert ROLE in f"\n{(ROOT / 'docs/command-line.md').read_text()}"
    kubectl = installation.node.kubectl
    account = f"--serviceaccount={GROUP_NAMESPACE}:viewer"
    spec = {"broker": {"rocketmq": {"nameServers": ["127.0.0.1:9"]}}, "subscriptions": [{"topic": "orders"}]}
    kubectl("apply", "-f-", feed=ROLE)
    installation.operator_kubectl("create", "rolebinding", "viewer", "--role=rota-reader", account)
    installation.group_kubectl("create", "serviceaccount", "viewer")
    installation.group_kubectl("create", "rolebinding", "viewer", "--clusterrole=view", account)
    group = {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", "metadata": {"name": "seen"}, "spec": spec}
    for namespace in (GROUP_NAMESPACE, "default"):
        kubectl("apply", f"--namespace={namespace}", "-f-", feed=json.dumps(group))
    kubeconfig = with_user(
        tmp_path / "viewer",
        installation.node.kubeconfig,
        {"token": installation.group_kubectl("create", "token", "viewer")},
    )
    try:

        async def listed_groups(config: Path, *options: str) -> set[str]:
            groups = json.loads(await status(config, *options))["groups"]
            return {f"{group['namespace']}/{group['name']}" for group in groups}

        async def are_listed() -> bool:
            return {f"{GROUP_NAMESPACE}/seen", "default/seen"} <= await listed_groups(installation.node.kubeconfig)

        await soon(are_listed)
        visible = await listed_groups(kubeconfig)
        assert f"{GROUP_NAMESPACE}/seen" in visible
        assert not [name for name in visible if not name.startswith(f"{GROUP_NAMESPACE}/")]
        assert (
            await listed_groups(installation.node.kubeconfig, "--as", f"system:serviceaccount:{GROUP_NAMESPACE}:viewer")
            == visible
        )
    finally:
        installation.operator_kubectl("delete", "rolebinding/viewer", "role/rota-reader")
        installation.group_kubectl("delete", "rolebinding/viewer", "serviceaccount/viewer", "cg/seen")
        kubectl("delete", "cg/seen", "--namespace=default")
