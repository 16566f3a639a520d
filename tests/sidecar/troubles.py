"""What may befall a fleet: each of these is done to it while messages flow, and leaves everybody alive."""

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

Trouble = Callable[[SidecarFleet, Random], Awaitable[None]]

LONGER_THAN_A_LOCK = 10.0
WRONG: tuple[dict[str, Any], ...] = (
    {"status": 500, "attempts": [1, 2]},
    {"status": 404},
    {"act": "hang", "attempts": [1]},
    {"seconds": 0.5},
)


def orderly(fleet: SidecarFleet) -> bool:
    """Whether the group is."""
    return fleet.settings.get("ordering") == "Orderly"


def some_of(fleet: SidecarFleet, random: Random, name: str) -> list[Queue]:
    """Choose among the queues of a member."""
    mine = sorted(queue for queue, owner in fleet.owners.items() if owner == name)
    return random.sample(mine, random.randint(0, len(mine)))


def alive(fleet: SidecarFleet) -> list[str]:
    """Return who has not ended."""
    return sorted(fleet.pods.keys() - fleet.ended)


async def moved(fleet: SidecarFleet, random: Random) -> None:
    """Hand queues over."""
    source, target = random.sample(alive(fleet), 2)
    await fleet.hand_over(**{target: some_of(fleet, random, source)})


async def killed(fleet: SidecarFleet, random: Random) -> None:
    """Kill a sidecar, an app, or both, and start them again after a while."""
    name = random.choice(alive(fleet))
    what = random.choice((("sidecar",), ("app",), ("sidecar", "app")))
    await fleet.sample()
    fleet.kill(name, *what)
    await asyncio.sleep(random.uniform(0, 3))
    if "app" in what:
        fleet.pods[name].start_app()
    if "sidecar" in what:
        fleet.pods[name].start_sidecar(fleet.program)
        await fleet.pods[name].heard(fleet.session)


async def ended(fleet: SidecarFleet, random: Random) -> None:
    """Kill a whole pod, give its queues to another one, and start one in its place."""
    name = random.choice(alive(fleet))
    heir = random.choice([it for it in alive(fleet) if it != name])
    left = [queue for queue, owner in fleet.owners.items() if owner == name]
    await fleet.sample()
    fleet.end(name)
    if orderly(fleet):
        await fleet.cluster.unlock(fleet.group, fleet.pods[name].client_id, left)
    for queue in left:
        del fleet.owners[queue]
    await fleet.give(**{heir: left})
    fresh = f"m{len(fleet.pods)}"
    await fleet.add(fresh)
    await fleet.hand_over(**{fresh: some_of(fleet, random, heir)})


async def terminated(fleet: SidecarFleet, random: Random) -> None:
    """Ask a sidecar to end, as a node that shuts down does, and start it again."""
    name = random.choice(alive(fleet))
    code = await fleet.pods[name].terminate()
    assert code == 0, f"{name} ended with {code}"
    fleet.note("left", name)
    fleet.pods[name].start_sidecar(fleet.program)
    await fleet.pods[name].heard(fleet.session)


async def stood_still(fleet: SidecarFleet, random: Random) -> None:
    """Stop a sidecar for a while of which nobody takes notice."""
    pod = fleet.pods[random.choice(alive(fleet))]
    pod.signal_sidecar(signal.SIGSTOP)
    await asyncio.sleep(random.uniform(0.5, 6))
    pod.signal_sidecar(signal.SIGCONT)


async def overruled(fleet: SidecarFleet, random: Random) -> None:
    """Stop a sidecar for so long that its queues are given away."""
    source, target = random.sample(alive(fleet), 2)
    taken = some_of(fleet, random, source)
    await fleet.sample()
    fleet.pods[source].signal_sidecar(signal.SIGSTOP)
    await fleet.force(source, target, taken)
    await asyncio.sleep(LONGER_THAN_A_LOCK)
    fleet.pods[source].signal_sidecar(signal.SIGCONT)
    await fleet.forgiven(source)
    await fleet.released(source, taken)


async def broker_killed(fleet: SidecarFleet, random: Random) -> None:
    """Kill the broker, and start it again after a while."""
    fleet.kill_broker()
    await asyncio.sleep(random.uniform(0, 5))
    await asyncio.to_thread(fleet.rocketmq.start_broker, 0)
    await soon(partial(_sampled, fleet))


async def _sampled(fleet: SidecarFleet) -> bool:
    try:
        return bool(await fleet.sample())
    except BrokerError:
        return False


async def name_server_gone(fleet: SidecarFleet, random: Random) -> None:
    """Stop the name server for a while, in which queues are handed over."""
    fleet.rocketmq.stop_name_server()
    try:
        await moved(fleet, random)
        await asyncio.sleep(random.uniform(0, 5))
    finally:
        await asyncio.to_thread(fleet.rocketmq.start_name_server)
        await asyncio.to_thread(fleet.rocketmq.up)


async def app_wrong(fleet: SidecarFleet, random: Random) -> None:
    """Have an app misbehave while its queues are handed over."""
    name = random.choice(alive(fleet))
    fleet.pods[name].rules(random.choice(WRONG))
    await asyncio.sleep(random.uniform(0, 4))
    target = random.choice([it for it in alive(fleet) if it != name])
    await fleet.hand_over(**{target: some_of(fleet, random, name)})
    fleet.pods[name].rules({"seconds": 0.01})


async def poisoned(fleet: SidecarFleet, random: Random) -> None:
    """Send messages that no app ever takes, among others."""
    pods = [fleet.pods[it] for it in alive(fleet)]
    numbers = await fleet.send(len(fleet.queues))
    for pod in pods:
        pod.rules({"numbers": random.sample(numbers, 2), "status": 422}, {"seconds": 0.01})
    await asyncio.sleep(random.uniform(0, 3))


async def told_late(fleet: SidecarFleet, random: Random) -> None:
    """Have one see a document later than the others."""
    name = random.choice(alive(fleet))
    fleet.show(hide=[name])
    await asyncio.sleep(random.uniform(0, 3))
    fleet.show()
    await fleet.obeys(name)


TROUBLES: tuple[Trouble, ...] = (
    moved,
    killed,
    ended,
    terminated,
    stood_still,
    overruled,
    broker_killed,
    name_server_gone,
    app_wrong,
    poisoned,
    told_late,
)
