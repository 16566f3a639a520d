"""The faults of a run: each is a function of the simulation and a random generator."""

from collections.abc import Callable
from functools import partial
from random import Random

from rota.documents import PLAIN_KEY
from simulation.fleet import Kubelet
from simulation.world import Simulation

ROUTE_POLL_SECONDS = 5.0  # between two polls of an operator

Fault = Callable[[Simulation, Random], None]


def _pick_pod(world: Simulation, random: Random) -> list[Kubelet]:
    """Return one running pod at random; an empty list without one."""
    running = [kubelet for kubelet in world.kubelets.values() if kubelet.is_running]
    return [random.choice(running)] if running else []


def _set_for(world: Simulation, target: object, attribute: str, seconds: float) -> None:
    """Set a flag for so many seconds."""

    def end() -> None:
        setattr(target, attribute, False)

    setattr(target, attribute, True)
    world.clock.after(seconds, end)


def scale(world: Simulation, random: Random) -> None:
    """The number of replicas changes."""
    world.scale(random.randint(1, 8))


def roll(world: Simulation, _: Random) -> None:
    """A rolling update starts."""
    world.roll()


def delete_pod(world: Simulation, random: Random) -> None:
    """A pod is deleted, as by `kubectl delete pod`."""
    for kubelet in _pick_pod(world, random):
        kubelet.delete()


def crash_sidecar(world: Simulation, random: Random) -> None:
    """A container crashes and restarts."""
    for kubelet in _pick_pod(world, random):
        kubelet.crash(random.choice([0.5, 3.0, 12.0, 40.0]))


def crash_while_leaving(world: Simulation, random: Random) -> None:
    """A container crashes while its pod terminates."""
    for kubelet in _pick_pod(world, random):
        kubelet.delete()
        world.clock.after(random.uniform(0.5, 6), partial(kubelet.crash, 1000.0))


