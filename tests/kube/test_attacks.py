"""Attacks on an operator that runs with the chart's own rights, together with a real broker and real members.

The attacker may edit ConsumerGroups, Secrets and ConfigMaps in one namespace, and run a pod there.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from brokers.scripted import Names, Server, a_broker, a_server
from chart.charts import Release, as_its_account, log_of, started
from ground.api import Api, ApiError, Object
from ground.cluster import Cluster
from ground.fixtures import a_namespace
from ground.instance import Instance
from ground.local import LocalNode
from ground.memory_limit import peak_bytes
from ground.ours import BUSY, CRDS, conditions, made
from ground.poll import soon
from ground.rocketmq import RocketMQ
from http_attacks import ATTACKS as HTTP_ATTACKS
from http_attacks import MEBIBYTE, attacked, probed, status_of
from kube.members import a_pod, running_status
from kube.template_group import TemplateGroup, a_template_group
from logins import unverified
from rota.kube.client.objects import CONTROL_PORT, GROUP_LABEL
from rota.kube.client.objects import REPORT_PORT as PORT
from rota.kube.http.operator_probes import PORT as OPERATOR_PORT
from rota.kube.state.pod_state import MAX_MEMBERS

pytestmark = [pytest.mark.usefixtures("crds", "operator"), pytest.mark.timeout(600)]

StartedLater = Callable[[], AbstractAsyncContextManager[asyncio.subprocess.Process]]

VICTIMS_SECRET = "rmq-admin"
ACCESS_KEY = "the-victims-access-key"
GROUP = "attack"
MEMORY_LIMIT_BYTES = 512 * MEBIBYTE  # the limit of the operator in the chart
PROBES = 12  # the probes that must succeed during an attack
ATTACK_LIMIT_BYTES = 96 * MEBIBYTE  # how much memory an attack may add to the operator
TLS_ATTACK_LIMIT_BYTES = 176 * MEBIBYTE  # 40 to 135 MiB were measured, 224 without a limit of handshakes
ENOUGH_REQUESTS = 8  # after this number of requests the operator has acted upon the response


@pytest.fixture
async def attackers(api: Api) -> AsyncIterator[str]:
    """Create a namespace in which the attacker may edit."""
    async with a_namespace(api) as name:
        yield name


def operator_address(instance: Instance) -> str:
    """Return the address of the operator's pod."""
    return f"{instance.block}.90.9"


OPEN: Object = {"brokerNetworks": [], "page": {"auth": "None"}}  # values of the chart


