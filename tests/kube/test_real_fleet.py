"""The whole system: a real API server, operator, broker, sidecars and apps; only the containers are processes."""

import asyncio
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
from ground.instance import Instance, temporary
from ground.local import LocalNode
from ground.ours import conditions
from ground.poll import soon
from ground.relay import Relay
from ground.rocketmq import RocketMQ
from journal_segments import written_records
from kube.operators import an_operator
from kube.scraped import parse_series
from kube.template_group import GROUP, QUEUES, TemplateGroup, a_template, a_template_group
from rota.kube.http.schema import GroupDetail
from rota.model import Queue
from rota.ranges import from_ranges

# The most messages that are repeated after a member is lost: 16 at its app by default, and about as many that
# were acknowledged since each queue's last pull, which would have committed the offset.
REPEATED = 32

# An operator that polls the brokers' consumers only after a notification.
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
    """Run a group whose app is Ready unless a file says otherwise."""
    template = a_template(local_node, tmp_path)
    probe = ["sh", "-c", f'test ! -e "{tmp_path}/unready-$ROTA_LOCAL"']
    template["spec"]["containers"][0]["readinessProbe"] = {
        "exec": {"command": probe},
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    async with a_template_group(api, namespace, rocketmq, local_node, tmp_path, template=template) as fleet:
        yield fleet


class Places:
    """The status, Events, metrics and journal of a group: where users look for causes and problems."""

    def __init__(self, fleet: TemplateGroup, address: str, folder: Path) -> None:
        self._fleet = fleet
        self._address = address
        self._folder = folder

    async def tell_of_cause(self, reason: str) -> None:
        """Wait until a rebalance has this reason in each place."""
        await self._fleet.wait_for_rebalance(reason)
        await self._fleet.soon(lambda: self._fleet.has_event(reason))
        await self._fleet.soon(partial(self._counted, "rota_rebalances_total", reason))
        await self._fleet.soon(partial(self._written, "plan", reason))

    async def tell_of_problem(self, reason: str) -> str:
        """Wait until each place shows this problem; return the condition's message."""
        await self._fleet.soon(partial(self._is_so, reason))
        await self._fleet.soon(lambda: self._fleet.has_event(reason))
        await self._fleet.soon(partial(self._counted, "rota_group_problem", reason))
        await self._fleet.soon(partial(self._written, "verdict", reason))
        by_type = conditions(await self._fleet.api.get(self._fleet.path))
        return str(by_type[reason]["message"])

    async def no_problem(self, reason: str) -> None:
        """Wait until the condition and the metric of this problem have ended."""

        async def is_over() -> bool:
            return not (await self._is_so(reason) or await self._counted("rota_group_problem", reason))

        await self._fleet.soon(is_over)

    async def _is_so(self, reason: str) -> bool:
        by_type = conditions(await self._fleet.api.get(self._fleet.path))
        return by_type.get(reason, {}).get("status") == "True"

    async def _counted(self, name: str, reason: str) -> bool:
        """Whether a metric of the operator counts it."""
        required_labels = {"namespace": self._fleet.namespace, "group": GROUP, "reason": reason}
        url = f"http://{self._address}:8080/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            all_series = parse_series(await response.text())
        return (
            sum(
                series.value
                for series in all_series
                if series.name == name and required_labels.items() <= series.labels.items()
            )
            > 0
        )

    async def _written(self, kind: str, reason: str) -> bool:
        """Whether the journal has such a record."""
        return any((record["kind"], record.get("reason")) == (kind, reason) for record in written_records(self._folder))


@pytest.fixture
def places(fleet: TemplateGroup, address: str, tmp_path: Path) -> Places:
    return Places(fleet, address, tmp_path / "operator")


async def addresses_by_name(fleet: TemplateGroup) -> dict[str, str]:
    """Return the address of each pod by name."""
    return {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in await fleet.pods()}


async def test_scale_up_rolling_update_and_scale_down_deliver_each_message_once(
    fleet: TemplateGroup,
) -> None:
    await fleet.wait_for_members(2)
    async with fleet.sending():
        await fleet.scale(3)
        await fleet.wait_for_members(3)
        previous_pods = {pod["metadata"]["name"] for pod in await fleet.pods()}
        restart = {"spec": {"template": {"metadata": {"annotations": {"restarted": "now"}}}}}
        await fleet.api.patch(fleet.path, restart)

        async def replaced() -> bool:
            return previous_pods.isdisjoint({pod["metadata"]["name"] for pod in await fleet.pods()})

        await fleet.soon(replaced)
        await fleet.wait_for_members(3)
        await fleet.scale(1)
        await fleet.wait_for_members(1)
    assert {number for number, times in fleet.deliveries().items() if times > 1} == set()


async def test_condition_of_failing_deliveries_lasts_while_the_app_answers_500_to_everything(
    fleet: TemplateGroup, places: Places, address: str
) -> None:
    """Such a group once was Ready and not Degraded, with a lag of 0 and without retries."""
    fleet.rules.write_text('[{"status": 500}]')
    await fleet.wait_for_members(2)
    queues = [queue for share in await fleet.shares() for queue in share]
    for queue in [*queues, *queues, *queues]:
        await fleet.send(queue)
    message = await places.tell_of_problem("DeliveriesFailing")
    assert re.fullmatch(r"100 % of \d+ deliveries in the last 5 min failed, the last with status 500", message)
    by_type = conditions(await fleet.api.get(fleet.path))
    assert (by_type["Ready"]["status"], by_type["Degraded"]["reason"]) == ("True", "DeliveriesFailing")

    async def estimated() -> bool:
        return ((await detail(fleet, address)).summary.delayed or 0) > 0

    await fleet.soon(estimated)

    async def named() -> list[str]:
        return [failure for member in (await detail(fleet, address)).members for failure in member.failing]

    assert re.fullmatch(
        rf"%RETRY%{GROUP}/\S+/0, offset \d+ \(sent to {GROUP}\): failed \d+ times, most recently with status 500",
        (await soon(named))[0],
    )
    fleet.rules.write_text("[]")
    async with fleet.sending():
        await places.no_problem("DeliveriesFailing")


async def detail(fleet: TemplateGroup, address: str) -> GroupDetail:
    """Return the group as the operator's API shows it."""
    url = f"http://{address}:8080/v1/groups/{fleet.namespace}/{GROUP}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return msgspec.json.decode(await response.read(), type=GroupDetail)


@pytest.mark.slow("a whole fleet of apps that pull grows and shrinks")
async def test_pull_delivers_each_message_once_across_scale_up_and_scale_down(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> None:
    template = a_template(local_node, tmp_path, pulls=True)
    async with a_template_group(
        api, namespace, rocketmq, local_node, tmp_path, template=template, delivery={"mode": "Pull"}
    ) as fleet:
        await fleet.wait_for_members(2)
        async with fleet.sending():
            await fleet.scale(3)
            await fleet.wait_for_members(3)

            async def all_apps_have_messages() -> bool:
                return len(fleet.deliveries_by_app()) == 3

            await fleet.soon(all_apps_have_messages)
            await fleet.scale(1)
            await fleet.wait_for_members(1)
        assert {*fleet.deliveries().values()} == {1}


@pytest.mark.slow("queues are added while a whole fleet has zero replicas")
async def test_start_from_latest_misses_nothing_in_queues_added_later(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> None:
    """Messages sent to a queue before its first owner belong to the group; without members they count as lag."""
    topic = "returns"
    async with a_template_group(
        api, namespace, rocketmq, local_node, tmp_path, topic=topic, startFrom={"position": "Latest"}
    ) as fleet:
        await fleet.wait_for_members(2)
        await add_queues(fleet, rocketmq, topic, QUEUES + 4)
        await fleet.soon(fleet.has_delivered_all)
        await fleet.soon(lambda: fleet.has_assigned(QUEUES + 4))
        await fleet.scale(0)
        await fleet.soon(has_no_pods(fleet))
        await add_queues(fleet, rocketmq, topic, QUEUES + 8)

        async def all_counted() -> bool:
            return bool((await api.get(fleet.path))["status"].get("lag") == QUEUES + 8)

        await fleet.soon(all_counted)
        await fleet.scale(1)
        await fleet.soon(fleet.has_delivered_all)
        assert {*fleet.deliveries().values()} == {1}


async def add_queues(fleet: TemplateGroup, rocketmq: RocketMQ, topic: str, queues: int) -> None:
    """Give a topic more queues, and send a message to each of its queues at once."""
    rocketmq.create_topic(topic, queues)
    [broker] = {queue.broker for queue in await fleet.brokers.queues(topic)}
    for number in range(queues):
        await fleet.send(Queue(topic, broker, number))


def has_no_pods(fleet: TemplateGroup) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return not await fleet.pods()

    return check


@pytest.mark.slow("a whole Broadcasting fleet grows")
async def test_broadcasting_delivers_each_message_once_to_each_member_during_scale_up(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> None:
    # A topic of its own: brokers keep no offsets of these members, so other groups would consume it again.
    async with a_template_group(
        api, namespace, rocketmq, local_node, tmp_path, topic="prices", messageModel="Broadcasting"
    ) as fleet:
        await fleet.wait_for_members(2)
        async with fleet.sending():
            await fleet.scale(3)
            await fleet.wait_for_members(3)
        all_messages = Counter(range(1, fleet.sent + 1))

        async def all_members_have_all_messages() -> bool:
            return [*fleet.deliveries_by_app().values()] == [all_messages] * 3

        await fleet.soon(all_members_have_all_messages)


@pytest.mark.slow("causes of rebalances of a whole fleet, by HTTP and in files")
async def test_status_event_metric_and_journal_name_the_cause_of_a_rebalance(
    fleet: TemplateGroup, places: Places, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> None:
    policy = f"{fleet.api_path}/rebalancepolicies/sticky"
    await fleet.api.patch(policy, {"spec": {"triggers": {"unreadyGrace": "1s"}}})
    await fleet.wait_for_members(2)
    async with fleet.sending():
        rocketmq.create_topic("refunds", 4)
        await fleet.api.patch(fleet.path, {"spec": {"subscriptions": [{"topic": GROUP}, {"topic": "refunds"}]}})
        await places.tell_of_cause("SubscriptionChanged")
        rocketmq.create_topic("refunds", 8)
        await places.tell_of_cause("QueuesAdded")
        rocketmq.create_topic("refunds", 2)
        await places.tell_of_cause("QueuesRemoved")
        hung, hung_address = min((await addresses_by_name(fleet)).items())
        (tmp_path / f"unready-{hung_address}").touch()  # its sidecar still reports, and releases its queues
        await places.tell_of_cause("MemberUnready")
        (tmp_path / f"unready-{hung_address}").unlink()
        await places.tell_of_cause("MemberJoined")
        assert {number for number, times in fleet.deliveries().items() if times > 1} == set()
        # A hung member is neither ready nor reachable; it is lost long before unreadyGrace ends.
        await fleet.api.patch(policy, {"spec": {"handover": {"lostAfter": "2s"}, "triggers": {"unreadyGrace": "2m"}}})
        local_node.signal(fleet.namespace, hung, signal.SIGSTOP)
        try:
            await places.tell_of_cause("MemberLost")
            await fleet.soon(lambda: fleet.has_event("QueuesForced"))
        finally:
            local_node.signal(fleet.namespace, hung, signal.SIGCONT)
        await fleet.wait_for_rebalance("MemberJoined")
        await fleet.wait_for_members(2)
    assert sum(times > 1 for times in fleet.deliveries().values()) <= REPEATED


async def test_restart_of_a_killed_member_gives_its_queues_to_others_and_back(
    fleet: TemplateGroup, places: Places, local_node: LocalNode
) -> None:
    await fleet.wait_for_members(2)
    victim, survivor = sorted(await addresses_by_name(fleet))

    async def owns(name: str, incarnation: int, least: int = 1) -> bool:
        """Whether the assignment gives at least this number of queues to this process of the pod."""
        share = (await fleet.document())["members"][name]
        own = [queue for queue in from_ranges(share["queues"]) if queue.topic == GROUP]
        return share.get("incarnation") == incarnation and len(own) >= least

    await fleet.soon(partial(owns, victim, 1))
    async with fleet.sending():
        local_node.signal(fleet.namespace, victim, signal.SIGKILL)
        await fleet.soon(partial(owns, victim, 2))
        await fleet.wait_for_members(2)
        # The second time the kubelet backs off before it starts the container again.
        local_node.signal(fleet.namespace, victim, signal.SIGKILL)
        await fleet.soon(partial(owns, survivor, 1, QUEUES))
        await places.tell_of_cause("MemberRestarted")
        await fleet.soon(partial(owns, victim, 3))
        await fleet.wait_for_members(2)
    assert sum(times > 1 for times in fleet.deliveries().values()) <= 2 * REPEATED


@pytest.mark.slow("a broker disables consumption of a whole fleet, and then rejects its filter")
async def test_condition_of_a_request_that_a_real_broker_rejects_lasts_until_it_accepts(
    fleet: TemplateGroup, places: Places, rocketmq: RocketMQ
) -> None:
    [broker] = rocketmq.brokers
    subscriptions = (await fleet.api.get(fleet.path))["spec"]["subscriptions"]
    await fleet.wait_for_members(2)
    await fleet.brokers.update_group(GROUP, broker.name, consumeEnable=False)
    assert f"disabled for the group at {broker.name}" in await places.tell_of_problem("ConsumptionDisabled")
    await fleet.brokers.update_group(GROUP, broker.name, consumeEnable=True)
    await places.no_problem("ConsumptionDisabled")
    # SQL92 is disabled in a broker's default settings.
    by_property = [queue | {"type": "SQL92", "expression": "amount > 5"} for queue in subscriptions]
    await fleet.api.patch(fleet.path, {"spec": {"subscriptions": by_property}})
    assert "SQL92" in await places.tell_of_problem("BrokerRefuses")
    await fleet.api.patch(fleet.path, {"spec": {"subscriptions": subscriptions}})
    await places.no_problem("BrokerRefuses")
    await fleet.wait_for_members(2)


@pytest.mark.slow("two Java consumers of one client id in the group of a whole fleet")
async def test_condition_duplicate_client_ids_lasts_until_one_java_consumer_leaves(
    fleet: TemplateGroup, places: Places, rocketmq: RocketMQ
) -> None:
    await fleet.wait_for_members(2)
    first, second = (peers.push_consumer(rocketmq, GROUP, GROUP, instance="twin") for _ in range(2))
    try:
        assert "@twin, so" in await places.tell_of_problem("DuplicateClientIds")
        # Each Java consumer counts four consumers, so it leaves only two queues to each of our members.
        await fleet.soon(lambda: fleet.has_assigned(4))
        first.stop()
        await places.no_problem("DuplicateClientIds")
        await places.tell_of_problem("UnmanagedConsumers")  # the other Java consumer still runs
    finally:
        first.stop()
        second.stop()
    await places.no_problem("UnmanagedConsumers")
    await fleet.wait_for_members(2)


@pytest.mark.slow("a Java consumer with another filter in the group of a whole fleet")
async def test_unmanaged_consumer_with_another_filter_is_a_condition_until_it_leaves(
    fleet: TemplateGroup, places: Places, address: str, rocketmq: RocketMQ
) -> None:
    await fleet.wait_for_members(2)
    java = peers.push_consumer(rocketmq, GROUP, GROUP, instance="odd", expression="paid")
    try:
        sentence = await places.tell_of_problem("SubscriptionMismatch")
        assert sentence.endswith(f"@odd: its filter of {GROUP} is paid")
        url = f"http://{address}:8080/v1/groups/{fleet.namespace}/{GROUP}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            members = (await response.json())["members"]
        shown = {(member["subscriptions"][0]["expression"], member["model"], member["start"]) for member in members}
        assert shown == {("*", "Clustering", "Earliest"), ("paid", "Clustering", "Earliest")}
    finally:
        java.stop()
    await places.no_problem("SubscriptionMismatch")
    await fleet.wait_for_members(2)


class TestWithoutPeriodicPolls:
    """An operator that does not poll the brokers' consumers periodically, only after notifications from members."""

    @pytest.fixture
    async def operator(
        self, control_plane: Cluster, namespace: str, address: str, tmp_path: Path
    ) -> AsyncIterator[None]:
        log = tmp_path / "operator.log"
        async with an_operator(
            control_plane.kubeconfig, namespace, address, log, program=("-c", WITHOUT_PERIODIC_POLLS)
        ):
            yield

    async def test_unmanaged_consumer_is_noticed_by_a_broker_notification_when_it_joins_and_leaves(
        self, fleet: TemplateGroup, places: Places, rocketmq: RocketMQ
    ) -> None:
        await fleet.wait_for_members(2)
        java = peers.push_consumer(rocketmq, GROUP, GROUP, instance="java")
        try:
            assert "@java" in await places.tell_of_problem("UnmanagedConsumers")
        finally:
            java.stop()
        await places.no_problem("UnmanagedConsumers")
        await fleet.wait_for_members(2)


@pytest.mark.slow("one of two brokers dies and returns under a whole fleet")
class TestWithTwoBrokers:
    """A topic on two brokers, one of which dies."""

    @pytest.fixture
    def rocketmq(self) -> Iterator[RocketMQ]:
        with temporary("pair") as instance:
            cluster = RocketMQ(instance, brokers=2)
            cluster.up()
            yield cluster
            cluster.down()

    async def test_broker_failure_removes_queues_of_the_broker_until_it_is_back(
        self, rocketmq: RocketMQ, fleet: TemplateGroup, places: Places
    ) -> None:
        await fleet.wait_for_members(2)
        all_queues = await fleet.brokers.queues(GROUP)
        kept_queues, lost_queues = (
            [queue for queue in all_queues if queue.broker == broker.name] for broker in rocketmq.brokers
        )
        assert len(kept_queues) == len(lost_queues) == QUEUES
        await fleet.set_policy("circle", "AveragelyByCircle")

        async def each_member_has_both_brokers() -> bool:
            """Otherwise a member that reaches no broker of its queues is unready before they are removed."""
            return all(
                {queue.broker for queue in share} == {queue.broker for queue in all_queues}
                for share in await fleet.shares()
            )

        await fleet.soon(each_member_has_both_brokers)
        await fleet.wait_for_members(2)
        for queue in [*kept_queues, *lost_queues]:
            await fleet.send(queue)
        rocketmq.kill_broker(1)
        await places.tell_of_cause("QueuesRemoved")
        await fleet.wait_for_members(2)
        assert await fleet.has_assigned(QUEUES)
        numbers = {await fleet.send(queue) for queue in kept_queues}
        await fleet.soon(lambda: all_came(fleet, numbers))
        await asyncio.to_thread(rocketmq.start_broker, 1)
        await places.tell_of_cause("QueuesAdded")
        for queue in lost_queues:
            await fleet.send(queue)
        await fleet.soon(fleet.has_delivered_all)
        await fleet.wait_for_members(2)
        assert await fleet.has_assigned(2 * QUEUES)
        assert sum(times > 1 for times in fleet.deliveries().values()) <= REPEATED


async def all_came(fleet: TemplateGroup, numbers: set[int]) -> bool:
    return fleet.deliveries().keys() >= numbers


@pytest.mark.slow("one member of a whole fleet is cut off from the broker")
class TestBehindARelay:
    """A broker behind a relay that can cut off one client."""

    @pytest.fixture
    def apart(self) -> Iterator[Instance]:
        with temporary("relay") as instance:
            yield instance

    @pytest.fixture
    def rocketmq(self, apart: Instance) -> Iterator[RocketMQ]:
        """Start a broker that listens at another address than it announces; the name server is reached directly."""
        cluster = RocketMQ(apart, settings={"bindAddress": apart.address(2)})
        cluster.up()
        yield cluster
        cluster.down()

    @pytest.fixture
    def relay(self, apart: Instance, rocketmq: RocketMQ) -> Iterator[Relay]:
        (broker,) = rocketmq.brokers
        with Relay((broker.address, broker.port), (apart.address(2), broker.port)).running() as running:
            yield running

    async def test_broker_unreachable_from_one_member_moves_its_queues_until_reconnected(
        self, relay: Relay, fleet: TemplateGroup, places: Places, local_node: LocalNode
    ) -> None:
        await fleet.wait_for_members(2)
        async with fleet.sending():
            lonely = min(await addresses_by_name(fleet))
            with relay.cut(f"{local_node.folder}/pods/{fleet.namespace}_{lonely}/"):
                await places.tell_of_cause("BrokerUnreachable")
                sent = fleet.sent
                await fleet.soon(lambda: all_came(fleet, {*range(1, sent + 101)}))
            await places.tell_of_cause("MemberJoined")
            await fleet.wait_for_members(2)
