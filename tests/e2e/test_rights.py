"""The rights of the operator, as a real API server lists and enforces them; and those of a sidecar."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.consumers import NAME, Consumers
from e2e.release import GROUP_NAMESPACE, OPERATOR_NAMESPACE, TIMEOUT_SECONDS, Installation
from ground.poll import eventually
from rota.kube.client.pod_status import SIDECAR_CONTAINER

pytestmark = pytest.mark.node

OPERATOR = f"system:serviceaccount:{OPERATOR_NAMESPACE}:rota"
UNBOUND = f"system:serviceaccount:{GROUP_NAMESPACE}:nobody"  # has the rights of every account
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
POD |= {"spec": {"serviceAccountName": "rota", "containers": [{"name": "c", "image": "i"}]}}
BINDING = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "b"}}
BINDING |= {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}}
FORBIDDEN = {
    "all Secrets": ("get", "secrets"),
    "deletion of a pod": ("delete", "pod", "--all"),
    "a command in a pod": ("exec", f"deploy/{NAME}", "--", "true"),
    "a pod's log": ("logs", f"deploy/{NAME}"),
    "a group's spec": ("patch", "cg", NAME, "--type=merge", "-p", '{"spec": {"paused": true}}'),
    "deletion of a group": ("delete", "cg", NAME),
    "deletion of all fleets": ("delete", "--raw", f"/apis/apps/v1/namespaces/{GROUP_NAMESPACE}/deployments"),
    "deletion of an assignment": ("delete", "configmap", f"{NAME}-rota"),
    "another Lease": ("get", "lease", "other", "-n", "kube-system"),
    "deletion of its own Lease": ("delete", "lease", "rota", "-n", OPERATOR_NAMESPACE),
    "a token of its own": ("create", "token", "rota", "-n", OPERATOR_NAMESPACE),
    "namespaces": ("get", "namespaces"),
    "all nodes": ("get", "nodes"),
}

Right = tuple[str, str, str, str]  # verb, API group, resource, name
OPERATOR_ROLES = {"rota", "rota-page-auth"}
# Granted by a Role of every cluster: the CA of client certificates, by which the page authenticates users.
AUTHORITY_OF_CLIENTS: set[Right] = {
    (verb, "", "configmaps", "extension-apiserver-authentication") for verb in ("get", "list", "watch")
}


def rights(rules: list[dict[str, Any]]) -> Iterator[Right]:
    """Yield each right of the rules."""
    for rule in rules:
        groups, names = rule.get("apiGroups") or [""], rule.get("resourceNames") or [""]
        yield from product(rule["verbs"], groups, rule.get("resources") or [], names)


def allowed_rights(installation: Installation, user: str, namespace: str) -> set[Right]:
    """Return the rights of a user in a namespace, as the API server lists them."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}
    review_text = json.dumps(review | {"spec": {"namespace": namespace}})
    output = installation.node.kubectl(
        "create", "-f-", "-o", "json", "--validate=false", f"--as={user}", feed=review_text
    )
    review_status = json.loads(output)["status"]
    assert not review_status["incomplete"]
    return {*rights(review_status["resourceRules"])}


def chart_rights(installation: Installation, namespace: str) -> set[Right]:
    """Return the operator's rights in a namespace by the roles of the release, without the roles for users."""
    bodies = [body for body in yaml.safe_load_all(installation.helm_release("get manifest")) if body]
    roles = [body for body in bodies if body["kind"] == "Role" and body["metadata"]["namespace"] == namespace]
    roles += [body for body in bodies if body["kind"] == "ClusterRole" and body["metadata"]["name"] in OPERATOR_ROLES]
    cluster_rights = AUTHORITY_OF_CLIENTS if namespace == "kube-system" else set[Right]()
    return {right for role in roles for right in rights(role["rules"])} | cluster_rights


@pytest.fixture
def token(installation: Installation, tmp_path: Path) -> Path:
    """Return a kubeconfig with the operator's token and nothing else."""
    config = yaml.safe_load(installation.node.kubeconfig.read_text())
    operator_token = installation.operator_kubectl("create", "token", "rota")
    config["users"] = [{"name": user["name"], "user": {"token": operator_token}} for user in config["users"]]
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("namespace", [GROUP_NAMESPACE, OPERATOR_NAMESPACE, "kube-system"])
def test_rbac_allows_the_operator_exactly_what_the_chart_lists(installation: Installation, namespace: str) -> None:
    rights_of_all = allowed_rights(installation, UNBOUND, namespace)
    assert allowed_rights(installation, OPERATOR, namespace) - rights_of_all == chart_rights(installation, namespace)


@pytest.mark.usefixtures("consumers")
def test_rbac_denies_every_forbidden_request_with_the_operators_token(installation: Installation, token: Path) -> None:
    def is_refused(*arguments: str, feed: str | None = None) -> bool:
        try:
            installation.node.kubectl("--kubeconfig", str(token), "--namespace", GROUP_NAMESPACE, *arguments, feed=feed)
        except RuntimeError as error:
            return "forbidden" in str(error)
        return False

    assert not is_refused("get", "cg,rp,pods")
    assert [name for name, arguments in FORBIDDEN.items() if not is_refused(*arguments)] == []
    assert [body["kind"] for body in (POD, BINDING) if not is_refused("create", "-f-", feed=json.dumps(body))] == []


def test_sidecar_has_no_service_account_token_while_its_app_has_one(
    installation: Installation, consumers: Consumers
) -> None:
    pod, *_ = consumers.pods()

    def token_files(container: str) -> set[str]:
        return {*installation.group_kubectl("exec", pod, "-c", container, "--", "ls", TOKEN).split()}

    assert token_files(SIDECAR_CONTAINER) == set()
    assert "token" in eventually(lambda: token_files("app"), TIMEOUT_SECONDS)