@pytest.fixture
async def operator(
    request: pytest.FixtureRequest, control_plane: Cluster, instance: Instance, release: Release, tmp_path: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the operator as the chart does, with the rights of its ServiceAccount, for all namespaces.

    Test brokers have loopback addresses, so the chart's limit of broker addresses is off unless a test sets it. So is
    the login of the page's users, which keeps most attackers out.
    """
    values = getattr(request, "param", OPEN)
    release.install()
    fields = {
        "metadata.namespace": release.namespace,
        "metadata.name": "rota-0",
        "metadata.uid": "uid-of-the-operator",
        "status.podIP": operator_address(instance),
    }
    kubeconfig = as_its_account(control_plane, release, tmp_path / "kubeconfig")
    async with started(release.template(**values), kubeconfig, fields) as process:
        yield process


def second_address(instance: Instance) -> str:
    """Return the address of the second operator's pod."""
    return f"{instance.block}.90.10"


@pytest.fixture
def second_operator(control_plane: Cluster, instance: Instance, release: Release, tmp_path: Path) -> StartedLater:
    """Return a factory of another operator of the same release."""
    fields = {
        "metadata.namespace": release.namespace,
        "metadata.name": "rota-1",
        "metadata.uid": "uid-of-the-second",
        "status.podIP": second_address(instance),
    }

    @asynccontextmanager
    async def start() -> AsyncIterator[asyncio.subprocess.Process]:
        kubeconfig = as_its_account(control_plane, release, tmp_path / "kubeconfig-of-the-second")
        async with started(release.template(**OPEN), kubeconfig, fields) as process:
            yield process

    return start


@pytest.fixture
async def fleet(
    api: Api, namespace: str, rocketmq: RocketMQ, local_node: LocalNode, tmp_path: Path
) -> AsyncIterator[TemplateGroup]:
    """Run the victim's group: two pods with real sidecars at a real broker."""
    async with a_template_group(api, namespace, rocketmq, local_node, tmp_path) as fleet:
        await fleet.wait_for_members(2)
        yield fleet


@pytest.fixture
async def name_server() -> AsyncIterator[Server]:
    """Start the attacker's name server, which records requests and closes the connection."""
    async with a_server(lambda _: None) as server:
        yield server


async def is_ready(address: str) -> bool:
    """Whether the operator at an address is ready; False before it listens."""
    with suppress(OSError):
        return await status_of(address, OPERATOR_PORT, "/readyz") == 200
    return False


@asynccontextmanager
async def definitions_of_an_earlier_version(api: Api) -> AsyncIterator[None]:
    """Let the API server accept any Secret name in this block: objects that an earlier CRD accepted stay stored."""
    definition = yaml.safe_load((CRDS / "rota.dev_consumergroups.yaml").read_text())
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
    try:
        await api.patch(path, without_patterns(definition), "apply")
        yield
    finally:
        await api.patch(path, definition, "apply")


def without_patterns(schema: Object) -> Object:
    """Return a copy of a definition without patterns."""
    if isinstance(schema, dict):
        return {key: without_patterns(value) for key, value in schema.items() if key != "pattern"}
    return [without_patterns(value) for value in schema] if isinstance(schema, list) else schema


def a_group(name: str, name_server: str, secret: str) -> Object:
    """Return the attacker's group, with a Secret's name of the attacker's choice."""
    broker = {"nameServers": [name_server], "credentialsSecret": {"name": secret}}
    return made("ConsumerGroup", name, broker={"rocketmq": broker}, subscriptions=[{"topic": "orders"}])


async def is_accepted(api: Api, path: str, body: Object) -> bool:
    """Create an object; return False until the API server applies the schema that accepts it."""
    try:
        await api.create(path, body)
    except ApiError as error:
        if error.status not in {*BUSY, 422}:
            raise
        return False
    return True


async def test_credentials_secret_name_cannot_reach_a_secret_of_another_namespace(
    api: Api, namespace: str, attackers: str, name_server: Server
) -> None:
    keys = {"accessKey": ACCESS_KEY, "secretKey": "the-victims-secret-key"}
    await api.create(
        f"/api/v1/namespaces/{namespace}/secrets", {"metadata": {"name": VICTIMS_SECRET}, "stringData": keys}
    )
    target = f"{namespace}/secrets/{VICTIMS_SECRET}"
    names = [
        f"../../{target}",
        f"%2e%2e/%2e%2e/{target}",
        f"..%2f..%2f{target.replace('/', '%2f')}",
        f"own/../../../{target}",
        f".//../..//{target}",
        f"../../{target}?limit=1",
        f"../../{target}#own",
    ]
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{attackers}/consumergroups"
    for name in names:
        with pytest.raises(ApiError, match=r"credentialsSecret\.name"):
            await api.create(groups, a_group(GROUP, name_server.address, name))

    async with definitions_of_an_earlier_version(api):
        for number, name in enumerate(names):
            body = a_group(f"{GROUP}-{number}", name_server.address, name)
            await soon(partial(is_accepted, api, groups, body))

    async def all_are_rejected() -> list[str]:
        try:
            invalid = [conditions(group).get("InvalidSpec", {}) for group in await api.list(groups)]
        except ApiError as error:
            if error.status not in BUSY:
                raise
            return []
        return [condition["message"] for condition in invalid] if len(invalid) == len(names) and all(invalid) else []

    for message in await soon(all_are_rejected, 60):
        assert message.startswith("spec.broker.rocketmq.credentialsSecret.name is not the name of a Kubernetes object")
    assert ACCESS_KEY not in json.dumps([frame.fields for frame in name_server.frames])
    assert name_server.connections == 0


async def test_credentials_condition_does_not_reveal_whether_an_unreadable_secret_exists(
    api: Api, control_plane: Cluster, attackers: str, release: Release, name_server: Server
) -> None:
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{attackers}/consumergroups"

    async def message_of(name: str) -> str:
        """Create a group, and return the message of its condition MissingSecret."""
        await api.create(groups, a_group(name, name_server.address, "hidden"))

        async def message() -> str:
            by_type = conditions(await api.get(f"{groups}/{name}"))
            return str(by_type.get("MissingSecret", {}).get("message", ""))

        return await soon(message)

    missing = await message_of("missing")
    control_plane.kubectl("delete", "clusterrolebinding", release.name)
    control_plane.kubectl(
        *("create", "clusterrole", f"{release.name}-blind", "--verb=get,list,watch,patch,create,update"),
        "--resource=consumergroups.rota.dev,consumergroups.rota.dev/status,rebalancepolicies.rota.dev,pods,configmaps,"
        "events,deployments.apps",
    )
    control_plane.kubectl(
        *("create", "clusterrolebinding", f"{release.name}-blind", f"--clusterrole={release.name}-blind"),
        f"--serviceaccount={release.namespace}:{release.name}",
    )
    try:
        secret = {"metadata": {"name": "hidden"}, "stringData": {"accessKey": "a", "secretKey": "b"}}
        await api.create(f"/api/v1/namespaces/{attackers}/secrets", secret)
        assert await message_of("unreadable") == missing
    finally:
        for kind in ("clusterrolebinding", "clusterrole"):
            control_plane.kubectl("delete", kind, f"{release.name}-blind")


class Attacker:
    """A pod with a group's label that redirects every request to the victim's drain."""

    def __init__(self, victim: str) -> None:
        self.requests = 0
        self._location = f"http://{victim}:{CONTROL_PORT}/v1/drain"

    async def redirect(self, request: web.Request) -> web.Response:
        """Respond with a redirect that keeps the method of a POST."""
        self.requests += 1
        return web.Response(status=307 if request.method == "POST" else 302, headers={"Location": self._location})


@asynccontextmanager
async def a_redirecting_pod(api: Api, namespace: str, name: str, address: str, victim: str) -> AsyncIterator[Attacker]:
    """Run a pod of the attacker's group that redirects every request."""
    attacker = Attacker(victim)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", attacker.redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address, PORT).start()
    pods = f"/api/v1/namespaces/{namespace}/pods"
    created = await api.create(pods, a_pod(name, GROUP, signs=False))
    await api.patch(f"{pods}/{name}/status", {"status": running_status(address, ready=True)}, "strategic")
    try:
        yield attacker
    finally:
        uid = created["metadata"]["uid"]
        await api.delete(f"{pods}/{name}", {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
        await runner.cleanup()


@asynccontextmanager
async def watched_reports(address: str) -> AsyncIterator[list[Object]]:
    """Collect the reports of a member while the block runs."""
    reports: list[Object] = []

    async def collect() -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"http://{address}:{PORT}/v1/report") as response:
                    reports.append(await response.json())
                await asyncio.sleep(0.02)

    async def has_report() -> bool:
        return bool(reports)

    collecting = asyncio.create_task(collect())
    await soon(has_report)
    try:
        yield reports
        assert not collecting.done(), "the member's reports were not read to the end"
    finally:
        collecting.cancel()


@pytest.mark.usefixtures("node")
async def test_http_client_redirect_by_a_pod_drains_no_member_of_another_group(
    api: Api, attackers: str, fleet: TemplateGroup, rocketmq: RocketMQ, addresses: Callable[[], str]
) -> None:
    victim = (await fleet.pods())[0]["status"]["podIP"]
    broker = {"rocketmq": {"nameServers": [rocketmq.name_server]}}
    group = made("ConsumerGroup", GROUP, broker=broker, subscriptions=[{"topic": "shipping"}])
    await api.create(f"/apis/rota.dev/v1alpha1/namespaces/{attackers}/consumergroups", group)
    async with (
        watched_reports(victim) as reports,
        a_redirecting_pod(api, attackers, "orders-a", addresses(), victim) as attacker,
    ):

        async def has_enough_requests() -> bool:
            return attacker.requests >= ENOUGH_REQUESTS

        await soon(has_enough_requests)
    assert {report["state"] for report in reports} == {"serving"}
    assert len({json.dumps(report["held"], sort_keys=True) for report in reports}) == 1


PROBED = [(8081, "/healthz"), (8081, "/readyz"), (OPERATOR_PORT, "/metrics"), (OPERATOR_PORT, "/v1/events")]


# The sidecar has the same HTTP server, and meets each attack on every push.
NIGHTLY_ATTACKS = pytest.mark.slow("compressed bodies and endless headers, sent to the operator")
ON_EVERY_PUSH = {"slow bodies, long polls and event streams", "responses that are not read"}


@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=[] if name in ON_EVERY_PUSH else NIGHTLY_ATTACKS) for name in HTTP_ATTACKS]
)
async def test_http_server_of_the_operator_under_attack_fails_no_probe_and_takes_little_memory(
    operator: asyncio.subprocess.Process, instance: Instance, attack: str
) -> None:
    address = operator_address(instance)
    await soon(partial(is_ready, address))
    bytes_before = peak_bytes(operator.pid)
    async with attacked(address, OPERATOR_PORT, attack):
        for number in range(PROBES):
            port, path = PROBED[number % len(PROBED)]
            assert await probed(address, port, path) == 200
            await asyncio.sleep(0.1)
    assert operator.returncode is None
    added = peak_bytes(operator.pid) - bytes_before
    print(f"{attack}: {added / MEBIBYTE:.0f} MiB added")
    assert added < ATTACK_LIMIT_BYTES