def corrupt_volume(world: Simulation, random: Random) -> None:
    """A volume shows an old document briefly, or half of one; the container may restart meanwhile."""
    texts = [text for text in world.judge.texts.values() if isinstance(text, str)]
    for kubelet in _pick_pod(world, random) if texts else ():
        text = random.choice(texts)
        kubelet.corrupt_volume(text if random.random() < 0.7 else text[: len(text) // 2], random.uniform(0.5, 8))
        if random.random() < 0.5:
            kubelet.crash(0.2)


def blind_successor(world: Simulation, random: Random) -> None:
    """Members join, the leader crashes, and its successor starts with an outdated list of pods."""
    world.scale(world.replicas + 2)
    world.clock.after(random.uniform(3, 9), world.crash_leader)


def end_pod(world: Simulation, random: Random) -> None:
    """A pod is evicted, or fails."""
    for kubelet in _pick_pod(world, random):
        random.choice([kubelet.vanish, kubelet.finish])()


def hang(world: Simulation, random: Random) -> None:
    """A sidecar hangs for a while, then resumes."""
    for kubelet in _pick_pod(world, random):
        kubelet.hang(random.choice([2.0, 8.0, 25.0, 70.0]))


def lose_node(world: Simulation, random: Random) -> None:
    """A node is cut off: its pod keeps running, unreachable, with an old document."""
    for kubelet in _pick_pod(world, random):
        kubelet.cut_off_node(random.choice([15.0, 60.0, 150.0]))


def lose_zone(world: Simulation, random: Random) -> None:
    """The nodes of a third of all pods, or of all of at most two, are cut off at once."""
    kubelets = [kubelet for kubelet in world.kubelets.values() if kubelet.api_pod]
    for kubelet in kubelets[:: 3 if len(kubelets) > 2 else 1]:
        kubelet.cut_off_node(random.choice([30.0, 100.0]))


def partition(world: Simulation, random: Random) -> None:
    """The operator cannot reach a healthy member."""
    for kubelet in _pick_pod(world, random):
        kubelet.partition(random.choice([5.0, 40.0, 150.0]))


def flap(world: Simulation, random: Random) -> None:
    """A pod changes between ready and not ready every 3 s."""
    for kubelet in _pick_pod(world, random):
        for number in range(random.randint(2, 10)):
            world.clock.after(number * 6, kubelet.flap)


def slow_kubelets(world: Simulation, random: Random) -> None:
    """The volumes of half of the pods are updated late, in spite of pokes."""
    for kubelet in list(world.kubelets.values())[::2]:
        kubelet.delay_factor = random.choice([10.0, 180.0])
    world.clock.after(90, world.speed_up_kubelets)


def crash_operator(world: Simulation, random: Random) -> None:
    """The leader crashes before or after one of its next writes."""
    world.arm_crash(random.randint(1, 6))


def freeze_operator(world: Simulation, random: Random) -> None:
    """The leader is frozen for longer than its Lease, then resumes."""
    world.freeze_leader(random.choice([5.0, 18.0, 45.0]))


def two_leaders(world: Simulation, random: Random) -> None:
    """Both operators act as leaders."""
    world.both_lead_until = world.clock.now + random.choice([5.0, 40.0])
    world.enqueue()


def api_down(world: Simulation, random: Random) -> None:
    """The API server does not respond."""
    _set_for(world, world.api, "down", random.choice([2.0, 20.0, 60.0]))


def lost_replies(world: Simulation, random: Random) -> None:
    """A write succeeds, but its response is lost."""
    world.api.responses_to_lose = random.randint(1, 3)


def bad_watch(world: Simulation, random: Random) -> None:
    """Watch events are lost, late, duplicated, out of order."""
    _set_for(world, world, "bad_watch", random.choice([10.0, 40.0]))


def silent_watch(world: Simulation, random: Random) -> None:
    """The watch delivers no events, and does not end."""
    _set_for(world, world, "silent_watch", random.choice([10.0, 40.0]))


def _edit_config_map(world: Simulation, text: str | bytes | None) -> None:
    world.is_manual_edit = True
    world.api.put_config_map(None if text is None else {PLAIN_KEY: text}, world.settings)
    world.is_manual_edit = False
    world.enqueue()


def config_map_deleted(world: Simulation, _: Random) -> None:
    """A user deletes the ConfigMap."""
    _edit_config_map(world, None)


def config_map_edited(world: Simulation, _: Random) -> None:
    """A user edits the ConfigMap: the generation becomes much higher."""
    config_map = world.api.config_map
    if config_map:
        _edit_config_map(world, str(config_map.text).replace('"generation":', '"generation":1', 1))


def config_map_restored(world: Simulation, random: Random) -> None:
    """A user restores an old copy of the ConfigMap."""
    texts = list(world.judge.texts.values())
    if texts:
        _edit_config_map(world, random.choice(texts[-6:]))


def more_queues(world: Simulation, random: Random) -> None:
    """An admin adds queues."""
    world.route_grown_at = world.clock.now
    route = world.broker.routes[random.choice(world.subscribed)]
    route[random.choice(sorted(route))] += random.randint(1, 4)


def fewer_queues(world: Simulation, random: Random) -> None:
    """An admin removes queues."""
    route = world.broker.routes[random.choice(world.subscribed)]
    broker = random.choice(sorted(route))
    route[broker] = max(1, route[broker] - random.randint(1, 3))


def no_routes(world: Simulation, random: Random) -> None:
    """The name server does not answer."""
    _set_for(world, world.broker, "failing", random.choice([6.0, 60.0]))


def partial_routes(world: Simulation, random: Random) -> None:
    """A name server has just started and does not know every broker; within 30 s each broker has registered."""
    # Without a poll of the whole routes in between, two such faults would hide a broker for longer than operators wait.
    was_polled_since = world.clock.now - world.broker.all_listed_since > ROUTE_POLL_SECONDS
    if world.broker.hidden or not was_polled_since:
        return
    world.broker.hidden = {random.choice(["a", "b"])}
    world.clock.after(random.choice([5.0, 29.0]), world.broker.list_all)


def broker_restart(world: Simulation, _: Random) -> None:
    """A broker forgets its locks."""
    world.broker.locks.clear()


def pause_group(world: Simulation, random: Random) -> None:
    """The user pauses consumption for a while."""
    world.change(paused=True)
    world.clock.after(random.choice([3.0, 40.0]), lambda: world.change(paused=False))


def subscribe(world: Simulation, random: Random) -> None:
    """The subscription changes."""
    topics = [topic for topic in world.broker.routes if not topic.startswith("%")]
    if len(topics) > 1:
        world.change(subscribed=random.choice([topics[:1], topics[1:], topics]))


def change_policy(world: Simulation, _: Random) -> None:
    """The policy is replaced."""
    world.change_policy()


def bad_policy(world: Simulation, random: Random) -> None:
    """The policy is invalid for a while."""
    _set_for(world, world, "bad_policy", random.choice([5.0, 60.0]))


def bad_spec(world: Simulation, random: Random) -> None:
    """The group is invalid for a while."""
    _set_for(world, world, "bad_spec", random.choice([5.0, 40.0]))


def change_settings(world: Simulation, random: Random) -> None:
    """The settings for sidecars change."""
    world.settings = f'{{"changed":{random.randint(1, 9)}}}'
    world.enqueue()


def unmanaged_consumers(world: Simulation, random: Random) -> None:
    """Unmanaged consumers are in the group for a while, or the broker cannot list consumers."""
    world.broker.unmanaged_consumers = random.choice([("10.9.9.9@old",), None])
    world.queues_may_drop_at = world.clock.now + 60

    def leave() -> None:
        world.broker.unmanaged_consumers = ()
        world.queues_may_drop_at = world.clock.now + 60
        world.enqueue()

    world.clock.after(random.choice([5.0, 50.0]), leave)
    world.enqueue()


def weights_lie(world: Simulation, random: Random) -> None:
    """Queue weights are unknown or invalid."""
    lies = [float("nan"), -1.0, 1e12, 3.0, float("inf")]
    queues = [queue for topic in world.broker.routes for queue in world.broker.queues(topic)]
    world.weights = random.choice([None, {queue: random.choice(lies) for queue in queues}])


def clock_leaps(world: Simulation, random: Random) -> None:
    """An operator's wall clock is wrong by minutes."""
    world.clock_leapt = True
    random.choice(world.operators).clock_offset += random.choice([-300.0, -20.0, 20.0, 300.0])


def app_restarts(world: Simulation, random: Random) -> None:
    """An app container restarts: its preStop hook drains, then the member consumes its assignment again."""
    for kubelet in _pick_pod(world, random):
        sidecar = kubelet.sidecar
        if sidecar and sidecar.alive and not sidecar.frozen:
            sidecar.drain(final=False)
            sidecar.after(random.uniform(0.5, 10), sidecar.end_drain)


# A fault that is listed twice is twice as frequent.
FAULTS: tuple[Fault, ...] = (
    scale,
    scale,
    roll,
    delete_pod,
    crash_sidecar,
    crash_sidecar,
    crash_while_leaving,
    corrupt_volume,
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
    config_map_deleted,
    config_map_edited,
    config_map_restored,
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
    unmanaged_consumers,
    weights_lie,
    clock_leaps,
    app_restarts,
)
