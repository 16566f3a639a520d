"""One real node, one installation and one broker for all tests; each test restores the parts that it needs."""

from collections.abc import Callable, Iterator

import pytest

from chart.charts import Helm
from e2e.consumers import RESULTS, Consumers, broker_of
from e2e.release import Installation
from ground.cluster import NodeCluster
from ground.node import RealNode
from ground.rocketmq import RocketMQ


@pytest.fixture(scope="session")
def release(node_cluster: NodeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Prepare the installation, and uninstall the release in the end."""
    installation = Installation.build(node_cluster, Helm(tmp_path_factory.mktemp("helm")))
    yield installation
    installation.helm_release("uninstall", "--ignore-not-found")


@pytest.fixture
def installation(release: Installation, request: pytest.FixtureRequest) -> Iterator[Installation]:
    """Install the release unless it is installed; print the state of the cluster if the test fails."""
    if request.node.get_closest_marker("own_node") and not isinstance(release.node, RealNode):
        pytest.skip("This test cuts the network by rules of the ground's own node")
    release.ensure_installed()
    failed_before = request.session.testsfailed
    yield release
    if request.session.testsfailed > failed_before:
        print(release.diagnostics())


@pytest.fixture(scope="session")
def broker(node_cluster: NodeCluster) -> Iterator[RocketMQ]:
    """Start a broker that pods can reach."""
    rocketmq = broker_of(node_cluster)
    rocketmq.up()
    yield rocketmq
    rocketmq.down()


@pytest.fixture(scope="session")
def shared_consumers(
    release: Installation, broker: RocketMQ, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Consumers]:
    """Create the topic, and watch the group that consumes it."""
    consumers = Consumers(release, broker, tmp_path_factory.mktemp("deliveries"))
    yield consumers
    consumers.stop_watches()


@pytest.fixture
def consumers(
    installation: Installation, shared_consumers: Consumers, record_property: Callable[[str, object], None]
) -> Iterator[Consumers]:
    """Create a settled group of three members; add the results of events to the test's report."""
    assert shared_consumers.installation is installation
    shared_consumers.reset()
    first_result = len(RESULTS)
    yield shared_consumers
    for result in RESULTS[first_result:]:
        record_property("result", str(result))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the result of each event, also of successful tests."""
    for report in terminalreporter.getreports(""):
        for name, result in report.user_properties:
            if name == "result" and report.when == "teardown":
                terminalreporter.write_line(result)
