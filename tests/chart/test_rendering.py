"""The objects that the chart renders from its values, without a cluster."""

import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from chart.charts import CHART, EVERYTHING, PROMETHEUS, ROOT, Helm, HelmError, Rendered
from ground.api import Object
from kube.pages import blocks
from rota.cli.commands.pipeline import commands
from rota.pipeline.recommend.cost_weights import CostWeights, parse_weights

SELECTOR = {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
ORIGIN = {f"app.kubernetes.io/{key}" for key in ("version", "part-of", "managed-by")} | {"helm.sh/chart"}


@pytest.fixture(scope="module")
def default(helm: Helm) -> Rendered:
    return helm.template()


@pytest.fixture(scope="module")
def everything(helm: Helm) -> Rendered:
    return helm.template(PROMETHEUS, **EVERYTHING)


def object_names(rendered: Rendered) -> list[str]:
    return sorted(f"{body['kind']}/{body['metadata']['name']}" for body in rendered.objects)


def test_chart_renders_only_the_needed_objects_by_default(default: Rendered) -> None:
    assert object_names(default) == [
        "ClusterRole/rota",
        "ClusterRole/rota-edit",
        "ClusterRole/rota-metrics-reader",
        "ClusterRole/rota-page-auth",
        "ClusterRole/rota-view",
        "ClusterRoleBinding/rota",
        "ClusterRoleBinding/rota-page-auth",
        "CustomResourceDefinition/consumergroups.rota.dev",
        "CustomResourceDefinition/rebalancepolicies.rota.dev",
        "Deployment/rota",
        "Pod/rota-test",
        "PodDisruptionBudget/rota",
        "Role/rota-lease",
        "RoleBinding/rota-lease",
        "RoleBinding/rota-page-auth",
        "Secret/rota-operator-key",
        "Service/rota",
        "ServiceAccount/rota",
        "ServiceAccount/rota-test",
        "ValidatingAdmissionPolicy/rota-operator.rota-system.rota.dev",
        "ValidatingAdmissionPolicyBinding/rota-operator.rota-system.rota.dev",
    ]


def test_chart_switches_add_their_objects(default: Rendered, everything: Rendered) -> None:
    assert set(object_names(everything)) - set(object_names(default)) == {
        "ClusterRoleBinding/rota-metrics",
        "ConfigMap/rota-dashboard-group",
        "ConfigMap/rota-dashboard-operator",
        "ConfigMap/rota-dashboard-queues",
        "CronJob/rota-maintain",
        "CronJob/rota-pipeline",
        "NetworkPolicy/rota",
        "NetworkPolicy/rota-members",
        "PersistentVolumeClaim/rota-journal",
        "PodMonitor/rota-members",
        "PrometheusRule/rota-rota",
        "Secret/rota-metrics",
        "ServiceAccount/rota-metrics",
        "ServiceMonitor/rota",
    }


def test_chart_switches_leave_out_optional_objects(default: Rendered, helm: Helm) -> None:
    without = helm.template(
        crds={"install": False},
        rbac={"aggregate": False},
        serviceAccount={"create": False, "name": "ours"},
        podDisruptionBudget={"enabled": False},
    )
    assert set(object_names(default)) - set(object_names(without)) == {
        "ClusterRole/rota-edit",
        "ClusterRole/rota-view",
        "CustomResourceDefinition/consumergroups.rota.dev",
        "CustomResourceDefinition/rebalancepolicies.rota.dev",
        "PodDisruptionBudget/rota",
        "ServiceAccount/rota",
    }
    assert without.pod["spec"]["serviceAccountName"] == "ours"


def test_chart_labels_every_object_with_its_origin(everything: Rendered) -> None:
    for body in everything.objects:
        labels = ORIGIN if body["kind"] == "CustomResourceDefinition" else ORIGIN | SELECTOR
        assert labels <= body["metadata"]["labels"].keys(), body["metadata"]["name"]


def test_chart_selectors_contain_no_version(everything: Rendered) -> None:
    spec = everything["Deployment"]["spec"]
    spread = spec["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]
    monitor = everything["ServiceMonitor"]["spec"]["selector"]
    budget = everything["PodDisruptionBudget"]["spec"]["selector"]
    selectors = [selector["matchLabels"] for selector in (spec["selector"], spread, monitor, budget)]
    selectors.append(everything["Service"]["spec"]["selector"])
    assert [selector.keys() for selector in selectors] == [SELECTOR] * 5
    assert all(selector.items() <= spec["template"]["metadata"]["labels"].items() for selector in selectors)
    test = everything["Pod"]["metadata"]["labels"]
    assert not any(selector.items() <= test.items() for selector in selectors)


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("rota", {}, "rota"),
        ("prod", {}, "prod-rota"),
        ("my-rota", {}, "my-rota"),
        ("prod", {"nameOverride": "brain"}, "prod-brain"),
        ("prod", {"fullnameOverride": "brain"}, "brain"),
        ("r" * 53, {"nameOverride": "b" * 30}, "r" * 53 + "-" + "b" * 9),
    ],
)
def test_chart_names_objects_after_the_release(helm: Helm, release: str, values: Object, name: str) -> None:
    assert Rendered(helm("template", release, CHART, values=values))["Deployment"]["metadata"]["name"] == name


