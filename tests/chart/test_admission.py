"""The chart's admission policies on a real API server: which objects the operator may write, and users' templates."""

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from chart.charts import Helm, Release, as_its_account
from ground.api import Api, ApiError, Object
from ground.controlplane import ControlPlane
from ground.ours import made
from ground.poll import soon

NOT_OURS = "writes only objects whose controller is a ConsumerGroup or a RebalancePolicy"
ONLY_ANNOTATIONS = "changes only its own annotations"
POD = {"containers": [{"name": "app", "image": "app:1"}]}
DEPLOYMENT = {
    "selector": {"matchLabels": {"app": "orders"}},
    "template": {"metadata": {"labels": {"app": "orders"}}, "spec": POD},
}


@pytest.fixture
async def operator(
    api: Api, control_plane: ControlPlane, release: Release, namespace: str, tmp_path: Path
) -> AsyncIterator[Api]:
    """Connect with the token of the operator's ServiceAccount, once the admission policy is in force."""
    release.install()
    async with Api.connect(as_its_account(control_plane, release, tmp_path / "kubeconfig")) as connected:
        await soon(partial(is_in_force, connected, api, namespace))
        yield connected


async def is_in_force(operator: Api, api: Api, namespace: str) -> bool:
    path = maps_of(namespace)
    try:
        await operator.create(path, {"metadata": {"name": "probe"}})
    except ApiError as error:
        return NOT_OURS in str(error)
    await api.delete(f"{path}/probe")
    return False


@pytest.fixture
async def owner(api: Api, namespace: str) -> Object:
    """Create a group, and return the reference by which it is an object's controller."""
    group = await api.create(groups(namespace), a_group("orders", template=False))
    reference = {"name": "orders", "uid": group["metadata"]["uid"]}
    return {"apiVersion": "rota.dev/v1alpha1", "kind": "ConsumerGroup", **reference, "controller": True}


def owned(owner: Object, name: str, **body: object) -> Object:
    return {"metadata": {"name": name, "ownerReferences": [owner]}, **body}


