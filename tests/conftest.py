"""Shared by all tests: the ground's fixtures, hypothesis without deadlines, and the distribution to xdist workers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from ground.instance import sweep

pytest_plugins = ["chart.fixtures", "ground.fixtures", "leaks", "timing"]

settings.register_profile("rota", deadline=None)  # machines are shared
settings.load_profile("rota")

TESTS = Path(__file__).parent
LONGEST_FIRST = ("e2e", "pipeline", "simulation", "kube", "sidecar", "chart", "ground", "images", "brokers")
# Tests that share servers, by the beginnings of their ids.
E2E = ("tests/e2e/",)
SIDECAR = ("tests/sidecar/",)
ONE_NODE = (*E2E, "tests/images/", "tests/ground/tests/test_kind.py", "tests/ground/tests/test_real_node.py")
ONE_SPARK = ("tests/pipeline/",)
WITH_BROKER = tuple(f"tests/{folder}/" for folder in ("kube", "sidecar", "chart", "ground", "images", "brokers"))
# Tests that take minutes have a longer timeout, for slow and busy machines. A hanging test of the pipeline ends its
# worker process, and xdist starts another one: an interrupted call to the JVM breaks the Spark session, so every later
# test of the worker would fail.
PATIENCE = {
    "e2e": pytest.mark.timeout(2400),
    "pipeline": pytest.mark.timeout(2400, method="thread"),
}
# Session fixtures whose servers keep a core busy: they end as soon as the worker's next test does not need them.
ENDED_EARLY = {
    E2E: ("shipping", "broker", "release", "node_cluster"),
    ONE_NODE: ("real_node",),
    ONE_SPARK: ("spark",),
    SIDECAR: ("rocketmq",),  # a broker of its own
    WITH_BROKER: ("rocketmq",),
}


class Scheduling(LoadFileScheduling):  # type: ignore[misc] # it has no types
    """Keeps the tests of a file on one worker, because they share servers that start slowly.

    All tests on the real node count as one file, and so do all tests on Spark: a Spark session takes minutes to warm
    up, and its tasks keep both cores busy.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ONE_NODE):
            return "the real node"
        return "Spark" if nodeid.startswith(ONE_SPARK) else super()._split_scope(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test at which a worker crashed; other workers get its other tests, but not this one again."""
        units = self.assigned_work[node].values()
        unfinished = [(unit, test) for unit in units for test, is_done in unit.items() if not is_done]
        if not unfinished:
            return super().remove_node(node)  # type: ignore[no-any-return]
        unit, crashed = unfinished[0]
        unit[crashed] = True
        super().remove_node(node)
        return str(crashed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the folders that take longest: a long file at the end would keep a single worker busy."""
    rank = {folder: number for number, folder in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(_folder_of(item), len(rank)))
    for item in items:
        if mark := PATIENCE.get(_folder_of(item)):
            item.add_marker(mark)


def _folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Finish a folder's servers after the folder's last test; pytest would finish them at the end of the run."""
    yield
    if not nextitem:
        return
    for folders, fixtures in ENDED_EARLY.items():
        if item.nodeid.startswith(folders) and not nextitem.nodeid.startswith(folders):
            for name in fixtures:
                if definitions := item.session._fixturemanager.getfixturedefs(name, item):
                    definitions[-1].finish(item._request)  # type: ignore[attr-defined] # the last overrides the others


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    """Return the scheduler of `make test`."""
    return Scheduling(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the servers that an interrupted worker had no time to stop: it has ten seconds."""
    if not hasattr(config, "workerinput"):
        sweep()