# The operator's pods.


def test_chart_pod_needs_no_shell_no_root_and_no_disk(default: Rendered) -> None:
    container = default.container
    assert (container["command"], container["args"]) == (["rota"], ["operator"])
    assert default.pod["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "volumes" not in default.pod["spec"]
    assert default["Pod"]["spec"]["containers"][0]["securityContext"] == container["securityContext"]


def test_chart_passes_identity_and_settings_to_the_operator(default: Rendered, helm: Helm) -> None:
    fields = {
        variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"] for variable in default.container["env"][:4]
    }
    assert fields == {
        "POD_NAMESPACE": "metadata.namespace",
        "POD_NAME": "metadata.name",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
    }
    image = "ghcr.io/rota-dev/rota-sidecar:0.1.0"
    assert default.env == {
        "ROTA_BROKER_NETWORKS": "0.0.0.0/0,::/0",
        "ROTA_MAX_QUEUES": "300000",
        "ROTA_PAGE_AUTH": "Kubernetes",
        "ROTA_DOCUMENT_SCHEMA": "2",
        "ROTA_SIDECAR_IMAGE": image,
        "ROTA_JOURNAL": "-",
        "ROTA_LOG_LEVEL": "info",
        "ROTA_LOG_FORMAT": "json",
        "ROTA_LEASE": "rota",
    }
    rendered = helm.template(
        watchNamespaces=["shop", "billing"], logLevel="debug", logFormat="text", queueMetrics=False, brokerNetworks=[]
    )
    assert (rendered.env["ROTA_NAMESPACES"], rendered.env["ROTA_QUEUE_METRICS"]) == ("shop,billing", "false")
    assert "ROTA_BROKER_NETWORKS" not in rendered.env
    assert (rendered.env["ROTA_LOG_LEVEL"], rendered.env["ROTA_LOG_FORMAT"]) == ("debug", "text")


def test_trace_endpoint_of_the_values_reaches_the_operator(default: Rendered, helm: Helm) -> None:
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    endpoint = "http://collector.monitoring:4318"
    assert name not in default.env
    assert helm.template(tracing={"endpoint": endpoint}).env[name] == endpoint


def test_trace_headers_stay_in_a_secret(default: Rendered, helm: Helm) -> None:
    name = "OTEL_EXPORTER_OTLP_HEADERS"
    assert name not in {variable["name"] for variable in default.container["env"]}
    rendered = helm.template(tracing={"endpoint": "https://collector:4318", "headersSecret": "otlp"})
    (source,) = (variable["valueFrom"] for variable in rendered.container["env"] if variable["name"] == name)
    assert source == {"secretKeyRef": {"name": "otlp", "key": "headers"}}


def test_health_and_readiness_probes_of_the_chart_use_healthz_and_readyz(default: Rendered) -> None:
    ports = [{"name": "http", "containerPort": 8080}, {"name": "probes", "containerPort": 8081}]
    assert default.container["ports"] == ports
    requests = {probe: default.container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
    assert requests == {
        "startup": {"path": "/healthz", "port": "probes"},
        "liveness": {"path": "/healthz", "port": "probes"},
        "readiness": {"path": "/readyz", "port": "probes"},
    }
    assert default["Service"]["spec"]["ports"] == [{"name": "http", "port": 8080, "targetPort": "http"}]


@pytest.mark.parametrize(
    ("image", "word"),
    [
        ({}, "r/i:0.1.0"),
        ({"tag": "main"}, "r/i:main"),
        ({"tag": "main", "digest": f"sha256:{'a' * 64}"}, f"r/i@sha256:{'a' * 64}"),
    ],
)
def test_image_is_named_by_digest_or_tag_or_chart_version(helm: Helm, image: Object, word: str) -> None:
    values = {"repository": "r/i", **image}
    rendered = helm.template(image=values, sidecar={"image": values})
    assert rendered.container["image"] == rendered.env["ROTA_SIDECAR_IMAGE"] == word
    assert rendered["Pod"]["spec"]["containers"][0]["image"] == word


def test_chart_pod_values_reach_the_pod(helm: Helm) -> None:
    pod_values: Object = {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "imagePullSecrets": [{"name": "pull"}],
    }
    labels = {"team": "queues", "app.kubernetes.io/name": "stolen"}
    rendered = helm.template(
        **pod_values, podLabels=labels, podAnnotations={"a": "b"}, resources={"limits": {"cpu": 2}}
    )
    spec = rendered.pod["spec"]
    assert {key: spec[key] for key in pod_values} == pod_values
    assert rendered.container["resources"] == {
        "limits": {"cpu": 2, "memory": "512Mi"},
        "requests": {"cpu": "100m", "memory": "192Mi"},
    }
    assert rendered.pod["metadata"]["annotations"] == {"a": "b"}
    assert rendered.pod["metadata"]["labels"]["team"] == "queues"
    assert rendered.pod["metadata"]["labels"]["app.kubernetes.io/name"] == "rota"  # the selector's


@pytest.mark.parametrize(
    ("journal", "replicas", "volume", "strategy"),
    [
        ({"kind": "stdout"}, 2, None, "RollingUpdate"),
        ({}, 2, {"persistentVolumeClaim": {"claimName": "rota-journal"}}, "RollingUpdate"),
        ({"claim": {"existing": "ours"}}, 2, {"persistentVolumeClaim": {"claimName": "ours"}}, "RollingUpdate"),
        (
            {"claim": {"accessModes": ["ReadWriteOnce"]}},
            1,
            {"persistentVolumeClaim": {"claimName": "rota-journal"}},
            "Recreate",
        ),
        ({"size": "9Gi", "claim": {"enabled": False}}, 2, {"emptyDir": {"sizeLimit": "9Gi"}}, "RollingUpdate"),
    ],
)
def test_journal_volume_follows_the_chart_values(
    helm: Helm, journal: Object, replicas: int, volume: Object | None, strategy: str
) -> None:
    rendered = helm.template(journal={"kind": "volume", **journal}, replicas=replicas)
    assert rendered["Deployment"]["spec"]["strategy"]["type"] == strategy
    if volume is None:
        assert rendered.env["ROTA_JOURNAL"] == "-"
        return
    assert rendered.env["ROTA_JOURNAL"] == "/var/lib/rota/journal"
    assert rendered.env["ROTA_JOURNAL_LIMIT"] == "8Gi"
    assert rendered.container["volumeMounts"] == [{"name": "journal", "mountPath": "/var/lib/rota/journal"}]
    assert rendered.pod["spec"]["volumes"] == [{"name": "journal", **volume}]
    assert ("PersistentVolumeClaim" in rendered) == ("rota-journal" in str(volume))


BUCKET: Object = {"kind": "bucket", "uri": "s3://acme-rota/prod/journal"}


def test_journal_in_a_bucket_needs_a_spool_and_no_shared_volume(helm: Helm) -> None:
    rendered = helm.template(journal=BUCKET, replicas=3)
    assert rendered["Deployment"]["spec"]["strategy"]["type"] == "RollingUpdate"
    assert rendered.env["ROTA_JOURNAL"] == "s3://acme-rota/prod/journal"
    assert rendered.env["ROTA_JOURNAL_SPOOL"] == "/var/lib/rota/spool"
    assert rendered.env["ROTA_JOURNAL_LIMIT"] == "966367641"
    assert rendered.container["volumeMounts"] == [{"name": "spool", "mountPath": "/var/lib/rota/spool"}]
    assert rendered.pod["spec"]["volumes"] == [{"name": "spool", "emptyDir": {"sizeLimit": "1Gi"}}]
    assert "PersistentVolumeClaim" not in rendered
    assert "envFrom" not in rendered.container


@pytest.mark.parametrize(("journal", "seconds"), [(BUCKET, 60), ({"kind": "volume"}, 60), ({"kind": "stdout"}, None)])
def test_journal_has_the_time_to_store_its_end(helm: Helm, journal: Object, seconds: int | None) -> None:
    assert helm.template(journal=journal).pod["spec"].get("terminationGracePeriodSeconds") == seconds


def test_journal_bucket_gets_its_credentials_from_a_secret_or_the_account(helm: Helm) -> None:
    rendered = helm.template(journal={**BUCKET, "secret": "rota-bucket"})
    assert rendered.container["envFrom"] == [{"secretRef": {"name": "rota-bucket"}}]
    annotations = {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/rota-journal"}
    account = helm.template(journal=BUCKET, serviceAccount={"annotations": annotations})["ServiceAccount/rota"]
    assert account["metadata"]["annotations"] == annotations


@pytest.mark.parametrize(
    ("journal", "sentence"),
    [
        ({"kind": "bucket"}, "journal.kind is bucket: set journal.uri"),
        ({"kind": "volume", "uri": BUCKET["uri"]}, "journal.uri is for journal.kind bucket"),
        ({**BUCKET, "spool": "1Mi"}, "journal.spool is too small; the minimum is 2Mi"),
    ],
)
def test_journal_bucket_values_that_contradict_each_other_are_rejected(
    helm: Helm, journal: Object, sentence: str
) -> None:
    with pytest.raises(HelmError, match=sentence):
        helm.template(journal=journal)


def test_journal_claim_is_annotated_to_be_kept_on_uninstall(helm: Helm) -> None:
    claim = {"storageClass": "shared", "accessModes": ["ReadWriteMany"]}
    rendered = helm.template(journal={"kind": "volume", "size": "50Gi", "claim": claim})["PersistentVolumeClaim"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert rendered["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "shared",
        "resources": {"requests": {"storage": "50Gi"}},
    }


# Definitions.


def definitions(rendered: Rendered) -> dict[str, Object]:
    return {definition["metadata"]["name"]: definition for definition in rendered.by_kind["CustomResourceDefinition"]}


PIPELINE = "CronJob/rota-pipeline"
MAINTENANCE = "CronJob/rota-maintain"


def pipeline_pod(rendered: Rendered, name: str = PIPELINE) -> Object:
    pod: Object = rendered[name]["spec"]["jobTemplate"]["spec"]["template"]
    return pod


def test_pipeline_job_runs_all_steps_in_one_container_on_the_journal(helm: Helm) -> None:
    values: Object = {"journal": {"kind": "volume"}, "pipeline": {"enabled": True, "claim": "history"}}
    rendered = helm.template(**values)
    job = rendered[PIPELINE]["spec"]
    assert (job["schedule"], job["concurrencyPolicy"]) == ("20 * * * *", "Forbid")
    pod = pipeline_pod(rendered)
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "pipeline"
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["run", "/history/lake", "--journal=/journal", "--days=7", "--if-any"]
    assert "affinity" not in pod["spec"]
    assert "initContainers" not in pod["spec"]
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["spec"]["volumes"]}
    assert claims["journal"] == {"claimName": "rota-journal", "readOnly": True}
    assert claims["history"] == {"claimName": "history"}


def test_pipeline_job_runs_on_the_node_of_the_operator_if_the_journal_needs_it(helm: Helm) -> None:
    journal: Object = {"kind": "volume", "claim": {"accessModes": ["ReadWriteOnce"]}}
    rendered = helm.template(replicas=1, journal=journal, pipeline={"enabled": True, "claim": "history"})
    for name in (PIPELINE, MAINTENANCE):
        affinity = pipeline_pod(rendered, name)["spec"]["affinity"]
        (term,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"] == rendered["Deployment"]["spec"]["selector"]
        assert term["topologyKey"] == "kubernetes.io/hostname"


def test_pipeline_job_recommends_if_policies_are_given_and_pushes_metrics(helm: Helm) -> None:
    pipeline: Object = {
        "enabled": True,
        "claim": "history",
        "policies": "to-try",
        "days": 3,
        "pushGateway": "http://p:1",
    }
    rendered = helm.template(journal={"kind": "volume"}, pipeline=pipeline)
    (container,) = pipeline_pod(rendered)["spec"]["containers"]
    assert container["args"][3:] == [
        "--days=3",
        "--if-any",
        "--policies=/policies/policies.yaml",
        "--to=/history/recommendation",
        "--push-gateway=http://p:1",
    ]
    assert {"name": "policies", "mountPath": "/policies", "readOnly": True} in container["volumeMounts"]


def test_pipeline_job_passes_links_backtest_weights_and_further_arguments(helm: Helm) -> None:
    pipeline: Object = {
        "enabled": True,
        "claim": "history",
        "policies": "to-try",
        "weights": {"moves": 3, "lag": 0.5},
        "backtest": True,
        "pageUrl": "https://rota.example.com",
        "boardUrl": "https://grafana.example.com/a",
        "pushGateway": "http://p:1",
        "extraArgs": ["--least-gain=10", "--push-gateway=http://q:1"],
    }
    rendered = helm.template(journal={"kind": "volume"}, pipeline=pipeline)
    pod = pipeline_pod(rendered)["spec"]
    (container,) = pod["containers"]
    assert container["args"][7:] == [
        "--weights=/weights/weights.yaml",
        "--backtest",
        "--page-url=https://rota.example.com",
        "--board-url=https://grafana.example.com/a",
        "--push-gateway=http://p:1",
        "--least-gain=10",
        "--push-gateway=http://q:1",  # the last one counts
    ]
    assert {"name": "weights", "mountPath": "/weights", "readOnly": True} in container["volumeMounts"]
    assert {"name": "weights", "configMap": {"name": "rota-pipeline-weights"}} in pod["volumes"]
    weights = parse_weights(rendered["ConfigMap/rota-pipeline-weights"]["data"]["weights.yaml"])
    assert weights == CostWeights(moves=3.0, lag=0.5)


def test_pipeline_job_arguments_are_options_of_the_command(helm: Helm) -> None:
    pipeline: Object = {"enabled": True, "claim": "history", "policies": "to-try", "pushGateway": "http://p:1"}
    pipeline |= {
        "weights": {"moves": 3},
        "backtest": True,
        "pageUrl": "http://a",
        "boardUrl": "http://b",
        "keepDays": 9,
    }
    rendered = helm.template(journal={"kind": "volume"}, pipeline=pipeline)
    for name, command in ((PIPELINE, commands.run), (MAINTENANCE, commands.maintain)):
        (container,) = pipeline_pod(rendered, name)["spec"]["containers"]
        command.make_context(container["args"][0], container["args"][1:])  # an unknown option raises


def test_pipeline_job_accepts_the_values_of_the_pipeline_page(helm: Helm) -> None:
    (values,) = blocks(ROOT / "docs" / "pipeline.md", "yaml", "The chart's jobs")
    rendered = helm.template(**yaml.safe_load(values))
    (container,) = pipeline_pod(rendered)["spec"]["containers"]
    assert container["args"][:3] == ["run", "s3://acme-rota/prod", "--journal=s3://acme-rota/prod/journal"]
    assert "--board-url=https://grafana.example.com" in container["args"]


def test_pipeline_job_maintains_the_lake_and_writes_the_journal_only_to_delete_from_it(helm: Helm) -> None:
    values: Object = {"journal": {"kind": "volume"}, "pipeline": {"enabled": True, "claim": "history"}}
    rendered = helm.template(**values)
    assert rendered[MAINTENANCE]["spec"]["schedule"] == "50 3 * * 0"
    pod = pipeline_pod(rendered, MAINTENANCE)["spec"]
    (container,) = pod["containers"]
    assert container["args"] == ["maintain", "/history/lake", "--journal=/journal", "--snapshot-days=7", "--if-any"]
    assert {"name": "journal", "mountPath": "/journal", "readOnly": True} in container["volumeMounts"]
    values["pipeline"] |= {"keepDays": 400, "snapshotDays": 14}
    rendered = helm.template(**values)
    pod = pipeline_pod(rendered, MAINTENANCE)["spec"]
    (container,) = pod["containers"]
    assert container["args"][3:] == ["--snapshot-days=14", "--if-any", "--keep-days=400"]
    assert {"name": "journal", "mountPath": "/journal", "readOnly": False} in container["volumeMounts"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["readOnly"] is False
    assert pipeline_pod(rendered)["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] is True


def test_pipeline_job_reads_and_writes_buckets_with_their_secrets_and_without_volumes(helm: Helm) -> None:
    rendered = helm.template(
        journal={"kind": "bucket", "uri": "s3://rota/fleet/journal", "secret": "journal-bucket"},
        pipeline={"enabled": True, "lake": "s3://rota/fleet", "secret": "lake-bucket", "serviceAccountName": "analyst"},
    )
    for name, command in ((PIPELINE, "run"), (MAINTENANCE, "maintain")):
        pod = pipeline_pod(rendered, name)["spec"]
        (container,) = pod["containers"]
        assert container["args"][:3] == [command, "s3://rota/fleet", "--journal=s3://rota/fleet/journal"]
        assert container["envFrom"] == [
            {"secretRef": {"name": "journal-bucket"}},
            {"secretRef": {"name": "lake-bucket"}},
        ]
        assert pod["serviceAccountName"] == "analyst"
        assert [volume["name"] for volume in pod["volumes"]] == ["scratch"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {"scratch"}


@pytest.mark.parametrize("keep", [True, False])
def test_crd_manifests_of_the_chart_equal_those_of_the_repository(helm: Helm, *, keep: bool) -> None:
    rendered = definitions(helm.template(crds={"keep": keep}))
    for definition in rendered.values():
        assert definition["metadata"].pop("labels").keys() == ORIGIN
        assert definition["metadata"].pop("annotations", {}) == ({"helm.sh/resource-policy": "keep"} if keep else {})
    manifests = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")]
    assert rendered == {definition["metadata"]["name"]: definition for definition in manifests}


@pytest.mark.parametrize("command", ["template", "lint", "package"])
def test_chart_is_read_by_helm_without_a_warning(helm: Helm, tmp_path: Path, command: str) -> None:
    options: list[str | Path] = ["--destination", tmp_path] if command == "package" else []
    process = helm.run(command, CHART, *options)
    assert (process.returncode, process.stderr) == (0, "")


def test_chart_package_renders_the_same_and_holds_the_crds(helm: Helm, default: Rendered, tmp_path: Path) -> None:
    helm("package", CHART, "--destination", tmp_path)
    (archive,) = tmp_path.iterdir()
    assert archive.name == "rota-0.1.0.tgz"
    assert helm.template(chart=archive).text == default.text
    shutil.unpack_archive(archive, tmp_path, filter="data")
    unpacked = tmp_path / "rota" / "definitions"
    manifests = {path.name: path.read_bytes() for path in (ROOT / "crds").iterdir()}
    assert {path.name: path.read_bytes() for path in unpacked.iterdir()} == manifests


def test_chart_security_contexts_can_be_left_to_the_cluster(helm: Helm) -> None:
    unset = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    rendered = helm.template(
        podSecurityContext=unset,
        securityContext={"seLinuxOptions": {"level": "s0"}},
        journal={"kind": "volume"},
        pipeline={"enabled": True, "claim": "history"},
    )
    jobs = [pipeline_pod(rendered, name)["spec"] for name in (PIPELINE, MAINTENANCE)]
    for pod in (rendered.pod["spec"], *jobs, rendered["Pod"]["spec"]):
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "fsGroupChangePolicy": "OnRootMismatch",  # a large journal is not walked through at each start
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"]["seLinuxOptions"] == {"level": "s0"}
            assert container["securityContext"]["readOnlyRootFilesystem"]


def test_chart_operator_has_further_arguments_and_variables(helm: Helm) -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    rendered = helm.template(extraEnv=[proxy], extraArgs=["--no-fleets"])
    assert rendered.container["args"] == ["operator", "--no-fleets"]
    assert rendered.container["env"][-1] == proxy


def test_chart_passes_strict_helm_lint(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


def test_chart_version_equals_the_project_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version


def test_chart_annotations_list_each_crd_and_a_minimal_example() -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    manifests = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    listed = [(crd["name"], crd["kind"], crd["version"]) for crd in yaml.safe_load(annotations["artifacthub.io/crds"])]
    expected = []
    for manifest in manifests:
        spec = manifest["spec"]
        expected.append((manifest["metadata"]["name"], spec["names"]["kind"], spec["versions"][0]["name"]))
    assert listed == expected
    example = (ROOT / "docs" / "examples" / "group.yaml").read_text()
    assert yaml.safe_load(annotations["artifacthub.io/crdsExamples"]) == list(yaml.safe_load_all(example))
