"""The example for the Spark operator, validated by its own definitions on a real API server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from ground import programs
from ground.api import Api, ApiError, Object
from ground.cluster import PROJECT
from ground.ours import BUSY
from ground.poll import soon

EXAMPLE = PROJECT / "docs" / "examples" / "pipeline" / "spark-application.yaml"
OPERATOR = "github.com/kubeflow/spark-operator/v2"
DEFINITION = "config/crd/bases/sparkoperator.k8s.io_sparkapplications.yaml"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}


@pytest.fixture
async def applications(api: Api, namespace: str) -> AsyncIterator[str]:
    """Define SparkApplications for a test, and return the path of a namespace's."""
    definition: Object = yaml.safe_load((programs.module("spark-operator", OPERATOR) / DEFINITION).read_text())
    await api.create(DEFINITIONS, definition)
    path = f"/apis/sparkoperator.k8s.io/v1beta2/namespaces/{namespace}/sparkapplications"

    async def is_served() -> bool:
        try:
            await api.get(path)
        except ApiError as error:
            if error.status not in BUSY:
                raise
            return False
        return True

    await soon(is_served)
    yield path
    await api.delete(f"{DEFINITIONS}/{definition['metadata']['name']}")


async def test_example_for_the_spark_operator_is_valid(api: Api, applications: str) -> None:
    example: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    created = await api.create(applications, example, **STRICT)
    assert created["spec"]["arguments"][:2] == ["pipeline", "run"]
    example["spec"]["executor"]["cores"] = "four"
    example["spec"]["driver"]["memories"] = "4g"
    with pytest.raises(ApiError, match=r"spec\.executor\.cores|memories"):
        await api.create(applications, example, **STRICT)
