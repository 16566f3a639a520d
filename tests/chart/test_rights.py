"""The rights of the operator and of users' roles: exactly these tables."""

import json
from collections.abc import Iterator

import pytest

from chart.charts import Helm, HelmError, Release, Rendered
from ground.api import Api, Object
from ground.poll import soon

GROUP_NAMESPACE_RIGHTS = {
    "rota.dev/consumergroups": "get list watch",
    "rota.dev/consumergroups/status": "patch",
    "rota.dev/rebalancepolicies": "get list watch",
    "rota.dev/rebalancepolicies/status": "patch",
    "/pods": "get list watch patch",
    "/configmaps": "get list watch create update",
    "/secrets": "get create update",
    "/events": "create get patch",
    "apps/deployments": "get list watch create patch delete",
}
NODES = {"/nodes": "get"}
PAGE_AUTH = "rota-page-auth"
REVIEWS = {"authentication.k8s.io/tokenreviews": "create", "authorization.k8s.io/subjectaccessreviews": "create"}
LEASE = {
    "coordination.k8s.io/leases": "create",
    "coordination.k8s.io/leases rota": "get update",
    "/pods": "get",
    "/secrets": "create",
    "/secrets rota-operator-key": "get update",
}
FORBIDDEN = [
    ("list", "/secrets"),
    ("patch", "/secrets"),
    ("delete", "/secrets s"),
    ("delete", "/pods p"),
    ("create", "/pods/exec p"),
    ("update", "rota.dev/consumergroups g"),
    ("deletecollection", "apps/deployments"),
    ("update", "coordination.k8s.io/leases somebodys"),
    ("delete", "coordination.k8s.io/leases rota"),
]
VIEW = {
    "rota.dev/consumergroups": "get list watch",
    "rota.dev/rebalancepolicies": "get list watch",
    "rota.dev/consumergroups/status": "get",
    "rota.dev/consumergroups/scale": "get",
    "rota.dev/rebalancepolicies/status": "get",
}
EDIT = {
    "rota.dev/consumergroups": "create update patch delete deletecollection",
    "rota.dev/rebalancepolicies": "create update patch delete deletecollection",
    "rota.dev/consumergroups/scale": "update patch",
}


def rights_of(role: Object) -> dict[str, str]:
    """Return a role's verbs by target: "group/resource", followed by a name if the rule is limited to one object."""
    verbs_by_target: dict[str, str] = {}
    for rule in role["rules"]:
        for name in rule.get("resourceNames", [""]):
            for group, resource in ((group, resource) for group in rule["apiGroups"] for resource in rule["resources"]):
                target = f"{group}/{resource} {name}".strip()
                assert target not in verbs_by_target
                verbs_by_target[target] = " ".join(rule["verbs"])
    return verbs_by_target