def maps_of(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def secrets_of(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/secrets"


def deployments_of(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments"


def foreign(name: str, **body: object) -> Object:
    return {"metadata": {"name": name}, **body}


async def test_rbac_admission_policy_rejects_objects_that_are_not_rotas(
    operator: Api, api: Api, namespace: str, owner: Object
) -> None:
    maps = maps_of(namespace)
    deployments = deployments_of(namespace)
    await api.create(maps, foreign("theirs", data={"a": "b"}))
    await api.create(deployments, foreign("theirs", spec=DEPLOYMENT))
    await api.create(secrets_of(namespace), foreign("theirs", type="Opaque"))
    theirs = await api.get(f"{maps}/theirs")
    attempts = [
        operator.create(maps, foreign("new")),
        operator.replace(f"{maps}/theirs", {**theirs, "data": {"a": "changed"}}),
        # Taking an object over is rejected, too: the object must have belonged to Rota before.
        operator.replace(f"{maps}/theirs", {**theirs, "metadata": {**theirs["metadata"], "ownerReferences": [owner]}}),
        operator.create(deployments, foreign("new", spec=DEPLOYMENT)),
        operator.patch(f"{deployments}/theirs", {"spec": {"replicas": 0}}),
        operator.delete(f"{deployments}/theirs"),
        operator.create(maps, owned({**owner, "apiVersion": "apps/v1", "kind": "Deployment"}, "new")),
        operator.create(maps, owned({**owner, "controller": False}, "new")),
        operator.create(secrets_of(namespace), foreign("new", type="Opaque")),
        operator.replace(f"{secrets_of(namespace)}/theirs", owned(owner, "theirs", type="Opaque")),
    ]
    for attempt in attempts:
        with pytest.raises(ApiError, match=NOT_OURS):
            await attempt


async def test_rbac_admission_policy_accepts_what_the_operator_writes(
    operator: Api, namespace: str, owner: Object
) -> None:
    maps = maps_of(namespace)
    deployments = deployments_of(namespace)
    record = await operator.create(maps, owned(owner, "orders-rota", data={"a": "b"}))
    await operator.replace(f"{maps}/orders-rota", {**record, "data": {"a": "c"}})
    await operator.create(deployments, owned(owner, "orders", spec=DEPLOYMENT))
    await operator.patch(f"{deployments}/orders", {"spec": {"replicas": 2}})
    await operator.delete(f"{deployments}/orders")
    key = owned(owner, "orders-rota-key", type="Opaque", data={"current": ""})
    await operator.create(secrets_of(namespace), key)
    await operator.replace(f"{secrets_of(namespace)}/orders-rota-key", {**key, "data": {"current": "", "previous": ""}})
    event: Object = {
        "metadata": {"name": "e", "namespace": namespace},
        "involvedObject": {
            "apiVersion": "rota.dev/v1alpha1",
            "kind": "ConsumerGroup",
            "name": "orders",
            "namespace": namespace,
        },
        "reason": "Settled",
    }
    events = f"/api/v1/namespaces/{namespace}/events"
    await operator.create(events, event)
    about_a_pod = {
        **event,
        "metadata": {"name": "f"},
        "involvedObject": {**event["involvedObject"], "apiVersion": "v1"},
    }
    with pytest.raises(ApiError, match="writes only Events about ConsumerGroups"):
        await operator.create(events, about_a_pod)


async def test_rbac_admission_policy_lets_the_operator_take_over_an_assignment_that_has_lost_its_owner(
    operator: Api, api: Api, namespace: str, owner: Object
) -> None:
    maps = maps_of(namespace)
    labels = {"rota.dev/group": "orders"}
    for name, is_taken_over in (("orders-rota", True), ("orders", False)):
        stripped = await api.create(maps, {"metadata": {"name": name, "labels": labels}})
        body = {**stripped, "metadata": {**stripped["metadata"], "ownerReferences": [owner]}}
        if is_taken_over:
            await operator.replace(f"{maps}/{name}", body)
        else:
            with pytest.raises(ApiError, match=NOT_OURS):
                await operator.replace(f"{maps}/{name}", body)


async def test_rbac_admission_policy_lets_the_operator_change_only_its_annotations_of_pods(
    operator: Api, api: Api, namespace: str, owner: Object
) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods/app"
    pod = {"metadata": {"name": "app", "labels": {"app": "orders"}, "annotations": {"team": "a"}}, "spec": POD}
    await api.create(path.rpartition("/")[0], pod)
    ours = {"rota.dev/generation": "5-1", "rota.dev/key": "0", "controller.kubernetes.io/pod-deletion-cost": "7"}
    await operator.patch(path, {"metadata": {"annotations": ours}})
    await operator.patch(path, {"metadata": {"annotations": dict.fromkeys(ours)}})
    for attempt in (
        {"spec": {"containers": [{"name": "app", "image": "attacker:1"}]}},
        {"metadata": {"labels": {"app": "other"}}},
        {"metadata": {"labels": {"more": "labels"}}},
        {"metadata": {"annotations": {"team": "b"}}},
        {"metadata": {"annotations": {"team": None}}},
        {"metadata": {"annotations": {"sidecar.istio.io/inject": "false"}}},
        {"metadata": {"finalizers": ["example.com/never"]}},
        {"metadata": {"ownerReferences": [owner]}},
    ):
        with pytest.raises(ApiError, match=ONLY_ANNOTATIONS):
            await operator.patch(path, attempt, "strategic")


async def test_rbac_admission_policy_lets_the_operator_write_nothing_in_kube_system(
    operator: Api, owner: Object
) -> None:
    with pytest.raises(ApiError, match="writes nothing in kube-system"):
        await operator.create("/api/v1/namespaces/kube-system/configmaps", owned(owner, "orders-rota"))


async def test_rbac_admission_policy_lets_the_operator_write_its_own_key_and_no_other_secret_there(
    operator: Api, api: Api, release: Release
) -> None:
    secrets = secrets_of(release.namespace)
    key = await operator.get(f"{secrets}/{release.name}-operator-key")
    changed = await operator.replace(f"{secrets}/{release.name}-operator-key", {**key, "data": {"current": ""}})
    await api.delete(f"{secrets}/{release.name}-operator-key")
    changed["metadata"] = {"name": f"{release.name}-operator-key"}
    await operator.create(secrets, changed)
    with pytest.raises(ApiError, match=NOT_OURS):
        await operator.create(secrets, foreign("other", type="Opaque"))


async def test_rbac_admission_policy_lets_the_operator_write_only_opaque_secrets_with_keys(
    operator: Api, api: Api, namespace: str, owner: Object
) -> None:
    with pytest.raises(ApiError, match="writes only its own key Secret and Secrets named"):
        await operator.create(secrets_of(namespace), owned(owner, "other", type="Opaque"))
    stripped = await api.create(
        secrets_of(namespace),
        {"metadata": {"name": "shop-rota-key", "labels": {"rota.dev/group": "shop"}}, "type": "Opaque"},
    )
    stripped["metadata"]["ownerReferences"] = [owner]
    await operator.replace(f"{secrets_of(namespace)}/shop-rota-key", stripped)
    with pytest.raises(ApiError, match="Rota's operator writes only Secrets of type Opaque"):
        await operator.create(secrets_of(namespace), owned(owner, "orders-rota-key", type="example.com/other"))


async def test_rbac_admission_policy_does_not_concern_other_accounts(operator: Api, api: Api, namespace: str) -> None:
    await operator.list(maps_of(namespace))
    await api.create(maps_of(namespace), foreign("theirs"))


@pytest.mark.parametrize(("version", "is_rendered"), [("1.29.9", False), ("1.30.0", True), ("1.30.3-eks-1", True)])
def test_rbac_admission_policies_are_rendered_from_kubernetes_1_30(
    helm: Helm, version: str, *, is_rendered: bool
) -> None:
    rendered = helm.template("--kube-version", version, admissionPolicies={"templates": True})
    assert len(rendered.by_kind["ValidatingAdmissionPolicy"]) == 2 * is_rendered


# Templates.


@pytest.fixture
async def editor(api: Api, control_plane: ControlPlane, release: Release, namespace: str) -> AsyncIterator[Api]:
    """Connect as a user who may write ConsumerGroups and no Deployments, once the admission policy is in force."""
    release.install(admissionPolicies={"templates": True})
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rule = {"apiGroups": ["rota.dev"], "resources": ["consumergroups", "consumergroups/scale"], "verbs": ["*"]}
    await api.create(f"{rbac}/roles", {"metadata": {"name": "editor"}, "rules": [rule]})
    await bind(api, namespace, "editor")
    async with Api.connect(control_plane.user(f"editor-{namespace}", f"editor-{namespace}")) as connected:
        await soon(partial(is_rejected, connected, namespace))
        yield connected


async def bind(api: Api, namespace: str, role: str) -> None:
    binding = {
        "metadata": {"name": role},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
        "subjects": [{"kind": "User", "name": f"editor-{namespace}"}],
    }
    await api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", binding)


async def is_rejected(editor: Api, namespace: str) -> bool:
    """Try a group with a template; return whether the policy rejects it, not RBAC, which may take effect later."""
    try:
        await editor.create(groups(namespace), a_group("probe", template=True))
    except ApiError as error:
        return "may not create Deployments" in str(error)
    await editor.delete(f"{groups(namespace)}/probe")
    return False


def groups(namespace: str) -> str:
    return f"/apis/rota.dev/v1alpha1/namespaces/{namespace}/consumergroups"


def a_group(name: str, *, template: bool, image: str = "app:1") -> Object:
    broker = {"rocketmq": {"nameServers": ["ns:9876"]}}
    spec = {"replicas": 1, "template": {"spec": {"containers": [{"name": "app", "image": image}]}}} if template else {}
    return made("ConsumerGroup", name, broker=broker, subscriptions=[{"topic": "orders"}], **spec)


async def test_template_is_rejected_from_users_who_may_not_create_deployments(
    editor: Api, api: Api, namespace: str
) -> None:
    await editor.create(groups(namespace), a_group("plain", template=False))
    await api.create(groups(namespace), a_group("orders", template=True))
    path = f"{groups(namespace)}/orders"
    privileged = {"template": {"spec": {"hostPID": True}}}
    for attempt in (
        editor.create(groups(namespace), a_group("new", template=True)),
        editor.patch(f"{groups(namespace)}/plain", {"spec": a_group("plain", template=True)["spec"]}),
        editor.patch(path, {"spec": privileged}),
        editor.patch(path, {"spec": a_group("orders", template=True, image="attacker:1")["spec"]}),
    ):
        with pytest.raises(ApiError, match=f"editor-{namespace} may not create Deployments in namespace {namespace}"):
            await attempt
    # Users may change other fields if the template stays the same: autoscalers, and tools that apply the same manifest.
    await editor.patch(path, {"spec": {"replicas": 2}})
    await editor.patch(f"{path}/scale", {"spec": {"replicas": 3}})
    await editor.patch(path, {"metadata": {"labels": {"team": "a"}}})
    await editor.patch(path, {"spec": {"template": None, "replicas": None}})


async def test_template_is_accepted_from_users_who_may_create_deployments(
    editor: Api, api: Api, namespace: str
) -> None:
    rule = {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["create"]}
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    await api.create(f"{rbac}/roles", {"metadata": {"name": "deployer"}, "rules": [rule]})
    await bind(api, namespace, "deployer")

    async def is_accepted() -> bool:
        with suppress(ApiError):
            return bool(await editor.create(groups(namespace), a_group("orders", template=True)))
        return False

    await soon(is_accepted)
