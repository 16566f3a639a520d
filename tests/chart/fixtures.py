"""Fixtures of chart tests: the real helm, and a release in a namespace with the restricted pod security standard."""

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
    """Return the real helm, without any user's settings."""
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
async def prometheus_kinds(api: Api, control_plane: Cluster) -> None:
    """Define the Prometheus operator's kinds in the control plane; they stay until its end."""
    await install_prometheus_kinds(api, control_plane)


@pytest.fixture
async def release(api: Api, control_plane: Cluster, helm: Helm) -> AsyncIterator[Release]:
    """Create a namespace and a release in it; both end with the test."""
    name = f"rota-{secrets.token_hex(3)}"
    await api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": STRICT}})
    installed = Release(helm, control_plane, name)
    yield installed
    installed.uninstall()
    await stop_namespace(api, name)