@pytest.mark.parametrize("operator", [{}], indirect=True, ids=["the chart's values"])
async def test_tls_server_of_the_operator_under_attack_fails_no_probe_and_takes_little_memory(
    operator: asyncio.subprocess.Process, instance: Instance
) -> None:
    """Clients that finish no handshake, and clients without a login."""
    address = operator_address(instance)

    async def status(path: str) -> int:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=unverified())) as session,
            session.get(f"https://{address}:{OPERATOR_PORT}{path}") as response,
        ):
            return response.status

    async def is_serving() -> bool:
        with suppress(aiohttp.ClientError):
            return await status("/readyz") == 200
        return False

    await soon(is_serving)
    bytes_before = peak_bytes(operator.pid)
    async with attacked(address, OPERATOR_PORT, "slow bodies, long polls and event streams"):
        for number in range(PROBES):
            assert await probed(address, *PROBED[number % 2]) == 200
        await soon(is_serving)
        assert await status("/v1/groups") == 401
    added = peak_bytes(operator.pid) - bytes_before
    print(f"{added / MEBIBYTE:.0f} MiB added")
    assert added < TLS_ATTACK_LIMIT_BYTES


MANY_TOPICS = [f"topic-{number}" for number in range(20)]
QUOTA_LIMIT_BYTES = 16 * MEBIBYTE  # how much memory a group over the quota may add to the operator, with all queries


