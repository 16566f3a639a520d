"""`rota inject`: it reads manifests, and prints manifests."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from rota.cli import main
from rota.kube.workload.injection import IMAGE_ANNOTATION

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"

POD = "spec: {containers: [{name: app, image: app}]}"
DEPLOYMENT = f"""\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: shop}}
spec:
  selector: {{matchLabels: {{app: shop}}}}
  template:
    metadata: {{labels: {{app: shop}}}}
    {POD}
"""
SERVICE = """\
# The way in.
apiVersion: v1
kind: Service
metadata:   {name: shop}   # spaces   and  comments stay
spec: {ports: [{port: 0x50}]}
"""


def inject(stdin: str, *options: str, group: str = "orders") -> Result:
    return CliRunner().invoke(main, ["inject", "--group", group, "-f", "-", *options], input=stdin)


def sidecars(text: str) -> list[Any]:
    """Return the sidecar's image in each object of some manifests."""
    images = []
    for document in yaml.safe_load_all(text):
        for manifest in document["items"] if document["kind"] == "List" else [document]:
            template = manifest if manifest["kind"] == "Pod" else manifest["spec"].get("template", {})
            init = template.get("spec", {}).get("initContainers", [])
            images.append(next((container["image"] for container in init if container["name"] == "rota-sidecar"), None))
    return images


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "DaemonSet"])
def test_injection_adds_the_sidecar_to_workloads(kind: str) -> None:
    result = inject(DEPLOYMENT.replace("Deployment", kind), "--image", "sidecar:1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert sidecars(result.stdout) == ["sidecar:1"]
    assert yaml.safe_load(result.stdout)["spec"]["template"]["metadata"]["labels"]["rota.dev/group"] == "orders"


def test_injection_adds_the_sidecar_to_a_pod() -> None:
    result = inject(f"apiVersion: v1\nkind: Pod\nmetadata: {{name: shop}}\n{POD}", "--image", "sidecar:1")
    assert sidecars(result.stdout) == ["sidecar:1"]
    assert yaml.safe_load(result.stdout)["metadata"]["annotations"][IMAGE_ANNOTATION] == "sidecar:1"


def test_injection_keeps_other_documents_verbatim_and_names_them() -> None:
    result = inject(f"{SERVICE}---\n# The app.\n{DEPLOYMENT}---\n{SERVICE}")
    assert result.stdout.startswith(f"{SERVICE}---\n# The app.\napiVersion: apps/v1\n")
    assert result.stdout.endswith(f"---\n{SERVICE}")
    assert result.stderr == "rota: unchanged: Service shop, Service shop\n"


def test_injection_counts_skipped_documents_when_there_are_many() -> None:
    result = inject("---\n".join([DEPLOYMENT, *[SERVICE] * 7]))
    assert result.stderr.endswith("Service shop and 2 more\n")


def test_injection_handles_items_of_a_list() -> None:
    items = [yaml.safe_load(DEPLOYMENT), yaml.safe_load(SERVICE)]
    result = inject(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": items}), "--image", "sidecar:1")
    assert sidecars(result.stdout) == ["sidecar:1", None]
    assert result.stderr == "rota: unchanged: Service shop\n"


@pytest.mark.parametrize("job", ["Job", "CronJob", "ReplicaSet", "ConfigMap"])
def test_injection_skips_jobs_replica_sets_and_config_maps(job: str) -> None:
    result = inject(DEPLOYMENT + "---\n" + DEPLOYMENT.replace("Deployment", job))
    assert sidecars(result.stdout)[1] is None
    assert f"unchanged: {job} shop" in result.stderr


def test_injection_is_idempotent_to_the_byte() -> None:
    injected = inject(f"{SERVICE}---\n{DEPLOYMENT}").stdout
    assert inject(injected).stdout == injected


def test_injection_updates_an_injected_manifest() -> None:
    injected = inject(DEPLOYMENT, "--image", "sidecar:1", "--drain-timeout", "2m").stdout
    assert inject(injected, "--image", "sidecar:2").stdout == inject(DEPLOYMENT, "--image", "sidecar:2").stdout


def test_injection_uninject_restores_the_manifest() -> None:
    result = inject(inject(DEPLOYMENT, "--ca-secret", "ca").stdout, "--uninject")
    assert yaml.safe_load(result.stdout) == yaml.safe_load(DEPLOYMENT)


def test_injection_uninject_skips_plain_manifests_and_other_groups() -> None:
    other_group = inject(DEPLOYMENT, group="payments").stdout
    result = inject(f"{DEPLOYMENT}---\n{other_group}", "--uninject")
    assert result.stdout == f"{DEPLOYMENT}---\n{other_group}"
    assert result.stderr == "rota: unchanged: Deployment shop, Deployment shop\n"


def test_injection_options_set_drain_timeout_and_secrets() -> None:
    secrets = ("--credentials-secret", "acl", "--ca-secret", "ca", "--client-secret", "client")
    result = inject(DEPLOYMENT, "--drain-timeout", "1m", *secrets)
    spec = yaml.safe_load(result.stdout)["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 75
    mounted_secrets = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
    assert mounted_secrets == {"acl", "ca", "client", "orders-rota-key"}
    (sidecar,) = spec["initContainers"]
    assert sidecar["image"].startswith("ghcr.io/rota-dev/rota-sidecar:")


def test_injection_accepts_the_docs_example() -> None:
    result = CliRunner().invoke(main, ["inject", "--group", "orders", "-f", str(EXAMPLES / "local-app.yaml")])
    assert result.exit_code == 0
    assert result.stdout.startswith("# Three pods on the ground's local node")


AMBIGUOUS_SCALARS = {
    "a": "'1e3'",
    "b": "'089'",
    "c": "'y'",
    "d": "'true'",
    "e": "12:30",
    "f": "2026-11-21T08:00:00Z",
    "g": '"2026-11-21"',
    "h": "'0o17'",
    "i": "=",
    "j": '"a: b\\n  c\\n"',
    "k": "'12e5678'",
    "l": "'null'",
    "m": "ÄÖ",
}


def test_injection_keeps_yaml_strings_quoted_for_kubectl() -> None:
    annotations = "".join(f"    {key}: {text}\n" for key, text in AMBIGUOUS_SCALARS.items())
    result = inject(
        DEPLOYMENT.replace("metadata: {name: shop}\n", f"metadata:\n  name: shop\n  annotations:\n{annotations}")
    )
    lines = [line.strip() for line in result.stdout.splitlines()]
    for text in ("a: '1e3'", "b: '089'", "c: 'y'", "d: 'true'", "h: '0o17'", "i: '='", "k: '12e5678'", "l: 'null'"):
        assert text in lines
    for text in ("f: '2026-11-21T08:00:00Z'", "g: '2026-11-21'", "j: |", "m: ÄÖ"):
        assert text in lines
    assert yaml.safe_load(result.stdout)["metadata"]["annotations"]["e"] == "12:30"


def test_injection_keeps_values_of_yaml_numbers_and_anchors() -> None:
    manifest = DEPLOYMENT.replace(
        "spec:\n  selector", "x: {a: &a [0x10, 017, 1.5, .5, -3, yes, ~], b: *a}\nspec:\n  selector"
    )
    values = yaml.safe_load(inject(manifest).stdout)["x"]
    assert values["a"] == values["b"] == [16, 15, 1.5, 0.5, -3, True, None]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1e3", "1000"),
        ("-1.5E+3", "-1500"),
        (".5e-1", "0.05"),
        ("1_0.5", "10.5"),
        ("089", "89"),
        ("1e17", "1.0e+17"),
        ("0o17", "15"),
        ("-0B11", "-3"),
        ("0XfF", "255"),
        (".inf", ".inf"),
        ("-.INF", "-.inf"),
        (".nan", ".nan"),
        ("y", "true"),
        ("N", "false"),
        ("on", "true"),
        ("1e400", "'1e400'"),
        ("0x", "0x"),
        ("12:30", "'12:30'"),
    ],
)
def test_injection_reads_plain_yaml_values_as_kubectl_does(text: str, written: str) -> None:
    """The values are those of kubectl 1.32, which prints them by `kubectl label --local -o json`."""
    result = inject(DEPLOYMENT.replace("spec:\n  selector", f"x: [{text}]\nspec:\n  selector"))
    assert f"\nx:\n- {written}\n" in result.stdout


@pytest.mark.parametrize(
    ("manifest", "options", "error"),
    [
        (SERVICE, (), "Standard input contains none of Deployment, StatefulSet, DaemonSet, Pod; add one"),
        ("", (), "Standard input contains none of"),
        ("just text", (), "Standard input contains none of"),
        ("{", (), "Standard input is not valid YAML, line 1; give Kubernetes manifests"),
        (DEPLOYMENT.replace("template", "pods"), (), "Deployment shop: spec.template is missing"),
        (DEPLOYMENT.replace("containers", "c"), (), "Deployment shop: spec.template.spec: object missing required"),
        ("{apiVersion: v1, kind: Pod, spec: {containers: 1}}", (), "rota: Pod: spec.containers: expected array"),
        (DEPLOYMENT, ("--drain-timeout", "soon"), "--drain-timeout: Expected a duration such as 500ms, 30s or 1m"),
        (
            DEPLOYMENT,
            ("--credentials-secret", "Not A Name"),
            "--credentials-secret 'Not A Name' is not a valid Secret name",
        ),
        (DEPLOYMENT, ("--image", "a b"), "--image 'a b' is not a valid image"),
        (DEPLOYMENT, ("--group", "x" * 64), "is not a valid ConsumerGroup name; give its metadata.name"),
        (DEPLOYMENT, ("--group", ""), "--group '' is not a valid ConsumerGroup name"),
    ],
)
def test_injection_error_is_one_sentence(manifest: str, options: tuple[str, ...], error: str) -> None:
    result = inject(manifest, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert error in result.stderr
    assert result.stderr.count("\n") == 1
