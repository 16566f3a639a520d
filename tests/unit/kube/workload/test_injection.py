"""Injection of the sidecar into pod templates, and its complete removal."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import a_spec
from rota.kube.client.objects import TEMPLATE_DIGEST_ANNOTATION, CustomResource, Metadata, Pod
from rota.kube.workload.deployment_manifest import build_manifest
from rota.kube.workload.injection import IMAGE_ANNOTATION, REVERSE_PATCH_ANNOTATION, inject, remove_sidecar
from rota.kube.workload.reverse_patch import apply_patch, make_patch
from rota.kube.workload.sidecar_container import SidecarSpec
from rota.spec import InvalidSpecError

Object = dict[str, Any]

SIDECAR = SidecarSpec(image="rota-sidecar:1")
DRAINED = {"preStop": {"httpGet": {"path": "/v1/drained", "port": 9911}}}
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"

MUTUAL = {"enabled": True, "clientSecret": {"name": "client"}}


def a_template(*containers: Object, **spec: Any) -> Object:
    return {"metadata": {"labels": {"app": "shop"}}, "spec": {"containers": [*containers] or [{"name": "app"}], **spec}}


def an_app(**fields: Any) -> Object:
    return {"name": "app", "image": "app", **fields}


def sidecar_of(template: Object) -> Object:
    (sidecar,) = [container for container in template["spec"]["initContainers"] if container["name"] == "rota-sidecar"]
    assert isinstance(sidecar, dict)
    return sidecar


def mounts(template: Object) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in sidecar_of(template)["volumeMounts"]}


def volumes(template: Object) -> Object:
    return {
        volume["name"]: {key: volume[key] for key in volume if key != "name"} for volume in template["spec"]["volumes"]
    }


# Injection.


def test_injection_labels_pods_with_the_group_and_annotates_the_sidecar_image() -> None:
    metadata = inject(a_template(), "orders", SIDECAR)["metadata"]
    assert metadata["labels"] == {"app": "shop", "rota.dev/group": "orders"}
    assert metadata["annotations"][IMAGE_ANNOTATION] == "rota-sidecar:1"


def test_injection_adds_a_native_sidecar_after_the_apps_init_containers() -> None:
    injected = inject(a_template(an_app(), initContainers=[{"name": "migrate"}]), "orders", SIDECAR)
    assert [container["name"] for container in injected["spec"]["initContainers"]] == ["migrate", "rota-sidecar"]
    assert sidecar_of(injected)["restartPolicy"] == "Always"
    assert sidecar_of(injected)["command"] == ["python", "-m", "rota.sidecar"]


def test_injection_sets_pod_identity_and_folders_in_the_environment() -> None:
    env = {variable["name"]: variable for variable in sidecar_of(inject(a_template(), "orders", SIDECAR))["env"]}
    fields = {
        name: variable["valueFrom"]["fieldRef"]["fieldPath"]
        for name, variable in env.items()
        if "valueFrom" in variable
    }
    assert fields == {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
        "HOST_IP": "status.hostIP",
    }
    values = {name: variable["value"] for name, variable in env.items() if "value" in variable}
    assert values == {
        "ROTA_DOCUMENTS": "/etc/rota",
        "ROTA_KEY": "/etc/rota-key",
        "ROTA_STATE": "/var/lib/rota",
        "ROTA_RUN": "/run/rota",
    }


def test_injection_mounts_the_config_map_whole_and_as_optional() -> None:
    injected = inject(a_template(), "orders", SIDECAR)
    assert volumes(injected)[mounts(injected)["/etc/rota"]] == {"configMap": {"name": "orders-rota", "optional": True}}
    assert not any("subPath" in mount for mount in sidecar_of(injected)["volumeMounts"])


def test_injection_hides_the_service_account_token_from_the_sidecar_only() -> None:
    injected = inject(a_template(an_app()), "orders", SIDECAR)
    assert volumes(injected)[mounts(injected)[TOKEN]] == {"emptyDir": {}}
    assert "volumeMounts" not in injected["spec"]["containers"][0]
    assert "automountServiceAccountToken" not in injected["spec"]


def test_injection_mounts_secrets_that_the_group_names() -> None:
    tls = {"enabled": True, "caSecret": {"name": "authorities"}, "clientSecret": {"name": "client"}}
    rocketmq = {"nameServers": ["ns:9876"], "credentialsSecret": {"name": "acl"}, "tls": tls}
    sidecar = SidecarSpec.from_spec(a_spec(broker={"rocketmq": rocketmq}), "rota-sidecar:1", 30.0)
    injected = inject(a_template(), "orders", sidecar)
    assert volumes(injected)[mounts(injected)["/etc/rota-credentials"]] == {"secret": {"secretName": "acl"}}
    assert volumes(injected)[mounts(injected)["/etc/rota-ca"]] == {"secret": {"secretName": "authorities"}}
    assert volumes(injected)[mounts(injected)["/etc/rota-client"]] == {"secret": {"secretName": "client"}}
    assert {"name": "ROTA_CLIENT", "value": "/etc/rota-client"} in sidecar_of(injected)["env"]
    without_secrets = {"/etc/rota", "/etc/rota-key", TOKEN, "/var/lib/rota", "/run/rota"}
    assert mounts(inject(a_template(), "orders", SIDECAR)).keys() == without_secrets


def test_injection_mounts_the_groups_key_and_the_hooks_socket_into_the_sidecar_alone() -> None:
    injected = inject(a_template(an_app()), "orders", SIDECAR)
    key = {"secret": {"secretName": "orders-rota-key", "optional": True}}
    assert volumes(injected)[mounts(injected)["/etc/rota-key"]] == key
    socket = {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    assert volumes(injected)[mounts(injected)["/run/rota"]] == socket
    hook = {"preStop": {"exec": {"command": ["python", "-m", "rota.sidecar.prestop"]}}}
    assert sidecar_of(injected)["lifecycle"] == hook
    assert injected["spec"]["containers"] == [an_app(lifecycle=DRAINED)]


def test_injection_keeps_state_in_an_empty_dir_unless_the_app_mounts_a_volume() -> None:
    injected = inject(a_template(), "orders", SIDECAR)
    assert volumes(injected)[mounts(injected)["/var/lib/rota"]] == {"emptyDir": {"sizeLimit": "256Mi"}}
    mount = {"name": "data", "mountPath": "/var/lib/rota/", "subPath": "offsets"}
    injected = inject(a_template(an_app(volumeMounts=[mount])), "orders", SIDECAR)
    assert mounts(injected)["/var/lib/rota"] == "data"
    assert {"name": "data", "mountPath": "/var/lib/rota", "subPath": "offsets"} in sidecar_of(injected)["volumeMounts"]
    assert "rota-state" not in volumes(injected)


def test_injection_probes_find_a_hanging_sidecar_unready_before_dead() -> None:
    sidecar = sidecar_of(inject(a_template(), "orders", SIDECAR))
    probes = [sidecar[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert [probe["httpGet"] for probe in probes] == [
        {"path": path, "port": 9911} for path in ("/healthz", "/readyz", "/healthz")
    ]
    _, readiness, liveness = (
        (probe["periodSeconds"] + probe["timeoutSeconds"]) * probe["failureThreshold"] for probe in probes
    )
    assert readiness < 10  # lostAfter
    assert liveness > 40  # a sidecar that hung for less continues
    assert sidecar["ports"] == [
        {"name": "rota-report", "containerPort": 9911},
        {"name": "rota-control", "containerPort": 9913},
    ]


def test_injection_sets_resources_of_the_group_or_small_defaults() -> None:
    assert sidecar_of(inject(a_template(), "orders", SIDECAR))["resources"] == {
        "requests": {"cpu": "20m", "memory": "64Mi"},
        "limits": {"memory": "256Mi"},
    }
    sidecar = SidecarSpec.from_spec(a_spec(sidecar={"resources": {"limits": {"cpu": 1}}}), "rota-sidecar:1", 30.0)
    assert sidecar_of(inject(a_template(), "orders", sidecar))["resources"] == {"limits": {"cpu": 1}}


def test_injection_adds_a_drain_hook_unless_the_app_has_a_pre_stop_hook() -> None:
    pre_stop = {"preStop": {"sleep": {"seconds": 5}}}
    post_start = {"postStart": {"exec": {"command": ["warm-up"]}}}
    apps = [an_app(), {"name": "busy", "lifecycle": pre_stop}, {"name": "slow", "lifecycle": post_start}]
    injected = inject(a_template(*apps), "orders", SIDECAR)
    assert [container["lifecycle"] for container in injected["spec"]["containers"]] == [
        DRAINED,
        pre_stop,
        post_start | DRAINED,
    ]


@pytest.mark.parametrize(
    ("app_seconds", "drain_timeout", "expected"),
    [(None, 30.0, 45), (None, 10.0, None), (5, 10.0, 25), (300, 30.0, 300), (45, 30.0, 45), (None, 30.5, 46)],
)
def test_injection_raises_the_grace_period_to_drain_plus_15_seconds_and_never_lowers_it(
    app_seconds: int | None, drain_timeout: float, expected: int | None
) -> None:
    template = a_template(**({} if app_seconds is None else {"terminationGracePeriodSeconds": app_seconds}))
    injected = inject(template, "orders", SidecarSpec(image="rota-sidecar:1", drain_timeout=drain_timeout))
    assert injected["spec"].get("terminationGracePeriodSeconds") == expected


def test_injection_is_recognized_by_the_operator() -> None:
    injected = inject(a_template(), "orders", SIDECAR)
    assert msgspec.convert({"metadata": {"name": "orders-1"}, "spec": injected["spec"]}, Pod).mounted_group == "orders"


# Removal.

NAMES = st.sampled_from(["a", "b", "app", "rota-state"])
LABELS = st.dictionaries(st.sampled_from(["app", "tier", "rota.dev/group"]), st.sampled_from(["x", "orders"]))
HOOKS = st.sampled_from([None, {}, {"exec": {"command": ["true"]}}, {"httpGet": {"path": "/bye", "port": 80}}])
LIFECYCLES: st.SearchStrategy[Any] = st.none() | st.fixed_dictionaries(
    {}, optional={"preStop": HOOKS, "postStart": st.just({"exec": {}})}
)
MOUNTS = st.fixed_dictionaries(
    {"name": st.sampled_from(["data", "rota-state"]), "mountPath": st.sampled_from(["/data", "/var/lib/rota"])}
)
CONTAINERS = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "image": st.just("app"),
        "lifecycle": LIFECYCLES,
        "volumeMounts": st.none() | st.lists(MOUNTS, max_size=2),
        "resources": st.just({}),
    },
)
VOLUMES: st.SearchStrategy[Object] = st.fixed_dictionaries(
    {"name": st.sampled_from(["data", "tmp"])}, optional={"emptyDir": st.just({})}
)
TEMPLATES: st.SearchStrategy[Object] = st.fixed_dictionaries(
    {
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(CONTAINERS, min_size=1, max_size=3)},
            optional={
                "initContainers": st.none() | st.lists(CONTAINERS, max_size=2),
                "volumes": st.none() | st.lists(VOLUMES, max_size=2),
                "terminationGracePeriodSeconds": st.none() | st.integers(0, 90),
                "nodeSelector": st.just({}),
            },
        )
    },
    optional={
        "metadata": st.none()
        | st.fixed_dictionaries(
            {}, optional={"labels": st.none() | LABELS, "annotations": st.none() | st.just({"a": "b"}) | st.just({})}
        )
    },
)
SIDECARS = st.builds(
    SidecarSpec,
    image=st.sampled_from(["rota-sidecar:1", "rota-sidecar:2"]),
    drain_timeout=st.sampled_from([1.0, 30.0, 60.5]),
    credentials_secret=st.sampled_from(["", "acl"]),
    ca_secret=st.sampled_from(["", "ca"]),
    client_certificate_secret=st.sampled_from(["", "client"]),
)


@given(TEMPLATES, SIDECARS)
def test_injection_is_fully_reverted(template: Object, sidecar: SidecarSpec) -> None:
    assert remove_sidecar(template) == template
    assert remove_sidecar(inject(template, "orders", sidecar)) == template


@given(TEMPLATES, SIDECARS, SIDECARS)
def test_injection_twice_equals_the_last_one(template: Object, first: SidecarSpec, second: SidecarSpec) -> None:
    once = inject(template, "orders", second)
    assert inject(once, "orders", second) == once
    assert inject(inject(template, "payments", first), "orders", second) == once


@given(TEMPLATES, SIDECARS)
def test_injection_does_not_modify_its_input(template: Object, sidecar: SidecarSpec) -> None:
    template_json = json.dumps(template)
    injected = inject(template, "orders", sidecar)
    injected_json = json.dumps(injected)
    remove_sidecar(injected)
    inject(injected, "payments", sidecar)
    assert (json.dumps(template), json.dumps(injected)) == (template_json, injected_json)


def test_injection_revert_keeps_a_volume_of_the_app_with_the_sidecars_name() -> None:
    mount = {"name": "rota-state", "mountPath": "/var/lib/rota"}
    template = a_template(an_app(volumeMounts=[mount]), volumes=[{"name": "rota-state", "emptyDir": {}}])
    injected = inject(template, "orders", SIDECAR)
    assert mounts(injected)["/var/lib/rota"] == "rota-state"
    assert remove_sidecar(injected) == template


def test_injection_writes_no_revert_note_if_names_suffice() -> None:
    template = a_template(terminationGracePeriodSeconds=60)
    assert REVERSE_PATCH_ANNOTATION not in inject(template, "orders", SIDECAR)["metadata"]["annotations"]


def test_injection_revert_keeps_later_changes() -> None:
    injected = inject(a_template(), "orders", SIDECAR)
    injected["spec"]["terminationGracePeriodSeconds"] = 300
    injected["spec"]["containers"].insert(0, {"name": "another"})
    assert remove_sidecar(injected)["spec"] == {"containers": [{"name": "another"}, {"name": "app"}]} | {
        "terminationGracePeriodSeconds": 300
    }


def test_injection_revert_ignores_defaults_of_the_api_server() -> None:
    injected = inject(a_template(), "orders", SIDECAR)
    hook = injected["spec"]["containers"][0]["lifecycle"]["preStop"]["httpGet"]
    hook["scheme"] = "HTTP"
    for volume in injected["spec"]["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["defaultMode"] = 420
    assert remove_sidecar(injected) == a_template()


DEEP_PATCH = '[[["spec"],' + "[" * 100_000


@pytest.mark.parametrize(
    "patch", ["", "?", "[]", "{}", "[1]", "[[[],[],[]]]", '[[["spec","containers",9,"x"],[],[1]]]', DEEP_PATCH]
)
def test_injection_revert_with_a_corrupt_reverse_patch_restores_nothing(patch: str) -> None:
    injected = inject(a_template(), "orders", SIDECAR)
    injected["metadata"]["annotations"][REVERSE_PATCH_ANNOTATION] = patch
    assert remove_sidecar(injected) == a_template(terminationGracePeriodSeconds=45)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.dictionaries(st.sampled_from("abc"), VALUES))
def test_injection_revert_note_restores_any_value(current: Object, original: Object) -> None:
    assert apply_patch(current, make_patch(current, original)) == original
    assert make_patch(original, original) == ""


# Invalid templates.


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ({}, "spec.template: object missing required field spec"),
        ({"spec": {"containers": []}}, "spec.template.spec.containers: expected array of length >= 1"),
        ({"spec": {"containers": "app"}}, "spec.template.spec.containers: expected array, got str"),
        ({"spec": {"containers": [{"image": "app"}]}}, "spec.template.spec.containers[0]: object missing required"),
        (a_template(an_app(lifecycle={"preStop": "bye"})), "lifecycle.preStop: expected object | null, got str"),
        ({"metadata": {"labels": {"v": 1}}, **a_template()} | {"metadata": {"labels": {"v": 1}}}, "got int"),
        (a_template({"name": "rota-sidecar"}), "spec.template.spec.containers has a container named rota-sidecar"),
        (
            a_template(volumes=[{"name": "rota-documents"}]),
            "spec.template.spec.volumes has a volume named rota-documents",
        ),
    ],
)
def test_template_that_is_invalid_is_rejected_with_a_sentence_naming_the_field(template: Object, sentence: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        inject(template, "orders", SIDECAR)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


# The Deployment of a group.

BODY = CustomResource(Metadata("orders", uid="1-2-3", namespace="shop"))


def a_deployment(image: str = "rota-sidecar:1", present: Object | None = None, **spec: Any) -> Object:
    group_spec = a_spec(**{"replicas": 3, "template": a_template(), **spec})
    return build_manifest(BODY, group_spec, SidecarSpec.from_spec(group_spec, image, 30.0), present)


def image_of(body: Object) -> str:
    return str(sidecar_of(body["spec"]["template"])["image"])


def test_deployment_is_owned_by_its_group() -> None:
    body = a_deployment(rollout={"maxSurge": "25%", "maxUnavailable": 1})
    metadata, spec = body["metadata"], body["spec"]
    assert (metadata["name"], metadata["namespace"]) == ("orders", "shop")
    assert metadata["labels"] == {"rota.dev/group": "orders", "app.kubernetes.io/managed-by": "rota"}
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
        "ConsumerGroup",
        "orders",
        "1-2-3",
        True,
    )
    assert spec["replicas"] == 3
    assert spec["selector"] == {"matchLabels": {"rota.dev/group": "orders"}}
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 1}


def test_deployment_keeps_user_labels_and_annotations_except_the_selector_label() -> None:
    labels = {"app": "shop", "rota.dev/group": "another"}
    template = a_template() | {"metadata": {"labels": labels, "annotations": {"team": "a"}}}
    metadata = a_deployment(template=template)["spec"]["template"]["metadata"]
    assert metadata["labels"] == {"app": "shop", "rota.dev/group": "orders"}
    assert metadata["annotations"]["team"] == "a"


def test_deployment_keeps_its_sidecar_under_a_new_operator() -> None:
    present = a_deployment("rota-sidecar:1")
    sidecar = sidecar_of(present["spec"]["template"])
    del sidecar["livenessProbe"]  # an earlier version wrote other probes
    present["spec"]["template"]["spec"]["volumes"][0]["configMap"]["defaultMode"] = 420
    assert a_deployment("rota-sidecar:2", present)["spec"]["template"] == present["spec"]["template"]


@pytest.mark.parametrize(
    "changed",
    [
        {"template": a_template(an_app(image="app:2"))},
        {"sidecar": {"resources": {"limits": {"memory": "1Gi"}}}},
        {"sidecar": {"autoUpgrade": True}},
        {"broker": {"rocketmq": {"nameServers": ["ns:9876"], "credentialsSecret": {"name": "acl"}}}},
        {"broker": {"rocketmq": {"nameServers": ["ns:9876"], "tls": MUTUAL}}},
    ],
)
def test_deployment_gets_the_new_sidecar_with_a_pod_change_or_auto_upgrade(changed: Object) -> None:
    assert image_of(a_deployment("rota-sidecar:2", a_deployment("rota-sidecar:1"), **changed)) == "rota-sidecar:2"


def test_deployment_keeps_the_sidecar_and_hooks_of_an_earlier_version() -> None:
    present = a_deployment("rota-sidecar:1")
    sidecar, pod = sidecar_of(present["spec"]["template"]), present["spec"]["template"]["spec"]
    del sidecar["lifecycle"]
    pod["containers"][0]["lifecycle"]["preStop"]["httpGet"]["path"] = "/v1/drain"
    digest = present["metadata"]["annotations"][TEMPLATE_DIGEST_ANNOTATION]
    assert digest.endswith("-2"), "an earlier version cannot keep this sidecar: it must find another digest"
    present["metadata"]["annotations"][TEMPLATE_DIGEST_ANNOTATION] = digest.removesuffix("-2")
    manifest = a_deployment("rota-sidecar:2", present)
    assert manifest["spec"]["template"] == present["spec"]["template"]
    assert manifest["metadata"]["annotations"] == present["metadata"]["annotations"]


def test_deployment_keeps_its_sidecar_when_only_replicas_or_rollout_change() -> None:
    present = a_deployment("rota-sidecar:1")
    manifest = a_deployment("rota-sidecar:2", present, replicas=7, rollout={"maxSurge": 2})
    assert (image_of(manifest), manifest["spec"]["replicas"]) == ("rota-sidecar:1", 7)


def test_deployment_reverts_manual_changes_of_its_template() -> None:
    present = a_deployment("rota-sidecar:1")
    original = json.dumps(present)
    present["spec"]["template"]["spec"]["containers"][0]["image"] = "by-hand"
    assert a_deployment("rota-sidecar:2", present) == json.loads(original)


def test_deployment_without_sidecar_gets_the_current_one() -> None:
    present = {"metadata": {"annotations": None}, "spec": {"template": a_template()}}
    assert image_of(a_deployment("rota-sidecar:2", present)) == "rota-sidecar:2"


def test_manifest_module_imports_neither_kopf_nor_aiohttp() -> None:
    loaded = "import sys, rota.kube.workload.injection; print({'kopf', 'aiohttp'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