async def test_queue_quota_keeps_a_hostile_name_server_from_exhausting_the_operator(
    operator: asyncio.subprocess.Process, api: Api, attackers: str
) -> None:
    """Twenty topics with 262,144 queues each once took 2 GB, and again after each restart."""
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{attackers}/consumergroups"

    async def message(name: str, kind: str) -> str:
        by_type = conditions(await api.get(f"{groups}/{name}"))
        return str(by_type.get(kind, {}).get("message", ""))

    async with a_server(a_broker) as broker:
        names = Names({"broker-0": {0: broker.address}}, {topic: {"broker-0": 2**18} for topic in MANY_TOPICS})
        names.topics["small"] = {"broker-0": 4}
        async with a_server(names) as name_server:
            rocketmq = {"rocketmq": {"nameServers": [name_server.address]}}
            # The first group costs memory of its own, such as loaded modules; that is no part of the attack.
            small = made("ConsumerGroup", "small", broker=rocketmq, subscriptions=[{"topic": "small"}])
            await api.create(groups, small)
            await soon(partial(message, "small", "Ready"))
            bytes_before = peak_bytes(operator.pid)
            topics = [{"topic": topic} for topic in MANY_TOPICS]
            await api.create(groups, made("ConsumerGroup", GROUP, broker=rocketmq, subscriptions=topics))
            sentence = await soon(partial(message, GROUP, "TooManyQueues"))
            assert "The topics have 5,242,880 queues; a group may have 131,072" in sentence
            added = peak_bytes(operator.pid) - bytes_before
            print(f"{added / MEBIBYTE:.1f} MiB added")
            assert added < QUOTA_LIMIT_BYTES


