"""Messages that come again when another process reads a queue: as apps saw them, and as the operator counted them."""

import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from ground.api import Api
from ground.cluster import Cluster
from ground.deliveries import whole_lines
from ground.local import LocalNode
from ground.poll import PATIENCE_SECONDS
from ground.rocketmq import RocketMQ
from kube.operators import an_operator
from kube.scraped import series
from kube.shop import GROUP, QUEUES, TemplateGroup, a_shop
from rota.model import RETRY_TOPIC_PREFIX

pytestmark = [pytest.mark.usefixtures("crds", "operator"), pytest.mark.timeout(600)]

NOTHING = {"handover": 0, "crash": 0, "forced": 0, "retry": 0}


@pytest.fixture
def address(addresses: Callable[[], str]) -> str:
    """Return where the operator answers."""
    return addresses()


@pytest.fixture
async def operator(control_plane: Cluster, namespace: str, address: str, tmp_path: Path) -> AsyncIterator[None]:
    async with an_operator(control_plane.kubeconfig, namespace, address, tmp_path / "operator.log"):
        yield


@pytest.fixture
async def shop(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> AsyncIterator[TemplateGroup]:
    """Run a group whose apps may hold messages for as long as a test takes."""
    delivery = {"push": {"timeout": "10m"}}
    async with a_shop(api, namespace, rocketmq, local_node, tmp_path, delivery=delivery) as made:
        yield made


class Counts:
    """What the operator's metrics say of the group."""

    def __init__(self, shop: TemplateGroup, address: str) -> None:
        self._shop, self._url = shop, f"http://{address}:8080/metrics"

    async def redelivered(self) -> dict[str, float]:
        """Return how many messages came again, by cause."""
        found = await self._of_group("rota_redelivered_messages_total")
        return {labels["cause"]: value for labels, value in found}

    async def until_uncommitted(self, messages: int) -> None:
        """Wait until the operator has read that so many messages are given to apps and not committed."""

        async def so() -> bool:
            return [value for _, value in await self._of_group("rota_uncommitted_messages")] == [messages]

        await self._shop.soon(so)

    async def until_redelivered_are_counted(self, cause: str) -> None:
        """Wait until as many messages are counted as apps were given a second time: some of each queue, not all."""

        async def so() -> bool:
            again = given_again(self._shop)
            return 0 < again < QUEUES and await self.redelivered() == NOTHING | {cause: again}

        try:
            await self._shop.soon(so)
        except TimeoutError as error:
            error.add_note(f"{await self.redelivered()=}, {given_again(self._shop)=}")
            raise

    async def _of_group(self, name: str) -> list[tuple[dict[str, str], float]]:
        async with aiohttp.ClientSession() as session, session.get(self._url) as answer:
            found = series(await answer.text())
        wanted = {"namespace": self._shop.namespace, "group": GROUP}
        return [(it.labels, it.value) for it in found if it.name == name and wanted.items() <= it.labels.items()]


@pytest.fixture
def counts(shop: TemplateGroup, address: str) -> Counts:
    return Counts(shop, address)


def given(shop: TemplateGroup) -> Counter[int]:
    """Return how often each message was given to an app, finished or not."""
    return Counter(message["number"] for line in shop.lines() for message in line.get("messages", ()))


async def hold_one_in_each_queue(shop: TemplateGroup, counts: Counts) -> None:
    """Give apps a message of each queue, which they do not finish, and wait until the operator knows."""
    shop.rules.write_text('[{"act": "hold"}]')
    numbers = {await shop.send(queue) for queue in await shop.brokers.queues(GROUP)}

    async def at_the_apps() -> bool:
        return numbers <= given(shop).keys()

    await shop.soon(at_the_apps)
    await counts.until_uncommitted(QUEUES)


def given_again(shop: TemplateGroup) -> int:
    """Return how many messages were given a second time."""
    return sum(times - 1 for times in given(shop).values())


async def finish_all(shop: TemplateGroup) -> None:
    """Let apps finish, and wait until everything is delivered."""
    shop.rules.write_text("[]")
    await shop.soon(shop.delivered_all)


async def works_before(shop: TemplateGroup) -> None:
    """Deliver some messages, so that queues do not begin at 0."""
    await shop.works(2)
    async with shop.sending():
        await shop.soon(lambda: _are_sent(shop, 100))


async def _are_sent(shop: TemplateGroup, messages: int) -> bool:
    return shop.sent >= messages


async def a_member(shop: TemplateGroup) -> str:
    return min(str(it["metadata"]["name"]) for it in await shop.pods())


async def test_crash_of_a_member_counts_the_messages_that_apps_get_again(
    shop: TemplateGroup, counts: Counts, local_node: LocalNode
) -> None:
    await works_before(shop)
    assert await counts.redelivered() == NOTHING
    await hold_one_in_each_queue(shop, counts)
    victim = await a_member(shop)
    local_node.signal(shop.namespace, victim, signal.SIGSTOP)  # so that it can neither drain nor say anything
    await shop.api.delete(f"{shop.pods_path}/{victim}", {"gracePeriodSeconds": 0})
    await finish_all(shop)
    await counts.until_redelivered_are_counted("crash")


@pytest.mark.slow("a sidecar of a whole fleet is killed, and restarted by its kubelet")
async def test_crash_of_a_sidecars_process_counts_the_messages_that_apps_get_again(
    shop: TemplateGroup, counts: Counts, local_node: LocalNode
) -> None:
    await works_before(shop)
    await hold_one_in_each_queue(shop, counts)
    local_node.signal(shop.namespace, await a_member(shop), signal.SIGKILL)

    async def repeated() -> bool:
        return given_again(shop) > 0

    await shop.soon(repeated)
    await finish_all(shop)
    await counts.until_redelivered_are_counted("crash")


@pytest.mark.slow("a member of a whole fleet hangs until its queues are forced away")
async def test_forced_grant_counts_the_messages_that_apps_get_again(
    shop: TemplateGroup, counts: Counts, local_node: LocalNode
) -> None:
    policy = f"{shop.where}/rebalancepolicies/sticky"
    patience = {"handover": {"lostAfter": "2s"}, "triggers": {"unreadyGrace": "2m"}}
    await shop.api.patch(policy, {"spec": patience})
    await works_before(shop)
    await hold_one_in_each_queue(shop, counts)
    victim = await a_member(shop)
    local_node.signal(shop.namespace, victim, signal.SIGSTOP)
    try:
        await shop.soon(lambda: shop.has_event("QueuesForced"))
        await finish_all(shop)
        await counts.until_redelivered_are_counted("forced")
    finally:
        local_node.signal(shop.namespace, victim, signal.SIGCONT)


@pytest.mark.slow("a whole fleet is scaled under traffic, and hands queues over while its apps hold messages")
async def test_handover_counts_only_messages_whose_drain_timed_out(shop: TemplateGroup, counts: Counts) -> None:
    await shop.works(2)
    async with shop.sending():
        await shop.scale(3)
        await shop.works(3)
        await shop.scale(2)
        await shop.works(2)
    await shop.soon(shop.delivered_all)
    assert {*given(shop).values()} == {1}
    assert await counts.redelivered() == NOTHING
    await hold_one_in_each_queue(shop, counts)
    [broker] = {queue.broker for queue in await shop.brokers.queues(GROUP)}
    every = {"topic": GROUP, "broker": broker, "ids": f"0-{QUEUES - 1}"}
    impatient = {
        "apiVersion": "rota.dev/v1alpha1",
        "kind": "RebalancePolicy",
        "metadata": {"name": "second-has-all"},
        "spec": {
            "strategy": "ByConfig",
            "options": {"byConfig": {"members": [{"index": 1, "queues": [every]}]}},
            "handover": {"drainTimeout": "1s"},
        },
    }
    await shop.api.create(f"{shop.where}/rebalancepolicies", impatient)
    await shop.follow("second-has-all")
    await shop.moved_for("PolicyChanged")
    await finish_all(shop)
    await counts.until_redelivered_are_counted("handover")


def knows_the_retry_topic(journal: Path) -> bool:
    """Whether the operator knows where the retry topic ends now."""
    records = [json.loads(line) for path in journal.glob("*/*.jsonl") for line in whole_lines(path)]
    return any(RETRY_TOPIC_PREFIX + GROUP in it.get("topics", {}) for it in records)


@pytest.mark.slow("an app of a whole fleet fails once, and its message is retried")
async def test_retry_counts_the_messages_that_apps_get_again(
    shop: TemplateGroup, counts: Counts, tmp_path: Path
) -> None:
    await works_before(shop)

    async def is_sampled() -> bool:
        return knows_the_retry_topic(tmp_path / "operator")

    await shop.soon(is_sampled, 10 * PATIENCE_SECONDS)  # a sample a minute, once the topic is known
    shop.rules.write_text(json.dumps([{"numbers": [shop.sent + 1, shop.sent + 2], "attempts": [1], "status": 500}]))
    for queue in (await shop.brokers.queues(GROUP))[:3]:
        await shop.send(queue)
    await shop.soon(shop.delivered_all)
    await counts.until_redelivered_are_counted("retry")
    assert given_again(shop) == 2
