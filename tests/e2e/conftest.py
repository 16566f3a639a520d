"""One real node, one installation and one broker for all tests; what one takes away, the next one brings back."""

from collections.abc import Callable, Iterator

import pytest

from chart.charts import Helm
from e2e.consumers import VERDICTS, Consumers, broker_of
from e2e.release import Installed
from ground.cluster import NodeCluster
from ground.node import RealNode
from ground.rocketmq import RocketMQ


@pytest.fixture(scope="session")
def release(node_cluster: NodeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Make all that an installation needs, and uninstall it in the end."""
    it = Installed.on(node_cluster, Helm(tmp_path_factory.mktemp("helm")))
    yield it
    it.release("uninstall", "--ignore-not-found")


@pytest.fixture
def installed(release: Installed, request: pytest.FixtureRequest) -> Iterator[Installed]:
    """Install the release unless it is installed; print the state of the cluster if the test fails."""
    if request.node.get_closest_marker("own_node") and not isinstance(release.node, RealNode):
        pytest.skip("This test cuts the network by rules of the ground's own node")
    release.ensure()
    before = request.session.testsfailed
    yield release
    if request.session.testsfailed > before:
        print(release.story())


@pytest.fixture(scope="session")
def broker(node_cluster: NodeCluster) -> Iterator[RocketMQ]:
    """Start a broker that pods can reach."""
    it = broker_of(node_cluster)
    it.up()
    yield it
    it.down()


@pytest.fixture(scope="session")
def shipping(release: Installed, broker: RocketMQ, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consumers]:
    """Have a topic, and look at the group that consumes it."""
    it = Consumers(release, broker, tmp_path_factory.mktemp("deliveries"))
    yield it
    it.end()


@pytest.fixture
def consumers(
    installed: Installed, shipping: Consumers, record_property: Callable[[str, object], None]
) -> Iterator[Consumers]:
    """Have a group of three at work, at rest; what became of messages goes with the test's report."""
    assert shipping.installed is installed
    shipping.up()
    told = len(VERDICTS)
    yield shipping
    for verdict in VERDICTS[told:]:
        record_property("verdict", str(verdict))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what became of messages in each event, also where all went well."""
    for report in terminalreporter.getreports(""):
        for what, verdict in report.user_properties:
            if what == "verdict" and report.when == "teardown":
                terminalreporter.write_line(verdict)
