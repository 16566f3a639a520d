"""What can go wrong in a run: each fault a function of the world and of chance."""

from collections.abc import Callable
from functools import partial
from random import Random

from rota.documents import PLAIN_KEY
from simulation.fleet import Kubelet
from simulation.world import Simulation

Fault = Callable[[Simulation, Random], None]


def _some(world: Simulation, chance: Random) -> list[Kubelet]:
    """Return one pod that stands, or none."""
    there = [it for it in world.kubelets.values() if it.object and not it.object.terminating and not it.object.ended]
    return [chance.choice(there)] if there else []


def _for_a_while(world: Simulation, thing: object, trouble: str, seconds: float) -> None:
    """Let a trouble be, and end."""

    def end() -> None:
        setattr(thing, trouble, False)

    setattr(thing, trouble, True)
    world.clock.after(seconds, end)


def scale(world: Simulation, chance: Random) -> None:
    """More or fewer members."""
    world.scale(chance.randint(1, 8))


def roll(world: Simulation, _: Random) -> None:
    """A rolling update."""
    world.roll()


def delete_pod(world: Simulation, chance: Random) -> None:
    """`kubectl delete pod`."""
    for kubelet in _some(world, chance):
        kubelet.delete()


def crash_sidecar(world: Simulation, chance: Random) -> None:
    """A container dies and comes back."""
    for kubelet in _some(world, chance):
        kubelet.crash(chance.choice([0.5, 3.0, 12.0, 40.0]))


def crash_while_leaving(world: Simulation, chance: Random) -> None:
    """A container dies while its pod is taken down."""
    for kubelet in _some(world, chance):
        kubelet.delete()
        world.clock.after(chance.uniform(0.5, 6), partial(kubelet.crash, 1000.0))


