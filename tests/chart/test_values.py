"""The chart's values: values.yaml, schema and README describe them alike, and invalid values are rejected."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from chart.charts import CHART, Helm, HelmError
from ground.api import Object
from rota.pipeline.recommend.cost_weights import MEASURES

TEXT = (CHART / "values.yaml").read_text()
VALUES: Object = yaml.safe_load(TEXT)
SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())


def read_descriptions() -> dict[str, str]:
    """Return the descriptions in values.yaml, by the path of the value."""
    descriptions: dict[str, str] = {}
    path: list[str] = []
    description = ""
    for line in TEXT.splitlines():
        if comment := re.match(r" *# -- (.*)", line):
            description = comment[1]
        elif key := re.match(r"( *)(\w+):", line):
            path = [*path[: len(key[1]) // 2], key[2]]
            if description:
                descriptions[".".join(path)] = description
            description = ""
    return descriptions


def branches(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Yield every property of the schema, with its path."""
    for name, part in schema.get("properties", {}).items():
        yield path + name, part
        yield from branches(part, f"{path}{name}.")


def default(path: str) -> Any:
    value: Any = VALUES
    for name in path.split("."):
        value = value[name]
    return value


def row(path: str, description: str) -> str:
    return f"| `{path}` | {description} | `{json.dumps(default(path))}` |"


DESCRIBED = read_descriptions()
LEAVES = {path: part for path, part in branches(SCHEMA) if path in DESCRIBED}


def test_chart_values_are_all_described() -> None:
    leaves = {path for path, part in branches(SCHEMA) if "description" in part or "properties" not in part}
    resources = {f"{prefix}resources.{kind}" for prefix in ("", "pipeline.") for kind in ("requests", "limits")}
    assert leaves - {"global", *resources} == DESCRIBED.keys()


def test_chart_schema_descriptions_equal_those_of_the_values() -> None:
    assert {path: part["description"] for path, part in LEAVES.items()} == DESCRIBED


def test_chart_readme_table_equals_the_values() -> None:
    table = ["| value | what it does | default |", "|---|---|---|", *(row(*entry) for entry in DESCRIBED.items())]
    assert (CHART / "README.md").read_text().partition("## Values\n\n")[2].splitlines() == table


def test_chart_weights_of_the_pipeline_have_the_names_of_the_measures() -> None:
    assert LEAVES["pipeline.weights"]["propertyNames"]["enum"] == [*MEASURES]