async def create_nested(api: Api, path: str, body: Object, levels: int) -> None:
    """Create an object in which the value "nested" is replaced by this number of levels of objects."""
    text = json.dumps(body).replace('"nested"', '{"a":' * levels + "1" + "}" * levels)
    await api.create_from_text(path, text)


async def test_watch_of_one_hostile_object_does_not_stop_the_operator(
    operator: asyncio.subprocess.Process, api: Api, attackers: str, instance: Instance, tmp_path: Path
) -> None:
    """Unreadable objects, and objects longer than a line of a watch, once ended the operator for all groups."""
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{attackers}"
    core = f"/api/v1/namespaces/{attackers}"
    broker = {"rocketmq": {"nameServers": ["127.0.0.1:1"]}}
    spec = {"broker": broker, "subscriptions": [{"topic": "orders"}]}

    async def has_conditions(name: str) -> bool:
        return "Ready" in conditions(await api.get(f"{groups}/consumergroups/{name}"))

    for levels in (900, 9000):
        template = {"spec": {"containers": [{"name": "app", "image": "x"}], "x": "nested"}}
        nested = made("ConsumerGroup", f"nested-{levels}", **spec, replicas=0, template=template)
        await create_nested(api, f"{groups}/consumergroups", nested, levels)
        policy = made(
            "RebalancePolicy",
            f"nested-{levels}",
            strategy="Custom",
            options={"custom": {"name": "x", "options": {"x": "nested"}}},
        )
        await create_nested(api, f"{groups}/rebalancepolicies", policy, levels)
    pod = a_pod("large", GROUP)
    pod["spec"]["containers"][0]["env"] = [{"name": "LARGE", "value": "<" * 1_450_000}]
    await api.create_from_text(f"{core}/pods", json.dumps(pod))
    await api.patch(f"{core}/pods/large", {"metadata": {"annotations": {"changed": "again"}}})
    for name in ("one", "two"):
        await api.create(f"{groups}/consumergroups", made("ConsumerGroup", name, **spec))
        await soon(partial(has_conditions, name))
    for levels in (900, 9000):  # the next client that lists them may fail at them, too
        await api.delete(f"{groups}/consumergroups/nested-{levels}")
        await api.delete(f"{groups}/rebalancepolicies/nested-{levels}")
    assert operator.returncode is None
    assert await status_of(operator_address(instance), OPERATOR_PORT, "/readyz") == 200
    operator.terminate()
    await operator.wait()
    assert "nested too deeply for kopf" in log_of(tmp_path / "kubeconfig").read_text()


LARGE_OBJECTS = 20  # number of objects of each kind
# How much objects of 65 MiB may add to an operator: watches took 26 to 30 MiB, lists at the start 60 to 83.
LARGE_OBJECTS_LIMIT_BYTES = 96 * MEBIBYTE


