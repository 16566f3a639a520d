"""What the operator may do, and people with it: these tables and no more."""

import json
from collections.abc import Iterator

import pytest

from chart.charts import Helm, Refused, Release, Rendered
from ground.api import Api, Object
from ground.poll import soon

WHERE_GROUPS_ARE = {
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


def rights(role: Object) -> dict[str, str]:
    """Return a role's verbs by what they are about: "group/resource", and a name where it is one object."""
    found: dict[str, str] = {}
    for rule in role["rules"]:
        for name in rule.get("resourceNames", [""]):
            for group, resource in ((group, it) for group in rule["apiGroups"] for it in rule["resources"]):
                about = f"{group}/{resource} {name}".strip()
                assert about not in found
                found[about] = " ".join(rule["verbs"])
    return found


def bound(rendered: Rendered, *, page: bool) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield where the operator has which rights, through which kind of role that the chart brings."""
    for binding in [*rendered.by_kind["ClusterRoleBinding"], *rendered.by_kind["RoleBinding"]]:
        is_foreign = binding["roleRef"]["name"] == "extension-apiserver-authentication-reader"
        if is_foreign or (binding["metadata"]["name"] == PAGE_AUTH) is not page:
            continue
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "rota", "namespace": "rota-system"}]
        namespace = binding["metadata"].get("namespace", "")
        kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
        (role,) = (
            it
            for it in rendered.by_kind[kind]
            if (it["metadata"]["name"], it["metadata"].get("namespace", "")) == (name, namespace)
        )
        yield kind, namespace, rights(role)


def of_operator(rendered: Rendered) -> list[tuple[str, str, dict[str, str]]]:
    """Return its rights, but those by which it knows the page's users."""
    return [*bound(rendered, page=False)]


def test_rbac_of_the_page_reviews_users_in_the_whole_cluster_and_is_left_out_with_it(helm: Helm) -> None:
    for namespaces in ([], ["shop"]):
        rendered = helm.template(watchNamespaces=namespaces)
        assert [*bound(rendered, page=True)] == [("ClusterRole", "", REVIEWS)]
        (reader,) = (it for it in rendered.by_kind["RoleBinding"] if it["metadata"]["name"] == PAGE_AUTH)
        assert reader["metadata"]["namespace"] == "kube-system"
        assert reader["roleRef"]["name"] == "extension-apiserver-authentication-reader"
    without = helm.template(page={"auth": "None"})
    assert [*bound(without, page=True)] == []
    names = {it["metadata"]["name"] for kind in ("ClusterRole", "RoleBinding") for it in without.by_kind[kind]}
    assert not {PAGE_AUTH, "rota-metrics-reader"} & names


def test_rbac_for_all_namespaces_grants_exactly_the_listed_rights(helm: Helm) -> None:
    assert of_operator(helm.template()) == [
        ("ClusterRole", "", WHERE_GROUPS_ARE | NODES),
        ("Role", "rota-system", LEASE),
    ]
    assert of_operator(helm.template(rbac={"nodes": False}))[0] == ("ClusterRole", "", WHERE_GROUPS_ARE)


def test_rbac_for_watched_namespaces_grants_rights_only_there(helm: Helm) -> None:
    assert of_operator(helm.template(watchNamespaces=["shop", "billing"])) == [
        ("Role", "shop", WHERE_GROUPS_ARE),
        ("Role", "billing", WHERE_GROUPS_ARE),
        ("Role", "rota-system", LEASE),
    ]


def test_rbac_of_secrets_can_be_limited_to_namespaces(helm: Helm) -> None:
    without = WHERE_GROUPS_ARE | {"/secrets": "create update"}
    secrets = {"/secrets": "get"}
    assert of_operator(helm.template(rbac={"secrets": ["shop", "billing"]})) == [
        ("ClusterRole", "", without | NODES),
        ("Role", "shop", secrets),
        ("Role", "billing", secrets),
        ("Role", "rota-system", LEASE),
    ]
    narrow = helm.template(watchNamespaces=["shop", "billing"], rbac={"secrets": ["billing"]})
    assert of_operator(narrow) == [
        ("Role", "shop", without),
        ("Role", "billing", without),
        ("Role", "billing", secrets),
        ("Role", "rota-system", LEASE),
    ]
    with pytest.raises(Refused, match=r"rbac\.secrets names other, which is not among watchNamespaces"):
        helm.template(watchNamespaces=["shop"], rbac={"secrets": ["other"]})


def test_rbac_without_fleets_grants_no_rights_to_deployments(helm: Helm) -> None:
    rendered = helm.template(rbac={"fleets": False})
    without = {what: verbs for what, verbs in WHERE_GROUPS_ARE.items() if what != "apps/deployments"}
    assert of_operator(rendered)[0] == ("ClusterRole", "", without | NODES)
    assert rendered.env["ROTA_FLEETS"] == "false"


def test_rbac_user_roles_aggregate_to_view_edit_and_admin(helm: Helm) -> None:
    rendered = helm.template(watchNamespaces=["shop"])
    of_users = (it for it in rendered.by_kind["ClusterRole"] if it["metadata"]["name"] in {"rota-view", "rota-edit"})
    found = {it["metadata"]["name"]: it for it in of_users}
    assert {name: rights(it) for name, it in found.items()} == {"rota-view": VIEW, "rota-edit": EDIT}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    taken_up = {
        name: [label.removeprefix(prefix) for label in it["metadata"]["labels"] if label.startswith(prefix)]
        for name, it in found.items()
    }
    assert taken_up == {"rota-view": ["view", "edit", "admin"], "rota-edit": ["edit", "admin"]}


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


async def allowed(api: Api, user: Object, namespace: str, verb: str, what: str) -> bool:
    """Ask whether somebody may do something with "group/resource" or "group/resource/part", " name" behind it."""
    what, _, name = what.partition(" ")
    group, resource, *part = what.split("/")
    asked = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "name": name}
    spec = {**user, "resourceAttributes": {**asked, "subresource": "".join(part)}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = await api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


@pytest.mark.parametrize("narrow", [True, False])
async def test_rbac_on_the_api_server_grants_the_listed_and_denies_forbidden_rights(
    api: Api, release: Release, namespace: str, *, narrow: bool
) -> None:
    release.install(watchNamespaces=[namespace] if narrow else [])
    user = {"user": f"system:serviceaccount:{release.namespace}:{release.name}"}
    for what, verbs in WHERE_GROUPS_ARE.items():
        for verb in verbs.split():
            assert await allowed(api, user, namespace, verb, what), (verb, what)
            assert await allowed(api, user, "default", verb, what) is not narrow, (verb, what)
    assert await allowed(api, user, "", "get", "/nodes n") is not narrow
    assert await allowed(api, user, release.namespace, "update", f"coordination.k8s.io/leases {release.name}")
    for verb, what in FORBIDDEN:
        assert not await allowed(api, user, release.namespace, verb, what), (verb, what)
        assert not await allowed(api, user, namespace, verb, what), (verb, what)


async def test_rbac_lets_users_view_and_edit_groups_by_their_role(api: Api, release: Release) -> None:
    release.install()
    where = release.namespace
    for role in ("view", "edit", "admin"):
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        body = {"metadata": {"name": role}, "roleRef": reference, "subjects": [{"kind": "User", "name": role}]}
        await api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{where}/rolebindings", body)

    async def taken_up() -> bool:
        editing = await allowed(api, {"user": "admin"}, where, "delete", "rota.dev/rebalancepolicies p")
        return editing and await allowed(api, {"user": "view"}, where, "list", "rota.dev/consumergroups")

    await soon(taken_up)
    may = {
        role: [
            await allowed(api, {"user": role}, where, "list", "rota.dev/consumergroups"),
            await allowed(api, {"user": role}, where, "patch", "rota.dev/consumergroups/scale g"),
            await allowed(api, {"user": role}, where, "patch", "rota.dev/consumergroups/status g"),
        ]
        for role in ("view", "edit", "admin")
    }
    assert may == {"view": [True, False, False], "edit": [True, True, False], "admin": [True, True, False]}