def test_chart_schema_allows_no_additional_properties() -> None:
    all_branches = [("", SCHEMA), *branches(SCHEMA)]
    assert [
        path for path, part in all_branches if "properties" in part and part.get("additionalProperties") is not False
    ] == []


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"replica": 3}, "'replica' not allowed"),
        ({"image": {"name": "x"}}, "'name' not allowed"),
        ({"journal": {"claim": {"exists": True}}}, "'exists' not allowed"),
        ({"resources": {"limit": {}}}, "'limit' not allowed"),
        ({"imagePullSecrets": [{"secret": "x"}]}, "/imagePullSecrets/0"),
        ({"replicas": "two"}, "/replicas"),
        ({"replicas": 0}, "/replicas"),
        ({"image": {"digest": "sha1:0"}}, "/image/digest"),
        ({"image": {"repository": ""}}, "/image/repository"),
        ({"sidecar": {"image": {"tag": "a tag"}}}, "/sidecar/image/tag"),
        ({"watchNamespaces": "shop"}, "/watchNamespaces"),
        ({"watchNamespaces": ["Shop"]}, "/watchNamespaces/0"),
        ({"watchNamespaces": ["shop", "shop"]}, "/watchNamespaces"),
        ({"logLevel": "verbose"}, "/logLevel"),
        ({"journal": {"kind": "disk"}}, "/journal/kind"),
        ({"journal": {"size": "large"}}, "/journal/size"),
        ({"journal": {"limit": "all"}}, "/journal/limit"),
        ({"journal": {"uri": "ftp://bucket/x"}}, "/journal/uri"),
        ({"journal": {"uri": "bucket/x"}}, "/journal/uri"),
        ({"journal": {"spool": "8"}}, "/journal/spool"),
        ({"networkPolicy": {"bucketPort": 65536}}, "/networkPolicy/bucketPort"),
        ({"journal": {"claim": {"accessModes": ["ReadOnlyMany"]}}}, "/journal/claim/accessModes/0"),
        ({"journal": {"claim": {"accessModes": []}}}, "/journal/claim/accessModes"),
        ({"tracing": {"endpoint": "collector:4318"}}, "/tracing/endpoint"),
        ({"tracing": {"endpoint": "http://"}}, "/tracing/endpoint"),
        ({"tracing": {"enabled": True}}, "'enabled' not allowed"),
        ({"pipeline": {"schedule": "hourly"}}, "/pipeline/schedule"),
        ({"pipeline": {"memory": "2Gi"}}, "/pipeline/memory"),
        ({"pipeline": {"claim": "My Claim"}}, "/pipeline/claim"),
        ({"pipeline": {"lake": "bucket/lake"}}, "/pipeline/lake"),
        ({"pipeline": {"maintenanceSchedule": "weekly"}}, "/pipeline/maintenanceSchedule"),
        ({"pipeline": {"keepDays": -1}}, "/pipeline/keepDays"),
        ({"pipeline": {"snapshotDays": 0}}, "/pipeline/snapshotDays"),
        ({"pipeline": {"pushGateway": "pushgateway:9091"}}, "/pipeline/pushGateway"),
        ({"pipeline": {"weights": {"move": 3}}}, "invalid propertyName 'move'"),
        ({"pipeline": {"weights": {"moves": -1}}}, "/pipeline/weights/moves"),
        ({"pipeline": {"backtest": "yes"}}, "/pipeline/backtest"),
        ({"pipeline": {"pageUrl": "rota.example.com"}}, "/pipeline/pageUrl"),
        ({"pipeline": {"boardUrl": "https://grafana.example.com/?orgId=1"}}, "/pipeline/boardUrl"),
        ({"pipeline": {"extraArgs": "--top=50"}}, "/pipeline/extraArgs"),
        ({"crds": {"keep": 1}}, "/crds/keep"),
        ({"podAnnotations": {"a": 1}}, "/podAnnotations/a"),
        ({"tolerations": {"key": "a"}}, "/tolerations"),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "/podDisruptionBudget/maxUnavailable"),
        ({"networkPolicy": {"scrapeFrom": [{"namespace": "a"}]}}, "/networkPolicy/scrapeFrom/0"),
        ({"networkPolicy": {"readFrom": ["10.0.0.0/24"]}}, "/networkPolicy/readFrom/0"),
        ({"networkPolicy": {"readFrom": [{}]}}, "/networkPolicy/readFrom/0"),
        ({"networkPolicy": {"readFrom": [{"ipBlock": {"cidr": "10.0.0.1"}}]}}, "/readFrom/0/ipBlock/cidr"),
        ({"networkPolicy": {"readFrom": [{"namespace": "a"}]}}, "'namespace' not allowed"),
        ({"serviceMonitor": {"interval": "often"}}, "/serviceMonitor/interval"),
        ({"podMonitor": {"interval": "often"}}, "/podMonitor/interval"),
        ({"extraEnv": [{"value": "1"}]}, "/extraEnv/0"),
        ({"dashboards": {"labels": ["a"]}}, "/dashboards/labels"),
    ],
    ids=str,
)
def test_chart_schema_rejects_an_invalid_value(helm: Helm, values: Object, error: str) -> None:
    with pytest.raises(HelmError, match=re.escape(error)):
        helm.template(**values)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (
            {"journal": {"kind": "volume", "claim": {"accessModes": ["ReadWriteOnce"]}}},
            "only one pod can mount the journal; set replicas to 1",
        ),
        ({"pipeline": {"enabled": True, "claim": "a"}}, "pipeline.enabled needs the journal on a claim or in a bucket"),
        (
            {"pipeline": {"enabled": True, "lake": "s3://a", "policies": "b"}, "journal": {"kind": "volume"}},
            "pipeline.policies needs a volume for the report",
        ),
        (
            {"pipeline": {"enabled": True, "claim": "a", "keepDays": 7}, "journal": {"kind": "volume"}},
            "pipeline.keepDays is not more than pipeline.snapshotDays",
        ),
        (
            {"pipeline": {"enabled": True, "claim": "a", "weights": {"moves": 3}}, "journal": {"kind": "volume"}},
            "pipeline.weights is for a recommendation; set pipeline.policies",
        ),
        ({"pipeline": {"enabled": True}, "journal": {"kind": "volume"}}, "set pipeline.claim to the name of a claim"),
        (
            {"journal": {"kind": "volume", "size": "1Gi", "limit": "1.5G"}},
            "journal.limit is not below journal.size",
        ),
        (
            {
                "replicas": 1,
                "journal": {"kind": "volume", "claim": {"accessModes": ["ReadWriteOncePod"]}},
                "pipeline": {"enabled": True, "claim": "a"},
            },
            "set its accessModes to ReadWriteMany or ReadWriteOnce",
        ),
        ({"serviceAccount": {"create": False}}, "set serviceAccount.name"),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.enabled needs the Prometheus operator"),
        ({"podMonitor": {"enabled": True}}, "podMonitor.enabled needs the Prometheus operator"),
        ({"prometheusRule": {"enabled": True}}, "prometheusRule.enabled needs the Prometheus operator"),
    ],
    ids=str,
)
def test_chart_values_that_conflict_are_rejected_with_a_sentence(helm: Helm, values: Object, error: str) -> None:
    with pytest.raises(HelmError, match=re.escape(error)):
        helm.template(**values)


def test_chart_as_a_subchart_accepts_global_values(helm: Helm) -> None:
    shared: Object = {"global": {"region": "eu"}}
    assert "Deployment" in helm.template(**shared)
