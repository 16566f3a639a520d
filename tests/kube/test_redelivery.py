"""Messages that are redelivered when another process reads a queue: received by apps, counted by the operator."""

import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from ground.api import Api
from ground.cluster import Cluster
from ground.local import LocalNode
from ground.poll import PATIENCE_SECONDS
from ground.rocketmq import RocketMQ
from journal_segments import written_records
from kube.operators import an_operator
from kube.scraped import parse_series
from kube.template_group import GROUP, QUEUES, TemplateGroup, a_template_group
from rota.model import RETRY_TOPIC_PREFIX

pytestmark = [pytest.mark.usefixtures("crds", "operator"), pytest.mark.timeout(600)]

NOTHING = {"handover": 0, "crash": 0, "forced": 0, "retry": 0}


@pytest.fixture
def address(addresses: Callable[[], str]) -> str:
    """Return the operator's address."""
    return addresses()


@pytest.fixture
async def operator(control_plane: Cluster, namespace: str, address: str, tmp_path: Path) -> AsyncIterator[None]:
    async with an_operator(control_plane.kubeconfig, namespace, address, tmp_path / "operator.log"):
        yield


@pytest.fixture
async def fleet(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> AsyncIterator[TemplateGroup]:
    """Run a group whose apps may hold messages for as long as a test takes."""
    delivery = {"push": {"timeout": "10m"}}
    async with a_template_group(api, namespace, rocketmq, local_node, tmp_path, delivery=delivery) as group:
        yield group


class Counts:
    """The operator's metrics of the group."""

    def __init__(self, fleet: TemplateGroup, address: str) -> None:
        self._fleet = fleet
        self._url = f"http://{address}:8080/metrics"

    async def redelivered(self) -> dict[str, float]:
        """Return the number of redelivered messages, by cause."""
        samples = await self._of_group("rota_redelivered_messages_total")
        return {labels["cause"]: value for labels, value in samples}

    async def wait_for_uncommitted(self, messages: int) -> None:
        """Wait until the operator counts this number of messages that apps have and that are not committed."""

        async def has_count() -> bool:
            return [value for _, value in await self._of_group("rota_uncommitted_messages")] == [messages]

        await self._fleet.soon(has_count)

    async def wait_for_redelivered(self, cause: str) -> None:
        """Wait until the operator counts the second deliveries that apps received: some, but fewer than queues."""

        async def has_count() -> bool:
            again = redelivered_count(self._fleet)
            return 0 < again < QUEUES and await self.redelivered() == NOTHING | {cause: again}

        try:
            await self._fleet.soon(has_count)
        except TimeoutError as error:
            error.add_note(f"{await self.redelivered()=}, {redelivered_count(self._fleet)=}")
            raise

    async def _of_group(self, name: str) -> list[tuple[dict[str, str], float]]:
        async with aiohttp.ClientSession() as session, session.get(self._url) as response:
            all_series = parse_series(await response.text())
        required_labels = {"namespace": self._fleet.namespace, "group": GROUP}
        return [
            (series.labels, series.value)
            for series in all_series
            if series.name == name and required_labels.items() <= series.labels.items()
        ]


@pytest.fixture
def counts(fleet: TemplateGroup, address: str) -> Counts:
    return Counts(fleet, address)


def deliveries_started(fleet: TemplateGroup) -> Counter[int]:
    """Return how often each message was delivered to an app, acknowledged or not."""
    return Counter(message["number"] for line in fleet.lines() for message in line.get("messages", ()))


async def hold_one_in_each_queue(fleet: TemplateGroup, counts: Counts) -> None:
    """Deliver a message of each queue, which apps do not acknowledge, and wait until the operator counts them."""
    fleet.rules.write_text('[{"act": "hold"}]')
    numbers = {await fleet.send(queue) for queue in await fleet.brokers.queues(GROUP)}

    async def are_delivered() -> bool:
        return numbers <= deliveries_started(fleet).keys()

    await fleet.soon(are_delivered)
    await counts.wait_for_uncommitted(QUEUES)


def redelivered_count(fleet: TemplateGroup) -> int:
    """Return the number of second deliveries."""
    return sum(times - 1 for times in deliveries_started(fleet).values())


async def finish_all(fleet: TemplateGroup) -> None:
    """Let apps acknowledge, and wait until everything is delivered."""
    fleet.rules.write_text("[]")
    await fleet.soon(fleet.has_delivered_all)


async def deliver_some(fleet: TemplateGroup) -> None:
    """Deliver some messages, so that offsets do not start at 0."""
    await fleet.wait_for_members(2)
    async with fleet.sending():
        await fleet.soon(lambda: _are_sent(fleet, 100))


async def _are_sent(fleet: TemplateGroup, messages: int) -> bool:
    return fleet.sent >= messages


async def a_member(fleet: TemplateGroup) -> str:
    return min(str(pod["metadata"]["name"]) for pod in await fleet.pods())


async def test_crash_of_a_member_counts_the_messages_that_apps_get_again(
    fleet: TemplateGroup, counts: Counts, local_node: LocalNode
) -> None:
    await deliver_some(fleet)
    assert await counts.redelivered() == NOTHING
    await hold_one_in_each_queue(fleet, counts)
    victim = await a_member(fleet)
    local_node.signal(fleet.namespace, victim, signal.SIGSTOP)  # it can neither drain nor report
    await fleet.api.delete(f"{fleet.pods_path}/{victim}", {"gracePeriodSeconds": 0})
    await finish_all(fleet)
    await counts.wait_for_redelivered("crash")


@pytest.mark.slow("a sidecar of a whole fleet is killed, and restarted by its kubelet")
async def test_crash_of_a_sidecars_process_counts_the_messages_that_apps_get_again(
    fleet: TemplateGroup, counts: Counts, local_node: LocalNode
) -> None:
    await deliver_some(fleet)
    await hold_one_in_each_queue(fleet, counts)
    local_node.signal(fleet.namespace, await a_member(fleet), signal.SIGKILL)

    async def has_redelivered() -> bool:
        return redelivered_count(fleet) > 0

    await fleet.soon(has_redelivered)
    await finish_all(fleet)
    await counts.wait_for_redelivered("crash")


@pytest.mark.slow("a member of a whole fleet hangs until its queues are granted by force")
async def test_forced_grant_counts_the_messages_that_apps_get_again(
    fleet: TemplateGroup, counts: Counts, local_node: LocalNode
) -> None:
    policy = f"{fleet.api_path}/rebalancepolicies/sticky"
    spec = {"handover": {"lostAfter": "2s"}, "triggers": {"unreadyGrace": "2m"}}
    await fleet.api.patch(policy, {"spec": spec})
    await deliver_some(fleet)
    await hold_one_in_each_queue(fleet, counts)
    victim = await a_member(fleet)
    local_node.signal(fleet.namespace, victim, signal.SIGSTOP)
    try:
        await fleet.soon(lambda: fleet.has_event("QueuesForced"))
        await finish_all(fleet)
        await counts.wait_for_redelivered("forced")
    finally:
        local_node.signal(fleet.namespace, victim, signal.SIGCONT)


@pytest.mark.slow("a whole fleet is scaled under traffic, and hands queues over while its apps hold messages")
async def test_handover_counts_only_messages_whose_drain_timed_out(fleet: TemplateGroup, counts: Counts) -> None:
    await fleet.wait_for_members(2)
    async with fleet.sending():
        await fleet.scale(3)
        await fleet.wait_for_members(3)
        await fleet.scale(2)
        await fleet.wait_for_members(2)
    await fleet.soon(fleet.has_delivered_all)
    assert {*deliveries_started(fleet).values()} == {1}
    assert await counts.redelivered() == NOTHING
    await hold_one_in_each_queue(fleet, counts)
    [broker] = {queue.broker for queue in await fleet.brokers.queues(GROUP)}
    all_queues = {"topic": GROUP, "broker": broker, "ids": f"0-{QUEUES - 1}"}
    policy = {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "RebalancePolicy",
        "metadata": {"name": "second-has-all"},
        "spec": {
            "strategy": "ByConfig",
            "options": {"byConfig": {"members": [{"index": 1, "queues": [all_queues]}]}},
            "handover": {"drainTimeout": "1s"},
        },
    }
    await fleet.api.create(f"{fleet.api_path}/rebalancepolicies", policy)
    await fleet.set_policy("second-has-all")
    await fleet.wait_for_rebalance("PolicyChanged")
    await finish_all(fleet)
    await counts.wait_for_redelivered("handover")


def knows_the_retry_topic(journal: Path) -> bool:
    """Whether the journal has a record of the retry topic."""
    return any(RETRY_TOPIC_PREFIX + GROUP in record.get("topics", {}) for record in written_records(journal))


@pytest.mark.slow("an app of a whole fleet fails once, and its message is retried")
async def test_retry_counts_the_messages_that_apps_get_again(
    fleet: TemplateGroup, counts: Counts, tmp_path: Path
) -> None:
    await deliver_some(fleet)

    async def is_sampled() -> bool:
        return knows_the_retry_topic(tmp_path / "operator")

    await fleet.soon(is_sampled, 10 * PATIENCE_SECONDS)  # one sample a minute, once the topic is known
    fleet.rules.write_text(json.dumps([{"numbers": [fleet.sent + 1, fleet.sent + 2], "attempts": [1], "status": 500}]))
    for queue in (await fleet.brokers.queues(GROUP))[:3]:
        await fleet.send(queue)
    await fleet.soon(fleet.has_delivered_all)
    await counts.wait_for_redelivered("retry")
    assert redelivered_count(fleet) == 2
