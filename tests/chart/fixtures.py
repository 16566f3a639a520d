"""What tests of the chart share: the real helm, and a release in a namespace that is strict about pods."""

import secrets
from collections.abc import AsyncIterator

import pytest

from chart.charts import STRICT, Helm, Release
from chart.prometheus_kinds import install_prometheus_kinds
from ground.api import Api
from ground.cluster import Cluster
from ground.space import stop_namespace


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return the real helm, with nobody's settings."""
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
async def prometheus_kinds(api: Api, control_plane: Cluster) -> None:
    """Have the Prometheus operator's kinds in the control plane, from this test on."""
    await install_prometheus_kinds(api, control_plane)


@pytest.fixture
async def release(api: Api, control_plane: Cluster, helm: Helm) -> AsyncIterator[Release]:
    """Make a namespace for a release, which ends with the test."""
    name = f"rota-{secrets.token_hex(3)}"
    await api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": STRICT}})
    it = Release(helm, control_plane, name)
    yield it
    it.uninstall()
    await stop_namespace(api, name)