def confuse_volume(world: Simulation, chance: Random) -> None:
    """A volume shows an old document for a moment, or half of one; perhaps the container starts anew meanwhile."""
    texts = [text for text in world.judge.texts.values() if isinstance(text, str)]
    for kubelet in _some(world, chance) if texts else ():
        text = chance.choice(texts)
        kubelet.confuse(text if chance.random() < 0.7 else text[: len(text) // 2], chance.uniform(0.5, 8))
        if chance.random() < 0.5:
            kubelet.crash(0.2)


def blind_successor(world: Simulation, chance: Random) -> None:
    """Members join, the leader dies, and its successor begins with an old list of pods."""
    world.scale(world.replicas + 2)
    world.clock.after(chance.uniform(3, 9), world.crash_leader)


def end_pod(world: Simulation, chance: Random) -> None:
    """A pod ends: evicted, or failed."""
    for kubelet in _some(world, chance):
        chance.choice([kubelet.vanish, kubelet.finish])()


def hang(world: Simulation, chance: Random) -> None:
    """A sidecar stands still for a while, and goes on as if nothing had been."""
    for kubelet in _some(world, chance):
        kubelet.hang(chance.choice([2.0, 8.0, 25.0, 70.0]))


def lose_node(world: Simulation, chance: Random) -> None:
    """A node is cut off: its pod goes on, unheard, with an old document."""
    for kubelet in _some(world, chance):
        kubelet.lose(chance.choice([15.0, 60.0, 150.0]))


def lose_zone(world: Simulation, chance: Random) -> None:
    """A third of all pods at once."""
    there = [it for it in world.kubelets.values() if it.object]
    for kubelet in there[:: 3 if len(there) > 2 else 1]:
        kubelet.lose(chance.choice([30.0, 100.0]))


def partition(world: Simulation, chance: Random) -> None:
    """The operator cannot reach a member that is well."""
    for kubelet in _some(world, chance):
        kubelet.partition(chance.choice([5.0, 40.0, 150.0]))


def flap(world: Simulation, chance: Random) -> None:
    """One pod is ready and unready every 3 s."""
    for kubelet in _some(world, chance):
        for number in range(chance.randint(2, 10)):
            world.clock.after(number * 6, kubelet.flap)


def slow_kubelets(world: Simulation, chance: Random) -> None:
    """Half of the pods are shown documents late, though they are poked."""
    for kubelet in list(world.kubelets.values())[::2]:
        kubelet.slow = chance.choice([10.0, 180.0])
    world.clock.after(90, world.hurry)


def crash_operator(world: Simulation, chance: Random) -> None:
    """The leader dies before or after one of its next writes."""
    world.arm_crash(chance.randint(1, 6))


def freeze_operator(world: Simulation, chance: Random) -> None:
    """The leader is stopped for longer than its lease, and then goes on."""
    world.freeze_leader(chance.choice([5.0, 18.0, 45.0]))


def two_leaders(world: Simulation, chance: Random) -> None:
    """Both operators believe that they lead."""
    world.both_lead_until = world.clock.now + chance.choice([5.0, 40.0])
    world.wake()


def api_down(world: Simulation, chance: Random) -> None:
    """The API server answers nobody."""
    _for_a_while(world, world.api, "down", chance.choice([2.0, 20.0, 60.0]))


def lost_replies(world: Simulation, chance: Random) -> None:
    """A write is done, but its answer never comes."""
    world.api.losing_replies = chance.randint(1, 3)


def bad_watch(world: Simulation, chance: Random) -> None:
    """Watch events are lost, late, twice, out of order."""
    _for_a_while(world, world, "bad_watch", chance.choice([10.0, 40.0]))


def silent_watch(world: Simulation, chance: Random) -> None:
    """The watch says nothing, and does not end."""
    _for_a_while(world, world, "silent_watch", chance.choice([10.0, 40.0]))


def _by_hand(world: Simulation, text: str | bytes | None) -> None:
    world.by_hand = True
    world.api.put_record(None if text is None else {PLAIN_KEY: text}, world.settings)
    world.by_hand = False
    world.wake()


def record_deleted(world: Simulation, _: Random) -> None:
    """Somebody deletes the ConfigMap."""
    _by_hand(world, None)


def record_edited(world: Simulation, _: Random) -> None:
    """Somebody edits the ConfigMap."""
    record = world.api.record
    if record:
        _by_hand(world, str(record.text).replace('"generation":', '"generation":1', 1))


def record_restored(world: Simulation, chance: Random) -> None:
    """Somebody restores an old copy of the ConfigMap."""
    texts = list(world.judge.texts.values())
    if texts:
        _by_hand(world, chance.choice(texts[-6:]))


def more_queues(world: Simulation, chance: Random) -> None:
    """An admin adds queues."""
    world.grown = world.clock.now
    route = world.broker.routes[chance.choice(world.subscribed)]
    route[chance.choice(sorted(route))] += chance.randint(1, 4)


def fewer_queues(world: Simulation, chance: Random) -> None:
    """An admin removes queues."""
    route = world.broker.routes[chance.choice(world.subscribed)]
    broker = chance.choice(sorted(route))
    route[broker] = max(1, route[broker] - chance.randint(1, 3))


def no_routes(world: Simulation, chance: Random) -> None:
    """The name server does not answer."""
    _for_a_while(world, world.broker, "failing", chance.choice([6.0, 60.0]))


def partial_routes(world: Simulation, chance: Random) -> None:
    """A name server has just started and does not know every broker; within 30 s each one has registered."""
    if world.broker.hidden:  # one after another would hide a broker for longer than a member waits
        return
    world.broker.hidden = {chance.choice(["a", "b"])}
    world.clock.after(chance.choice([5.0, 29.0]), world.broker.hidden.clear)


def broker_restart(world: Simulation, _: Random) -> None:
    """A broker forgets its locks."""
    world.broker.locks.clear()


def pause_group(world: Simulation, chance: Random) -> None:
    """The user pauses consumption for a while."""
    world.change(paused=True)
    world.clock.after(chance.choice([3.0, 40.0]), lambda: world.change(paused=False))


def subscribe(world: Simulation, chance: Random) -> None:
    """The subscription changes."""
    topics = [topic for topic in world.broker.routes if not topic.startswith("%")]
    if len(topics) > 1:
        world.change(subscribed=chance.choice([topics[:1], topics[1:], topics]))


def change_policy(world: Simulation, _: Random) -> None:
    """Another policy applies."""
    world.change_policy()


def bad_policy(world: Simulation, chance: Random) -> None:
    """The policy cannot be understood for a while."""
    _for_a_while(world, world, "bad_policy", chance.choice([5.0, 60.0]))


def bad_spec(world: Simulation, chance: Random) -> None:
    """The group cannot be understood for a while."""
    _for_a_while(world, world, "bad_spec", chance.choice([5.0, 40.0]))


def change_settings(world: Simulation, chance: Random) -> None:
    """The settings that sidecars need change."""
    world.settings = f'{{"changed":{chance.randint(1, 9)}}}'
    world.wake()


def foreigners(world: Simulation, chance: Random) -> None:
    """Consumers that are not Rota's are in the group for a while, or cannot be seen."""
    world.broker.foreigners = chance.choice([("10.9.9.9@old",), None])
    world.permissive = world.clock.now + 60

    def gone() -> None:
        world.broker.foreigners = ()
        world.permissive = world.clock.now + 60
        world.wake()

    world.clock.after(chance.choice([5.0, 50.0]), gone)
    world.wake()


def weights_lie(world: Simulation, chance: Random) -> None:
    """What queues weigh cannot be measured, or is nonsense."""
    lies = [float("nan"), -1.0, 1e12, 3.0, float("inf")]
    queues = [queue for topic in world.broker.routes for queue in world.broker.queues(topic)]
    world.weights = chance.choice([None, {queue: chance.choice(lies) for queue in queues}])


def clock_leaps(world: Simulation, chance: Random) -> None:
    """An operator's time of day is wrong by minutes."""
    world.leapt = True
    chance.choice(world.operators).leap += chance.choice([-300.0, -20.0, 20.0, 300.0])


def app_restarts(world: Simulation, chance: Random) -> None:
    """An app container restarts: its preStop drains, and takes up again what the document gives."""
    for kubelet in _some(world, chance):
        sidecar = kubelet.sidecar
        if sidecar and sidecar.alive and not sidecar.frozen:
            sidecar.drain(final=False)
            sidecar.after(chance.uniform(0.5, 10), sidecar.back)


FAULTS: tuple[Fault, ...] = (
    scale,
    scale,
    roll,
    delete_pod,
    crash_sidecar,
    crash_sidecar,
    crash_while_leaving,
    confuse_volume,
    blind_successor,
    end_pod,
    hang,
    hang,
    lose_node,
    lose_zone,
    partition,
    flap,
    slow_kubelets,
    crash_operator,
    crash_operator,
    freeze_operator,
    two_leaders,
    api_down,
    lost_replies,
    bad_watch,
    silent_watch,
    record_deleted,
    record_edited,
    record_restored,
    more_queues,
    fewer_queues,
    no_routes,
    partial_routes,
    broker_restart,
    pause_group,
    subscribe,
    change_policy,
    change_settings,
    bad_policy,
    bad_spec,
    foreigners,
    weights_lie,
    clock_leaps,
    app_restarts,
)
