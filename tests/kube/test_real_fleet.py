"""The whole of it: a real API server, operator, broker, sidecars and apps; only containers are processes."""

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import pytest

from ground import peers
from ground.api import Api
from ground.cluster import Cluster
from ground.deliveries import whole_lines
from ground.instance import Instance, temporary
from ground.local import LocalNode
from ground.ours import conditions
from ground.poll import soon
from ground.relay import Relay
from ground.rocketmq import RocketMQ
from kube.operators import an_operator
from kube.scraped import series
from kube.shop import GROUP, QUEUES, TemplateGroup, a_shop, a_template
from rota.kube.http.schema import Detail
from rota.model import Queue
from rota.ranges import from_ranges

# What a member that is lost leaves to be repeated, at most: 16 messages at its app by default, and about as many that
# were done since each queue's last pull, with which its offset would have been committed.
REPEATED = 32

# A program of the operator that asks brokers who is in a group only if something tells it to.
WITHOUT_PERIODIC_POLLS = """
from rota.kube.brokers import route_watcher
route_watcher.MIN_CONSUMER_POLL_SECONDS = 3600.0
route_watcher.MAX_CONSUMER_POLL_SECONDS = 3600.0
from rota.cli import main
main(prog_name="rota")
"""

pytestmark = [pytest.mark.usefixtures("crds", "operator"), pytest.mark.timeout(600)]


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
    """Run a group whose app is Ready as long as no file says that it is not."""
    template = a_template(local_node, tmp_path)
    well = ["sh", "-c", f'test ! -e "{tmp_path}/unready-$ROTA_LOCAL"']
    template["spec"]["containers"][0]["readinessProbe"] = {
        "exec": {"command": well},
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    async with a_shop(api, namespace, rocketmq, local_node, tmp_path, template=template) as made:
        yield made


class Places:
    """Where people look for what was, or is, the matter."""

    def __init__(self, shop: TemplateGroup, address: str, folder: Path) -> None:
        self._shop, self._address, self._folder = shop, address, folder

    async def tell_of_cause(self, reason: str) -> None:
        """Wait until queues were moved for it, and each place says so."""
        await self._shop.moved_for(reason)
        await self._shop.soon(lambda: self._shop.has_event(reason))
        await self._shop.soon(partial(self._counted, "rota_rebalances_total", reason))
        await self._shop.soon(partial(self._written, "plan", reason))

    async def tell_of_problem(self, reason: str) -> str:
        """Wait until each place says that this is wrong; return the sentence."""
        await self._shop.soon(partial(self._is_so, reason))
        await self._shop.soon(lambda: self._shop.has_event(reason))
        await self._shop.soon(partial(self._counted, "rota_group_problem", reason))
        await self._shop.soon(partial(self._written, "verdict", reason))
        found = conditions(await self._shop.api.get(self._shop.path))
        return str(found[reason]["message"])

    async def no_problem(self, reason: str) -> None:
        """Wait until nobody says any more that this is wrong."""

        async def mended() -> bool:
            return not (await self._is_so(reason) or await self._counted("rota_group_problem", reason))

        await self._shop.soon(mended)

    async def _is_so(self, reason: str) -> bool:
        found = conditions(await self._shop.api.get(self._shop.path))
        return found.get(reason, {}).get("status") == "True"

    async def _counted(self, name: str, reason: str) -> bool:
        """Whether a metric of the operator's counts it."""
        wanted = {"namespace": self._shop.namespace, "group": GROUP, "reason": reason}
        where = f"http://{self._address}:8080/metrics"
        async with aiohttp.ClientSession() as session, session.get(where) as answer:
            told = series(await answer.text())
        return sum(it.value for it in told if it.name == name and wanted.items() <= it.labels.items()) > 0

    async def _written(self, kind: str, reason: str) -> bool:
        """Whether the journal has such a line."""
        lines = [json.loads(line) for path in self._folder.glob("date=*/*.jsonl") for line in whole_lines(path)]
        return any((it["kind"], it.get("reason")) == (kind, reason) for it in lines)


@pytest.fixture
def places(shop: TemplateGroup, address: str, tmp_path: Path) -> Places:
    return Places(shop, address, tmp_path / "operator")


async def named(shop: TemplateGroup) -> dict[str, str]:
    """Return the pods' addresses by name."""
    return {it["metadata"]["name"]: it["status"]["podIP"] for it in await shop.pods()}


async def test_scale_up_rolling_update_and_scale_down_deliver_each_message_once(
    shop: TemplateGroup,
) -> None:
    await shop.works(2)
    async with shop.sending():
        await shop.scale(3)
        await shop.works(3)
        before = {it["metadata"]["name"] for it in await shop.pods()}
        restart = {"spec": {"template": {"metadata": {"annotations": {"restarted": "now"}}}}}
        await shop.api.patch(shop.path, restart)

        async def replaced() -> bool:
            return before.isdisjoint({it["metadata"]["name"] for it in await shop.pods()})

        await shop.soon(replaced)
        await shop.works(3)
        await shop.scale(1)
        await shop.works(1)
    assert {number for number, times in shop.deliveries().items() if times > 1} == set()


async def test_condition_of_failing_deliveries_lasts_while_the_app_answers_500_to_everything(
    shop: TemplateGroup, places: Places, address: str
) -> None:
    """Such a group was Ready, not Degraded, with a lag of 0 and nothing to be tried again."""
    shop.rules.write_text('[{"status": 500}]')
    await shop.works(2)
    every = [queue for share in await shop.shares() for queue in share]
    for queue in [*every, *every, *every]:
        await shop.send(queue)
    told = await places.tell_of_problem("DeliveriesFailing")
    assert re.fullmatch(r"100 % of \d+ deliveries in the last 5 min failed, the last with status 500", told)
    found = conditions(await shop.api.get(shop.path))
    assert (found["Ready"]["status"], found["Degraded"]["reason"]) == ("True", "DeliveriesFailing")

    async def estimated() -> bool:
        return ((await detail(shop, address)).summary.delayed or 0) > 0

    await shop.soon(estimated)

    async def named() -> list[str]:
        return [it for member in (await detail(shop, address)).members for it in member.failing]

    assert re.fullmatch(
        rf"%RETRY%{GROUP}/\S+/0, offset \d+ \(sent to {GROUP}\): failed \d+ times, most recently with status 500",
        (await soon(named))[0],
    )
    shop.rules.write_text("[]")
    async with shop.sending():
        await places.no_problem("DeliveriesFailing")


async def detail(shop: TemplateGroup, address: str) -> Detail:
    """Return what the operator shows of the group."""
    where = f"http://{address}:8080/v1/groups/{shop.namespace}/{GROUP}"
    async with aiohttp.ClientSession() as session, session.get(where) as answer:
        return msgspec.json.decode(await answer.read(), type=Detail)


@pytest.mark.slow("a whole fleet of apps that pull grows and shrinks")
async def test_pull_delivers_each_message_once_across_scale_up_and_scale_down(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> None:
    template = a_template(local_node, tmp_path, asks=True)
    async with a_shop(
        api, namespace, rocketmq, local_node, tmp_path, template=template, delivery={"mode": "Pull"}
    ) as shop:
        await shop.works(2)
        async with shop.sending():
            await shop.scale(3)
            await shop.works(3)

            async def all_apps_have_messages() -> bool:
                return len(shop.deliveries_by_app()) == 3

            await shop.soon(all_apps_have_messages)
            await shop.scale(1)
            await shop.works(1)
        assert {*shop.deliveries().values()} == {1}


@pytest.mark.slow("queues are added while a whole fleet is at zero")
async def test_start_from_latest_misses_nothing_in_queues_added_later(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> None:
    """What is sent to them before a member is given them is the group's, and counts as lag while nobody is there."""
    topic = "returns"
    async with a_shop(
        api, namespace, rocketmq, local_node, tmp_path, topic=topic, startFrom={"position": "Latest"}
    ) as shop:
        await shop.works(2)
        await grown(shop, rocketmq, topic, QUEUES + 4)
        await shop.soon(shop.delivered_all)
        await shop.soon(lambda: shop.owns(QUEUES + 4))
        await shop.scale(0)
        await shop.soon(nobody(shop))
        await grown(shop, rocketmq, topic, QUEUES + 8)

        async def all_counted() -> bool:
            return bool((await api.get(shop.path))["status"].get("lag") == QUEUES + 8)

        await shop.soon(all_counted)
        await shop.scale(1)
        await shop.soon(shop.delivered_all)
        assert {*shop.deliveries().values()} == {1}


async def grown(shop: TemplateGroup, rocketmq: RocketMQ, topic: str, queues: int) -> None:
    """Give a topic more queues, and send to each of its queues at once."""
    rocketmq.create_topic(topic, queues)
    [broker] = {queue.broker for queue in await shop.brokers.queues(topic)}
    for number in range(queues):
        await shop.send(Queue(topic, broker, number))


def nobody(shop: TemplateGroup) -> Callable[[], Awaitable[bool]]:
    async def so() -> bool:
        return not await shop.pods()

    return so


@pytest.mark.slow("a whole Broadcasting fleet grows")
async def test_broadcasting_delivers_each_message_once_to_each_member_during_scale_up(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> None:
    # A topic of its own: the broker knows nothing of what these members have done, and other groups would do it again.
    async with a_shop(
        api, namespace, rocketmq, local_node, tmp_path, topic="prices", messageModel="Broadcasting"
    ) as shop:
        await shop.works(2)
        async with shop.sending():
            await shop.scale(3)
            await shop.works(3)
        everything = Counter(range(1, shop.sent + 1))

        async def everybody_has_it() -> bool:
            return [*shop.deliveries_by_app().values()] == [everything] * 3

        await shop.soon(everybody_has_it)


@pytest.mark.slow("causes of rebalances of a whole fleet, by HTTP and in files")
async def test_status_event_metric_and_journal_name_the_cause_of_a_rebalance(
    shop: TemplateGroup, places: Places, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> None:
    policy = f"{shop.where}/rebalancepolicies/sticky"
    await shop.api.patch(policy, {"spec": {"triggers": {"unreadyGrace": "1s"}}})
    await shop.works(2)
    async with shop.sending():
        rocketmq.create_topic("refunds", 4)
        await shop.api.patch(shop.path, {"spec": {"subscriptions": [{"topic": GROUP}, {"topic": "refunds"}]}})
        await places.tell_of_cause("SubscriptionChanged")
        rocketmq.create_topic("refunds", 8)
        await places.tell_of_cause("QueuesAdded")
        rocketmq.create_topic("refunds", 2)
        await places.tell_of_cause("QueuesRemoved")
        hung, where = min((await named(shop)).items())
        (tmp_path / f"unready-{where}").touch()  # its sidecar is heard, and gives its queues up
        await places.tell_of_cause("MemberUnready")
        (tmp_path / f"unready-{where}").unlink()
        await places.tell_of_cause("MemberJoined")
        assert {number for number, times in shop.deliveries().items() if times > 1} == set()
        # Who hangs is neither ready nor heard; it is lost long before it is out for not being ready.
        await shop.api.patch(policy, {"spec": {"handover": {"lostAfter": "2s"}, "triggers": {"unreadyGrace": "2m"}}})
        local_node.signal(shop.namespace, hung, signal.SIGSTOP)
        try:
            await places.tell_of_cause("MemberLost")
            await shop.soon(lambda: shop.has_event("QueuesForced"))
        finally:
            local_node.signal(shop.namespace, hung, signal.SIGCONT)
        await shop.moved_for("MemberJoined")
        await shop.works(2)
    assert sum(times > 1 for times in shop.deliveries().values()) <= REPEATED


async def test_restart_of_a_killed_member_gives_its_queues_to_others_and_back(
    shop: TemplateGroup, places: Places, local_node: LocalNode
) -> None:
    await shop.works(2)
    victim, other = sorted(await named(shop))

    async def owns(name: str, incarnation: int, least: int = 1) -> bool:
        """Whether the assignment gives so many queues to this process of the pod."""
        share = (await shop.document())["members"][name]
        own = [queue for queue in from_ranges(share["queues"]) if queue.topic == GROUP]
        return share.get("incarnation") == incarnation and len(own) >= least

    await shop.soon(partial(owns, victim, 1))
    async with shop.sending():
        local_node.signal(shop.namespace, victim, signal.SIGKILL)
        await shop.soon(partial(owns, victim, 2))
        await shop.works(2)
        # The second time the kubelet waits before it starts the container again.
        local_node.signal(shop.namespace, victim, signal.SIGKILL)
        await shop.soon(partial(owns, other, 1, QUEUES))
        await places.tell_of_cause("MemberRestarted")
        await shop.soon(partial(owns, victim, 3))
        await shop.works(2)
    assert sum(times > 1 for times in shop.deliveries().values()) <= 2 * REPEATED


@pytest.mark.slow("a broker that switches a whole fleet off, and then rejects its filter")
async def test_condition_of_what_a_real_broker_rejects_lasts_until_it_accepts(
    shop: TemplateGroup, places: Places, rocketmq: RocketMQ
) -> None:
    [broker] = rocketmq.brokers
    subscriptions = (await shop.api.get(shop.path))["spec"]["subscriptions"]
    await shop.works(2)
    await shop.brokers.update_group(GROUP, broker.name, consumeEnable=False)
    assert f"switched off at {broker.name}" in await places.tell_of_problem("ConsumptionDisabled")
    await shop.brokers.update_group(GROUP, broker.name, consumeEnable=True)
    await places.no_problem("ConsumptionDisabled")
    # SQL92 is switched off in a broker's default settings.
    by_property = [it | {"type": "SQL92", "expression": "amount > 5"} for it in subscriptions]
    await shop.api.patch(shop.path, {"spec": {"subscriptions": by_property}})
    assert "SQL92" in await places.tell_of_problem("BrokerRefuses")
    await shop.api.patch(shop.path, {"spec": {"subscriptions": subscriptions}})
    await places.no_problem("BrokerRefuses")
    await shop.works(2)


@pytest.mark.slow("two Java consumers of one client id in the group of a whole fleet")
async def test_condition_duplicate_client_ids_lasts_until_one_java_consumer_leaves(
    shop: TemplateGroup, places: Places, rocketmq: RocketMQ
) -> None:
    await shop.works(2)
    one, other = (peers.push_consumer(rocketmq, GROUP, GROUP, instance="twin") for _ in range(2))
    try:
        assert "@twin; " in await places.tell_of_problem("DuplicateClientIds")
        # Each of them counts four consumers, so there are but two queues for each of ours that neither reads.
        await shop.soon(lambda: shop.owns(4))
        one.stop()
        await places.no_problem("DuplicateClientIds")
        await places.tell_of_problem("UnmanagedConsumers")  # for one of them is still there
    finally:
        one.stop()
        other.stop()
    await places.no_problem("UnmanagedConsumers")
    await shop.works(2)


@pytest.mark.slow("a Java consumer with another filter in the group of a whole fleet")
async def test_unmanaged_consumer_with_another_filter_is_a_condition_until_it_leaves(
    shop: TemplateGroup, places: Places, address: str, rocketmq: RocketMQ
) -> None:
    await shop.works(2)
    java = peers.push_consumer(rocketmq, GROUP, GROUP, instance="odd", expression="paid")
    try:
        told = await places.tell_of_problem("SubscriptionMismatch")
        assert told.endswith(f"@odd: its filter of {GROUP} is paid")
        where = f"http://{address}:8080/v1/groups/{shop.namespace}/{GROUP}"
        async with aiohttp.ClientSession() as session, session.get(where) as answer:
            members = (await answer.json())["members"]
        shown = {(it["subscriptions"][0]["expression"], it["model"], it["start"]) for it in members}
        assert shown == {("*", "Clustering", "Earliest"), ("paid", "Clustering", "Earliest")}
    finally:
        java.stop()
    await places.no_problem("SubscriptionMismatch")
    await shop.works(2)


class TestWithoutPeriodicPolls:
    """An operator that does not ask brokers periodically who is in a group, because it is asked to only by members."""

    @pytest.fixture
    async def operator(
        self, control_plane: Cluster, namespace: str, address: str, tmp_path: Path
    ) -> AsyncIterator[None]:
        log = tmp_path / "operator.log"
        async with an_operator(
            control_plane.kubeconfig, namespace, address, log, program=("-c", WITHOUT_PERIODIC_POLLS)
        ):
            yield

    async def test_unmanaged_consumer_is_noticed_by_its_brokers_word_when_it_joins_and_leaves(
        self, shop: TemplateGroup, places: Places, rocketmq: RocketMQ
    ) -> None:
        await shop.works(2)
        java = peers.push_consumer(rocketmq, GROUP, GROUP, instance="java")
        try:
            assert "@java" in await places.tell_of_problem("UnmanagedConsumers")
        finally:
            java.stop()
        await places.no_problem("UnmanagedConsumers")
        await shop.works(2)


@pytest.mark.slow("one of two brokers dies and returns under a whole fleet")
class TestWithTwoBrokers:
    """A topic on two brokers, one of which dies."""

    @pytest.fixture
    def rocketmq(self) -> Iterator[RocketMQ]:
        with temporary("pair") as made:
            found = RocketMQ(made, brokers=2)
            found.up()
            yield found
            found.down()

    async def test_broker_failure_removes_queues_of_the_broker_until_it_is_back(
        self, rocketmq: RocketMQ, shop: TemplateGroup, places: Places
    ) -> None:
        await shop.works(2)
        every = await shop.brokers.queues(GROUP)
        here, there = ([it for it in every if it.broker == broker.name] for broker in rocketmq.brokers)
        assert len(here) == len(there) == QUEUES
        await shop.follow("circle", "AveragelyByCircle")

        async def each_works_both() -> bool:
            """Else who reaches no broker of its queues is not ready, before they are gone."""
            return all({it.broker for it in share} == {it.broker for it in every} for share in await shop.shares())

        await shop.soon(each_works_both)
        await shop.works(2)
        for queue in [*here, *there]:
            await shop.send(queue)
        rocketmq.kill_broker(1)
        await places.tell_of_cause("QueuesRemoved")
        await shop.works(2)
        assert await shop.owns(QUEUES)
        meanwhile = {await shop.send(queue) for queue in here}
        await shop.soon(lambda: all_came(shop, meanwhile))
        await asyncio.to_thread(rocketmq.start_broker, 1)
        await places.tell_of_cause("QueuesAdded")
        for queue in there:
            await shop.send(queue)
        await shop.soon(shop.delivered_all)
        await shop.works(2)
        assert await shop.owns(2 * QUEUES)
        assert sum(times > 1 for times in shop.deliveries().values()) <= REPEATED


async def all_came(shop: TemplateGroup, numbers: set[int]) -> bool:
    return shop.deliveries().keys() >= numbers


@pytest.mark.slow("one member of a whole fleet is cut off from the broker")
class TestBehindARelay:
    """A broker that clients reach by a way which can be cut for one of them."""

    @pytest.fixture
    def apart(self) -> Iterator[Instance]:
        with temporary("relay") as made:
            yield made

    @pytest.fixture
    def rocketmq(self, apart: Instance) -> Iterator[RocketMQ]:
        """Start a broker that listens elsewhere than where it says; the name server is reached as ever."""
        found = RocketMQ(apart, settings={"bindAddress": apart.address(2)})
        found.up()
        yield found
        found.down()

    @pytest.fixture
    def relay(self, apart: Instance, rocketmq: RocketMQ) -> Iterator[Relay]:
        (broker,) = rocketmq.brokers
        with Relay((broker.address, broker.port), (apart.address(2), broker.port)).running() as running:
            yield running

    async def test_broker_unreachable_from_one_member_moves_its_queues_until_reconnected(
        self, relay: Relay, shop: TemplateGroup, places: Places, local_node: LocalNode
    ) -> None:
        await shop.works(2)
        async with shop.sending():
            lonely = min(await named(shop))
            with relay.cut(f"{local_node.folder}/pods/{shop.namespace}_{lonely}/"):
                await places.tell_of_cause("BrokerUnreachable")
                sent = shop.sent
                await shop.soon(lambda: all_came(shop, {*range(1, sent + 101)}))
            await places.tell_of_cause("MemberJoined")
            await shop.works(2)