async def create_large_objects(api: Api, namespace: str) -> None:
    """Fill a namespace with objects as large as the API server allows."""
    core, apps = (f"{base}/namespaces/{namespace}" for base in ("/api/v1", "/apis/apps/v1"))
    for number in range(LARGE_OBJECTS):
        labels = {GROUP_LABEL: f"large-{number}"}
        metadata = {"name": f"large-{number}-rota", "labels": labels}
        configmap = {"metadata": metadata, "data": {"assignment.json": "a" * 1_000_000}}
        await api.create_from_text(f"{core}/configmaps", json.dumps(configmap))
        pod = a_pod(f"large-{number}", f"large-{number}")
        pod["metadata"]["annotations"] = {"large": "a" * 240_000}
        pod["spec"]["containers"][0]["env"] = [{"name": "LARGE", "value": "a" * 1_000_000}]
        await api.create_from_text(f"{core}/pods", json.dumps(pod))
        template = {"metadata": {"labels": labels}, "spec": pod["spec"]}
        spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
        metadata = {"name": f"large-{number}", "labels": labels}
        await api.create_from_text(f"{apps}/deployments", json.dumps({"metadata": metadata, "spec": spec}))


@pytest.mark.slow("large objects of one tenant, in two operators' memory")
async def test_memory_of_the_operator_is_not_exhausted_by_large_objects_of_a_tenant(
    operator: asyncio.subprocess.Process, second_operator: StartedLater, api: Api, attackers: str, instance: Instance
) -> None:
    """ConfigMaps, pods and Deployments were once cached whole, and listed in responses of 500 MiB."""
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{attackers}/consumergroups"
    broker = {"rocketmq": {"nameServers": ["127.0.0.1:1"]}}

    async def has_conditions() -> bool:
        return "Ready" in conditions(await api.get(f"{groups}/{GROUP}"))

    async def started_bytes() -> int:
        """Return the peak memory of another operator after it has listed everything."""
        async with second_operator() as second:
            await soon(partial(is_ready, second_address(instance)))
            return peak_bytes(second.pid)

    await soon(partial(is_ready, operator_address(instance)))
    bytes_before = peak_bytes(operator.pid)
    before_at_start = await started_bytes()
    await create_large_objects(api, attackers)
    await api.create(groups, made("ConsumerGroup", GROUP, broker=broker, subscriptions=[{"topic": "orders"}]))
    await soon(has_conditions)
    added = [peak_bytes(operator.pid) - bytes_before, await started_bytes() - before_at_start]
    print(f"{', '.join(f'{size / MEBIBYTE:.0f}' for size in added)} MiB added: in watches, and by lists at the start")
    assert operator.returncode is None
    assert max(added) < LARGE_OBJECTS_LIMIT_BYTES


@pytest.mark.slow("the command line while a group with thousands of nested levels exists")
async def test_cli_answers_while_a_group_is_nested_in_thousands_of_levels(
    api: Api, attackers: str, instance: Instance
) -> None:
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{attackers}/consumergroups"
    broker = {"rocketmq": {"nameServers": ["127.0.0.1:1"]}}
    template = {"spec": {"containers": [{"name": "app", "image": "x"}], "x": "nested"}}
    subscriptions = [{"topic": "orders"}]
    nested = made("ConsumerGroup", GROUP, broker=broker, subscriptions=subscriptions, replicas=0, template=template)
    await create_nested(api, groups, nested, 9900)
    address = f"http://{operator_address(instance)}:{OPERATOR_PORT}"

    async def rota(*arguments: str) -> tuple[int, str, str]:
        argv = [sys.executable, "-m", "rota.cli", *arguments, "--operator", address]
        process = await asyncio.create_subprocess_exec(*argv, stdout=PIPE, stderr=PIPE)
        output, error = await process.communicate()
        return process.returncode or 0, output.decode(), error.decode()

    async def has_succeeded(command: str) -> bool:
        """Whether a command succeeds; right after the group is created, the operator restarts without kopf."""
        code, output, error = await rota(command, f"{attackers}/{GROUP}")
        assert code in {0, 2}, error
        return code == 0 and bool(output)

    try:
        for command in ("status", "members", "lag", "explain"):
            await soon(partial(has_succeeded, command))
        assert f"{attackers}/{GROUP}" in (await rota("status", "-A"))[1]
    finally:  # no Python client can list it
        await api.delete(f"{groups}/{GROUP}")