def operator_bindings(rendered: Rendered, *, page: bool) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the operator's bindings to the chart's roles: the kind of role, the namespace, and the rights."""
    for binding in [*rendered.by_kind["ClusterRoleBinding"], *rendered.by_kind["RoleBinding"]]:
        is_foreign = binding["roleRef"]["name"] == "extension-apiserver-authentication-reader"
        if is_foreign or (binding["metadata"]["name"] == PAGE_AUTH) is not page:
            continue
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "rota", "namespace": "rota-system"}]
        namespace = binding["metadata"].get("namespace", "")
        kind = binding["roleRef"]["kind"]
        name = binding["roleRef"]["name"]
        (role,) = (
            role
            for role in rendered.by_kind[kind]
            if (role["metadata"]["name"], role["metadata"].get("namespace", "")) == (name, namespace)
        )
        yield kind, namespace, rights_of(role)


def operator_rights(rendered: Rendered) -> list[tuple[str, str, dict[str, str]]]:
    """Return the operator's rights, except those to authenticate the page's users."""
    return [*operator_bindings(rendered, page=False)]


def test_rbac_of_the_page_reviews_users_in_the_whole_cluster_and_is_left_out_with_it(helm: Helm) -> None:
    for namespaces in ([], ["shop"]):
        rendered = helm.template(watchNamespaces=namespaces)
        assert [*operator_bindings(rendered, page=True)] == [("ClusterRole", "", REVIEWS)]
        (reader,) = (body for body in rendered.by_kind["RoleBinding"] if body["metadata"]["name"] == PAGE_AUTH)
        assert reader["metadata"]["namespace"] == "kube-system"
        assert reader["roleRef"]["name"] == "extension-apiserver-authentication-reader"
    without_auth = helm.template(page={"auth": "None"})
    assert [*operator_bindings(without_auth, page=True)] == []
    names = {body["metadata"]["name"] for kind in ("ClusterRole", "RoleBinding") for body in without_auth.by_kind[kind]}
    assert not {PAGE_AUTH, "rota-metrics-reader"} & names


def test_rbac_for_all_namespaces_grants_exactly_the_listed_rights(helm: Helm) -> None:
    assert operator_rights(helm.template()) == [
        ("ClusterRole", "", GROUP_NAMESPACE_RIGHTS | NODES),
        ("Role", "rota-system", LEASE),
    ]
    assert operator_rights(helm.template(rbac={"nodes": False}))[0] == ("ClusterRole", "", GROUP_NAMESPACE_RIGHTS)


def test_rbac_for_watched_namespaces_grants_rights_only_there(helm: Helm) -> None:
    assert operator_rights(helm.template(watchNamespaces=["shop", "billing"])) == [
        ("Role", "shop", GROUP_NAMESPACE_RIGHTS),
        ("Role", "billing", GROUP_NAMESPACE_RIGHTS),
        ("Role", "rota-system", LEASE),
    ]


def test_rbac_of_secrets_can_be_limited_to_namespaces(helm: Helm) -> None:
    without = GROUP_NAMESPACE_RIGHTS | {"/secrets": "create update"}
    secrets = {"/secrets": "get"}
    assert operator_rights(helm.template(rbac={"secrets": ["shop", "billing"]})) == [
        ("ClusterRole", "", without | NODES),
        ("Role", "shop", secrets),
        ("Role", "billing", secrets),
        ("Role", "rota-system", LEASE),
    ]
    narrow = helm.template(watchNamespaces=["shop", "billing"], rbac={"secrets": ["billing"]})
    assert operator_rights(narrow) == [
        ("Role", "shop", without),
        ("Role", "billing", without),
        ("Role", "billing", secrets),
        ("Role", "rota-system", LEASE),
    ]
    with pytest.raises(HelmError, match=r"rbac\.secrets names other, which is not among watchNamespaces"):
        helm.template(watchNamespaces=["shop"], rbac={"secrets": ["other"]})


def test_rbac_without_fleets_grants_no_rights_to_deployments(helm: Helm) -> None:
    rendered = helm.template(rbac={"fleets": False})
    without = {target: verbs for target, verbs in GROUP_NAMESPACE_RIGHTS.items() if target != "apps/deployments"}
    assert operator_rights(rendered)[0] == ("ClusterRole", "", without | NODES)
    assert rendered.env["ROTA_FLEETS"] == "false"


def test_rbac_user_roles_aggregate_to_view_edit_and_admin(helm: Helm) -> None:
    rendered = helm.template(watchNamespaces=["shop"])
    user_roles = (
        role for role in rendered.by_kind["ClusterRole"] if role["metadata"]["name"] in {"rota-view", "rota-edit"}
    )
    roles = {role["metadata"]["name"]: role for role in user_roles}
    assert {name: rights_of(role) for name, role in roles.items()} == {"rota-view": VIEW, "rota-edit": EDIT}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    aggregated = {
        name: [label.removeprefix(prefix) for label in role["metadata"]["labels"] if label.startswith(prefix)]
        for name, role in roles.items()
    }
    assert aggregated == {"rota-view": ["view", "edit", "admin"], "rota-edit": ["edit", "admin"]}


@pytest.mark.parametrize("namespaces", [[], ["shop"]])
def test_rbac_has_no_wildcard(helm: Helm, namespaces: list[str]) -> None:
    rendered = helm.template(watchNamespaces=namespaces)
    rules = [rule for kind in ("Role", "ClusterRole") for role in rendered.by_kind[kind] for rule in role["rules"]]
    assert rules
    assert "*" not in json.dumps(rules)
    assert [rule for rule in rules if "nonResourceURLs" in rule] == [
        {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
    ]


# On a real API server.


async def is_allowed(api: Api, user: Object, namespace: str, verb: str, target: str) -> bool:
    """Whether a user may do this with "group/resource" or "group/resource/part", optionally followed by " name"."""
    target, _, name = target.partition(" ")
    group, resource, *part = target.split("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "name": name}
    spec = {**user, "resourceAttributes": {**attributes, "subresource": "".join(part)}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    response = await api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(response["status"]["allowed"])


@pytest.mark.parametrize("narrow", [True, False])
async def test_rbac_on_the_api_server_grants_the_listed_and_denies_forbidden_rights(
    api: Api, release: Release, namespace: str, *, narrow: bool
) -> None:
    release.install(watchNamespaces=[namespace] if narrow else [])
    user = {"user": f"system:serviceaccount:{release.namespace}:{release.name}"}
    for target, verbs in GROUP_NAMESPACE_RIGHTS.items():
        for verb in verbs.split():
            assert await is_allowed(api, user, namespace, verb, target), (verb, target)
            assert await is_allowed(api, user, "default", verb, target) is not narrow, (verb, target)
    assert await is_allowed(api, user, "", "get", "/nodes n") is not narrow
    assert await is_allowed(api, user, release.namespace, "update", f"coordination.k8s.io/leases {release.name}")
    for verb, target in FORBIDDEN:
        assert not await is_allowed(api, user, release.namespace, verb, target), (verb, target)
        assert not await is_allowed(api, user, namespace, verb, target), (verb, target)


async def test_rbac_lets_users_view_and_edit_groups_by_their_role(api: Api, release: Release) -> None:
    release.install()
    namespace = release.namespace
    for role in ("view", "edit", "admin"):
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        body = {"metadata": {"name": role}, "roleRef": reference, "subjects": [{"kind": "User", "name": role}]}
        await api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", body)

    async def is_aggregated() -> bool:
        editing = await is_allowed(api, {"user": "admin"}, namespace, "delete", "rota.dev/rebalancepolicies p")
        return editing and await is_allowed(api, {"user": "view"}, namespace, "list", "rota.dev/consumergroups")

    await soon(is_aggregated)
    permissions = {
        role: [
            await is_allowed(api, {"user": role}, namespace, "list", "rota.dev/consumergroups"),
            await is_allowed(api, {"user": role}, namespace, "patch", "rota.dev/consumergroups/scale g"),
            await is_allowed(api, {"user": role}, namespace, "patch", "rota.dev/consumergroups/status g"),
        ]
        for role in ("view", "edit", "admin")
    }
    assert permissions == {"view": [True, False, False], "edit": [True, True, False], "admin": [True, True, False]}
