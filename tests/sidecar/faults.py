"""Faults that are injected into a fleet under load; after each, all remaining pods run again."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

from ground.poll import soon
from rota.brokers.errors import BrokerError
from rota.model import Queue
from sidecar.fleet import SidecarFleet

Fault = Callable[[SidecarFleet, Random], Awaitable[None]]

STOPPED_SECONDS = 10.0  # longer than the broker keeps a lock
MISBEHAVIOUR_RULES: tuple[dict[str, Any], ...] = (
    {"status": 500, "attempts": [1, 2]},
    {"status": 404},
    {"act": "hang", "attempts": [1]},
    {"seconds": 0.5},
)


def is_orderly(fleet: SidecarFleet) -> bool:
    return fleet.settings.get("ordering") == "Orderly"


def random_queues(fleet: SidecarFleet, random: Random, name: str) -> list[Queue]:
    """Choose a random number of the queues that a member owns."""
    queues = sorted(fleet.queues_of(name))
    return random.sample(queues, random.randint(0, len(queues)))


def running_pods(fleet: SidecarFleet) -> list[str]:
    """Return the names of the pods that have not ended."""
    return sorted(fleet.pods.keys() - fleet.ended)


def random_other_pod(fleet: SidecarFleet, random: Random, name: str) -> str:
    """Choose a running pod other than `name`."""
    return random.choice([pod for pod in running_pods(fleet) if pod != name])


async def hand_queues_over(fleet: SidecarFleet, random: Random) -> None:
    """Hand queues over from one member to another."""
    source, target = random.sample(running_pods(fleet), 2)
    await fleet.hand_over(**{target: random_queues(fleet, random, source)})


async def kill_containers(fleet: SidecarFleet, random: Random) -> None:
    """Kill a sidecar, an app, or both, and start them again after a while."""
    name = random.choice(running_pods(fleet))
    containers = random.choice((("sidecar",), ("app",), ("sidecar", "app")))
    await fleet.sample()
    fleet.kill(name, *containers)
    await asyncio.sleep(random.uniform(0, 3))
    if "app" in containers:
        fleet.pods[name].start_app()
    if "sidecar" in containers:
        fleet.pods[name].start_sidecar(fleet.program)
        await fleet.pods[name].wait_for_report(fleet.session)


async def replace_pod(fleet: SidecarFleet, random: Random) -> None:
    """Kill a whole pod, grant its queues to another one, and start a pod in its place."""
    name = random.choice(running_pods(fleet))
    heir = random_other_pod(fleet, random, name)
    queues = fleet.queues_of(name)
    await fleet.sample()
    fleet.kill_pod(name)
    if is_orderly(fleet):
        await fleet.cluster.unlock(fleet.group, fleet.pods[name].client_id, queues)
    for queue in queues:
        del fleet.owners[queue]
    await fleet.grant(**{heir: queues})
    replacement = f"m{len(fleet.pods)}"
    await fleet.add(replacement)
    await fleet.hand_over(**{replacement: random_queues(fleet, random, heir)})


async def restart_sidecar(fleet: SidecarFleet, random: Random) -> None:
    """Terminate a sidecar, as a node that shuts down does, and start it again."""
    name = random.choice(running_pods(fleet))
    code = await fleet.pods[name].terminate()
    assert code == 0, f"{name} ended with {code}"
    fleet.note("terminated", name)
    fleet.pods[name].start_sidecar(fleet.program)
    await fleet.pods[name].wait_for_report(fleet.session)


async def stall_sidecar(fleet: SidecarFleet, random: Random) -> None:
    """Stop a sidecar for so short a time that the operator does nothing."""
    pod = fleet.pods[random.choice(running_pods(fleet))]
    pod.signal_sidecar(signal.SIGSTOP)
    await asyncio.sleep(random.uniform(0.5, 6))
    pod.signal_sidecar(signal.SIGCONT)


async def force_grant(fleet: SidecarFleet, random: Random) -> None:
    """Stop a sidecar for so long that its queues are granted to another member."""
    source, target = random.sample(running_pods(fleet), 2)
    queues = random_queues(fleet, random, source)
    await fleet.sample()
    fleet.pods[source].signal_sidecar(signal.SIGSTOP)
    await fleet.force_grant(source, target, queues)
    await asyncio.sleep(STOPPED_SECONDS)
    fleet.pods[source].signal_sidecar(signal.SIGCONT)
    await fleet.wait_until_settled(source)
    await fleet.wait_until_released(source, queues)


async def kill_broker(fleet: SidecarFleet, random: Random) -> None:
    """Kill the broker, and start it again after a while."""
    fleet.kill_broker()
    await asyncio.sleep(random.uniform(0, 5))
    await asyncio.to_thread(fleet.rocketmq.start_broker, 0)
    await soon(partial(_answers, fleet))


async def _answers(fleet: SidecarFleet) -> bool:
    try:
        return bool(await fleet.sample())
    except BrokerError:
        return False


async def stop_name_server(fleet: SidecarFleet, random: Random) -> None:
    """Hand queues over while the name server is stopped."""
    fleet.rocketmq.stop_name_server()
    try:
        await hand_queues_over(fleet, random)
        await asyncio.sleep(random.uniform(0, 5))
    finally:
        await asyncio.to_thread(fleet.rocketmq.start_name_server)
        await asyncio.to_thread(fleet.rocketmq.up)


async def misbehave_in_app(fleet: SidecarFleet, random: Random) -> None:
    """Hand queues over while the app of their owner misbehaves."""
    name = random.choice(running_pods(fleet))
    fleet.pods[name].rules(random.choice(MISBEHAVIOUR_RULES))
    await asyncio.sleep(random.uniform(0, 4))
    target = random_other_pod(fleet, random, name)
    await fleet.hand_over(**{target: random_queues(fleet, random, name)})
    fleet.pods[name].rules({"seconds": 0.01})


async def reject_messages(fleet: SidecarFleet, random: Random) -> None:
    """Send messages of which apps reject two each for good."""
    pods = [fleet.pods[name] for name in running_pods(fleet)]
    numbers = await fleet.send(len(fleet.queues))
    for pod in pods:
        pod.rules({"numbers": random.sample(numbers, 2), "status": 422}, {"seconds": 0.01})
    await asyncio.sleep(random.uniform(0, 3))


async def delay_assignment(fleet: SidecarFleet, random: Random) -> None:
    """Publish an assignment to one pod later than to the others."""
    name = random.choice(running_pods(fleet))
    fleet.publish(hide=[name])
    await asyncio.sleep(random.uniform(0, 3))
    fleet.publish()
    await fleet.wait_until_obeyed(name)


FAULTS: tuple[Fault, ...] = (
    hand_queues_over,
    kill_containers,
    replace_pod,
    restart_sidecar,
    stall_sidecar,
    force_grant,
    kill_broker,
    stop_name_server,
    misbehave_in_app,
    reject_messages,
    delay_assignment,
)
