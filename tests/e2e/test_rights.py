"""What the operator may do, asked of a real API server and tried; and what of a pod's rights a sidecar has."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.consumers import NAME, Consumers
from e2e.release import HOME, SECONDS, SHOP, Installed
from ground.poll import eventually
from rota.kube.client.pod_status import SIDECAR_CONTAINER

pytestmark = pytest.mark.node

OPERATOR, NOBODY = f"system:serviceaccount:{HOME}:rota", f"system:serviceaccount:{SHOP}:nobody"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"  # where it lies
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
POD |= {"spec": {"serviceAccountName": "rota", "containers": [{"name": "c", "image": "i"}]}}
BINDING = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "b"}}
BINDING |= {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}}
FORBIDDEN = {
    "all Secrets": ("get", "secrets"),
    "the end of a pod": ("delete", "pod", "--all"),
    "a command in a pod": ("exec", f"deploy/{NAME}", "--", "true"),
    "a pod's log": ("logs", f"deploy/{NAME}"),
    "a group's spec": ("patch", "cg", NAME, "--type=merge", "-p", '{"spec": {"paused": true}}'),
    "a group's end": ("delete", "cg", NAME),
    "the end of all fleets": ("delete", "--raw", f"/apis/apps/v1/namespaces/{SHOP}/deployments"),
    "the end of a record": ("delete", "configmap", f"{NAME}-rota"),
    "somebody else's Lease": ("get", "lease", "other", "-n", "kube-system"),
    "its own Lease's end": ("delete", "lease", "rota", "-n", HOME),
    "a token of its own": ("create", "token", "rota", "-n", HOME),
    "namespaces": ("get", "namespaces"),
    "all nodes": ("get", "nodes"),
}

Right = tuple[str, str, str, str]  # verb, API group, resource, name
OF_OPERATOR = {"rota", "rota-page-auth"}
# By a Role of every cluster: the authority that signs client certificates, which the page asks users for.
AUTHORITY_OF_CLIENTS: set[Right] = {
    (verb, "", "configmaps", "extension-apiserver-authentication") for verb in ("get", "list", "watch")
}


def rights(rules: list[dict[str, Any]]) -> Iterator[Right]:
    """Yield what rules come to, one by one."""
    for rule in rules:
        groups, names = rule.get("apiGroups") or [""], rule.get("resourceNames") or [""]
        yield from product(rule["verbs"], groups, rule.get("resources") or [], names)


def may(installed: Installed, user: str, namespace: str) -> set[Right]:
    """Return what the API server says that somebody may do there."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}
    asked = json.dumps(review | {"spec": {"namespace": namespace}})
    answer = installed.node.kubectl("create", "-f-", "-o", "json", "--validate=false", f"--as={user}", feed=asked)
    found = json.loads(answer)["status"]
    assert not found["incomplete"]
    return {*rights(found["resourceRules"])}


def listed(installed: Installed, namespace: str) -> set[Right]:
    """Return what the release's roles come to there; all of them are the operator's, but those that people have."""
    bodies = [body for body in yaml.safe_load_all(installed.release("get manifest")) if body]
    roles = [it for it in bodies if it["kind"] == "Role" and it["metadata"]["namespace"] == namespace]
    roles += [it for it in bodies if it["kind"] == "ClusterRole" and it["metadata"]["name"] in OF_OPERATOR]
    of_cluster = AUTHORITY_OF_CLIENTS if namespace == "kube-system" else set[Right]()
    return {right for role in roles for right in rights(role["rules"])} | of_cluster


@pytest.fixture
def token(installed: Installed, tmp_path: Path) -> Path:
    """Return a kubeconfig with the operator's token and nothing else."""
    config = yaml.safe_load(installed.node.kubeconfig.read_text())
    made = installed.home("create", "token", "rota")
    config["users"] = [{"name": it["name"], "user": {"token": made}} for it in config["users"]]
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("namespace", [SHOP, HOME, "kube-system"])
def test_rbac_allows_the_operator_exactly_what_the_chart_lists(installed: Installed, namespace: str) -> None:
    everybody = may(installed, NOBODY, namespace)
    assert may(installed, OPERATOR, namespace) - everybody == listed(installed, namespace)


@pytest.mark.usefixtures("consumers")
def test_rbac_denies_every_forbidden_request_with_the_operators_token(installed: Installed, token: Path) -> None:
    def refused(*what: str, feed: str | None = None) -> bool:
        try:
            installed.node.kubectl("--kubeconfig", str(token), "--namespace", SHOP, *what, feed=feed)
        except RuntimeError as error:
            return "forbidden" in str(error)
        return False

    assert not refused("get", "cg,rp,pods")
    assert [what for what, asked in FORBIDDEN.items() if not refused(*asked)] == []
    assert [body["kind"] for body in (POD, BINDING) if not refused("create", "-f-", feed=json.dumps(body))] == []


def test_sidecar_has_no_service_account_token_while_its_app_has_one(installed: Installed, consumers: Consumers) -> None:
    pod, *_ = consumers.pods()

    def lies(container: str) -> set[str]:
        return {*installed.shop("exec", pod, "-c", container, "--", "ls", TOKEN).split()}

    assert lies(SIDECAR_CONTAINER) == set()
    assert "token" in eventually(lambda: lies("app"), SECONDS)
