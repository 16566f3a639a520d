"""pytest fixtures: one ground for a whole test run, each part started when the first test asks for it."""

import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from ground.api import Api
from ground.cluster import Cluster, NodeCluster
from ground.clusters import cluster_of, source_of
from ground.instance import Instance, temporary
from ground.kind import Kind
from ground.local import LocalNode
from ground.node import RealNode, prepare
from ground.report import Missing, interrupt
from ground.rocketmq import RocketMQ
from ground.s3 import Bucket, S3Server
from ground.space import stop_namespace
from ground.spark import SparkCluster


def pytest_configure() -> None:
    """Take the ground down also when a signal ends the test run."""
    signal.signal(signal.SIGTERM, interrupt)


@pytest.fixture(scope="session")
def instance() -> Iterator[Instance]:
    """Open a ground that ends with the test run."""
    with temporary("test") as standing:
        yield standing


@pytest.fixture(scope="session")
def control_plane(instance: Instance) -> Cluster:
    """Start a real control plane."""
    cluster = cluster_of(instance)
    cluster.up()
    return cluster


@pytest.fixture(scope="session")
async def api(control_plane: Cluster) -> AsyncIterator[Api]:
    """Connect to the control plane as admin."""
    async with Api.connect(control_plane.kubeconfig) as connected:
        yield connected


@asynccontextmanager
async def a_namespace(api: Api) -> AsyncIterator[str]:
    """Create a namespace and yield its name; then stop all pods in it."""
    name = f"rota-{secrets.token_hex(8)}"
    await api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    await stop_namespace(api, name)


@pytest.fixture
async def namespace(api: Api) -> AsyncIterator[str]:
    """Create a namespace that ends with the test."""
    async with a_namespace(api) as name:
        yield name


@pytest.fixture(scope="session")
def local_node(instance: Instance, control_plane: Cluster) -> LocalNode:
    """Start a node whose pods are processes."""
    node = LocalNode(instance, control_plane)
    node.up()
    return node


@pytest.fixture(scope="session")
def rocketmq(instance: Instance) -> Iterator[RocketMQ]:
    """Start a name server and one broker."""
    broker = RocketMQ(instance)
    broker.up()
    yield broker
    broker.down()  # faster than the orderly end that the instance would wait for


@pytest.fixture(scope="session")
def s3_server(instance: Instance) -> S3Server:
    """Start an S3 server."""
    server = S3Server(instance)
    server.up()
    return server


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    """Create an empty bucket."""
    return s3_server.bucket()


@pytest.fixture(scope="module")
def spark_cluster(instance: Instance) -> Iterator[SparkCluster]:
    """Start Spark's own cluster."""
    cluster = SparkCluster(instance)
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture(scope="session")
def real_node(instance: Instance) -> Iterator[RealNode]:
    """Start a cluster with a real node; skip where this machine lacks a requirement of it."""
    try:
        node = RealNode(instance)
    except Missing as missing:
        pytest.skip(str(missing))
    with skip_what_is_missing():
        prepare()
    node.up()  # a node that this machine supports must start: no skip
    yield node
    node.down()


@pytest.fixture(scope="session")
def node_cluster(
    instance: Instance, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[NodeCluster]:
    """Start a cluster whose pods are containers: kind's where the ground takes its clusters from kind."""
    if source_of(instance) != "kind" or not shutil.which("docker"):
        yield request.getfixturevalue("real_node")
        return
    cluster = Kind(instance, "node", tmp_path_factory.getbasetemp())
    cluster.up()
    yield cluster
    cluster.down()


@contextmanager
def skip_what_is_missing() -> Iterator[None]:
    """Skip a test whose requirement this machine lacks; fail where root could have installed it."""
    try:
        yield
    except Missing as missing:
        if os.environ.get("CI") and os.getuid() == 0 and shutil.which("apt-get"):
            raise
        pytest.skip(str(missing))