async def for_each(work: Callable[[int], Coroutine[Any, Any, None]], numbers: range) -> None:
    """Run `work` for all numbers concurrently; if one call fails, cancel the others."""
    async with asyncio.TaskGroup() as tasks:
        for number in numbers:
            tasks.create_task(work(number))


@pytest.mark.slow("more pods than the limit of a group's members")
async def test_membership_above_the_limit_stops_the_assignment_and_costs_the_operator_little_memory(
    operator: asyncio.subprocess.Process, api: Api, attackers: str, rocketmq: RocketMQ
) -> None:
    groups, pods = (f"{base}/namespaces/{attackers}" for base in ("/apis/rota.dev/v1alpha1", "/api/v1"))
    path = f"{groups}/consumergroups"
    limit = asyncio.Semaphore(16)

    async def create(number: int) -> None:
        pod = a_pod(f"{GROUP}-{number}", GROUP)
        del pod["spec"]["nodeName"]  # pods of a node that does not exist are deleted by Kubernetes
        pod["spec"]["schedulerName"] = "nobody"  # they are not scheduled to the node of other tests' pods
        async with limit:
            await api.create(f"{pods}/pods", pod)

    async def delete(number: int) -> None:
        async with limit:
            await api.delete(f"{pods}/pods/{GROUP}-{number}")

    async def none_is_left() -> bool:
        with suppress(TimeoutError):  # of one request on a busy machine
            await api.delete(f"{pods}/pods", limit="100", gracePeriodSeconds="0")
        return not await api.list(f"{pods}/pods", limit="1")

    async def problem() -> str:
        by_type = conditions(await api.get(f"{path}/{GROUP}"))
        return str(by_type.get("Degraded", {}).get("reason", ""))

    async def has_problem(reason: str) -> bool:
        return await problem() == reason

    rocketmq.create_topic(GROUP, 4)
    broker = {"rocketmq": {"nameServers": [rocketmq.name_server]}}
    await api.create(path, made("ConsumerGroup", GROUP, broker=broker, subscriptions=[{"topic": GROUP}]))
    await soon(partial(has_problem, "Settled"))
    try:
        await for_each(create, range(MAX_MEMBERS))
        bytes_before = peak_bytes(operator.pid)
        await for_each(create, range(MAX_MEMBERS, MAX_MEMBERS + 200))
        await soon(partial(has_problem, "TooManyMembers"))
        added = peak_bytes(operator.pid) - bytes_before
        print(f"{bytes_before / MEBIBYTE:.0f} MiB with {MAX_MEMBERS:,} pods; {added / MEBIBYTE:.1f} MiB added")
        assert peak_bytes(operator.pid) < MEMORY_LIMIT_BYTES
        await for_each(delete, range(200))
        await soon(partial(has_problem, "NoMembers"))
    finally:
        await soon(none_is_left, seconds=1800)


@pytest.mark.parametrize("operator", [{}], indirect=True, ids=["the chart's values"])
async def test_name_server_at_an_inner_address_is_not_connected_to_and_gets_the_same_message_as_one_that_does_not_exist(
    api: Api, attackers: str, name_server: Server
) -> None:
    groups = f"/apis/rota.dev/v1alpha1/namespaces/{attackers}/consumergroups"

    async def message(name: str, address: str) -> str:
        """Create a group, and return the condition's message about the name server."""
        rocketmq = {"rocketmq": {"nameServers": [address]}}
        subscriptions = [{"topic": "orders"}]
        await api.create(groups, made("ConsumerGroup", name, broker=rocketmq, subscriptions=subscriptions))

        async def broker_message() -> str:
            by_type = conditions(await api.get(f"{groups}/{name}"))
            return str(by_type.get("BrokerUnreachable", {}).get("message", ""))

        return await soon(broker_message)

    host, _, port = name_server.address.partition(":")
    closed = "127.0.0.1:1"
    messages = {
        address: await message(f"{GROUP}-{n}", address) for n, address in enumerate([name_server.address, closed])
    }
    assert messages == {address: f"No name server responds: {address} does not respond" for address in messages}
    assert (host, name_server.connections) == ("127.0.0.1", 0), port
