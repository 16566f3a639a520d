"""A whole simulated fleet: API server, broker, operators, pods; and the controller that keeps pods running."""

from functools import partial
from itertools import count
from random import Random
from typing import Any

from msgspec import structs

from rota.model import Holder, Queue
from rota.spec import GroupSpec, PolicySpec, parse_group, parse_policy
from simulation.clock import Clock, Process, Routine
from simulation.fleet import Kubelet
from simulation.judge import Judge
from simulation.replica import Operator, restart
from simulation.server import Api, Broker

EPOCH = 1_763_712_000.0  # the wall clock at the start of every run
STRATEGIES = ("Sticky", "Sticky", "Averagely", "AveragelyByCircle", "ConsistentHash", "Balanced")


class Simulation:
    """The state of one run, derived from its seed."""

    group = "shop/orders"
    epoch = EPOCH

    def __init__(
        self,
        seed: int,
        *,
        routes: dict[str, dict[str, int]] | None = None,
        policy: PolicySpec | None = None,
        replicas: int | None = None,
    ) -> None:
        self.seed = seed
        self.random = Random(f"{seed}/world")
        self.clock = Clock()
        self.api = Api(self.clock)
        routes = routes or self._random_routes()
        self.subscribed = list(routes)
        self.broker = Broker(self.clock, {**routes, "%RETRY%orders": {"a": 1}})
        self.model = "Broadcasting" if policy is None and self.random.random() < 0.05 else "Clustering"
        self.ordering = "Orderly" if policy is None and self.random.random() < 0.25 else "Concurrent"
        self.paused = False
        self.settings = "{}"
        self.policy = policy or self._random_policy()
        self.spec = self._build_spec()
        self.policy_changed_at = self.queues_may_drop_at = self.route_grown_at = self.may_overlap_until = 0.0
        self.weights: dict[Queue, float] | None = {}
        self.is_calm = False  # whether all faults have ended
        self.is_manual_edit = False  # whether the present change of the ConfigMap is a user's
        self.clock_leapt = False  # whether an operator's wall clock was ever wrong
        self.bad_watch = self.silent_watch = False
        self.bad_policy = self.bad_spec = False
        self.judge = Judge(self)
        self.stable_names = self.random.random() < 0.4
        self.replicas = replicas or self.random.choice([1, 2, 2, 3, 3, 4, 5])
        self.surge = 0  # pods beyond `replicas`, while others are replaced
        self._pods_created = 0
        self.kubelets: dict[str, Kubelet] = {}
        self._crash_in = 0
        self.both_lead_until = 0.0
        self.operators: list[Operator] = []
        self.leader: Operator | None = None
        self._reconcile_replicas()
        self.operators = [Operator(self, "operator-a"), Operator(self, "operator-b")]
        self.leader = self.operators[0]

    @property
    def orderly(self) -> bool:
        """Whether queues are consumed under the broker's lock."""
        return self.spec.is_orderly and self.spec.message_model != "Broadcasting"

    @property
    def may_overlap(self) -> bool:
        """Whether two members may consume one queue, as the policy allows or allowed recently."""
        return self.policy.handover.mode == "Immediate" or bool(self.clock.now < self.may_overlap_until)

    @property
    def topics(self) -> list[str]:
        """Every topic of the group, that for retries included."""
        retry = ["%RETRY%orders"] if self.spec.message_model == "Clustering" else []
        return [subscription.topic for subscription in self.spec.subscriptions] + retry

    def _random_routes(self) -> dict[str, dict[str, int]]:
        topics = ["orders", "payments"][: self.random.choice([1, 1, 2])]
        brokers = ["a", "b"][: self.random.choice([1, 2])]
        return {topic: {broker: self.random.randint(1, 6) for broker in brokers} for topic in topics}

    def _random_policy(self) -> PolicySpec:
        random = self.random
        spec: dict[str, Any] = {
            "strategy": random.choice(STRATEGIES),
            "handover": {
                "mode": "Immediate" if random.random() < 0.07 else "Cooperative",
                "drainTimeout": random.choice(["2s", "10s", "30s"]),
            },
            "triggers": {"debounce": random.choice(["100ms", "500ms", "2s"])},
        }
        if random.random() < 0.3:
            spec["budget"] = {"maxMoves": random.randint(1, 4), "per": "10s"}
        return parse_policy({"spec": spec})

    def _build_spec(self) -> GroupSpec:
        spec: dict[str, Any] = {
            "broker": {"rocketmq": {"nameServers": ["rmq:9876"]}},
            "subscriptions": [{"topic": topic} for topic in self.subscribed],
            "messageModel": self.model,
            "ordering": self.ordering,
            "paused": self.paused,
        }
        return parse_group({"spec": spec})

    def change(self, **changed: object) -> None:
        """Change the group, as a user does."""
        for name, value in changed.items():
            setattr(self, name, value)
        self.queues_may_drop_at = self.clock.now
        self.spec = self._build_spec()
        self.enqueue()

    def change_policy(self) -> None:
        """Choose another policy; after mode Immediate, members may overlap for a while."""
        if self.policy.handover.mode == "Immediate":
            self.may_overlap_until = self.clock.now + 120
        policy = self._random_policy()
        # The drain timeout stays: members read it at their start only.
        handover = structs.replace(policy.handover, drain_timeout=self.policy.handover.drain_timeout)
        self.policy = structs.replace(policy, handover=handover)
        self.policy_changed_at = self.clock.now
        self.enqueue()

    def enqueue(self) -> None:
        """Let all operators reconcile the group."""
        for operator in self.operators:
            operator.enqueue()

    # Pods.

    def scale(self, replicas: int) -> None:
        """Set the number of replicas."""
        self.replicas = replicas

    def _reconcile_replicas(self) -> None:
        running = [kubelet for kubelet in self.kubelets.values() if kubelet.is_running]
        target = self.replicas + self.surge
        for kubelet in running[target:]:
            kubelet.delete()
        for _ in range(target - len(running)):
            self._create_pod()
        self.clock.after(0.5, self._reconcile_replicas)

    def _create_pod(self) -> None:
        self._pods_created += 1
        existing = self.api.pods
        if self.stable_names:
            name = next(name for name in map("orders-{}".format, count()) if name not in existing)
        else:
            name = f"orders-{self._pods_created:03d}"
        if name not in existing:
            self.kubelets[name] = Kubelet(self, name, f"uid-{self._pods_created}")

    def is_new(self, name: str) -> bool:
        """Return whether a pod is so young that a cache may not know it."""
        return name in self.kubelets and self.clock.now - self.kubelets[name].created_at < 20

    def roll(self) -> None:
        """Replace all pods one after another, each after its successor is ready."""
        self.background(self._roll(list(self.kubelets.values())))

    def _roll(self, kubelets: list[Kubelet]) -> Routine:
        for kubelet in kubelets:
            if not kubelet.is_running:
                continue
            self.surge += 1
            yield 1.0
            for _ in range(30):  # the successor may never become ready
                if sum(candidate.is_ready for candidate in self.kubelets.values()) >= self.replicas + self.surge:
                    break
                yield 0.5
            self.surge -= 1
            kubelet.delete()
            yield 0.2

    def background(self, routine: Routine) -> None:
        """Run a routine that no fault stops."""
        Process(self.clock).spawn(routine)

    def notify_report(self, kubelet: Kubelet) -> None:
        """Complete the long polls for this pod's report."""
        for operator in self.operators:
            operator.after(0.0, partial(operator.notify_report, kubelet.name))

    def request_drain(self, holder: Holder) -> None:
        """Deliver the operator's request to a terminating member."""
        kubelet = self.kubelets.get(holder.name)
        if kubelet and kubelet.uid == holder.uid and kubelet.sidecar and not kubelet.cut_off:
            kubelet.sidecar.drain(final=True)

    # Operators.

    def leads(self, operator: Operator) -> bool:
        """Return whether an operator believes to be the leader."""
        return operator is self.leader or self.clock.now < self.both_lead_until

    def arm_crash(self, points: int) -> None:
        """Let the leader crash before or after one of its next writes."""
        self._crash_in = points

    def maybe_crash(self, operator: Operator) -> None:
        """Crash the leader if its armed crash is due here."""
        if self._crash_in and operator is self.leader:
            self._crash_in -= 1
            if not self._crash_in:
                self.crash(operator)

    def crash(self, operator: Operator) -> None:
        """Crash an operator; it restarts, and one of both operators leads later."""
        position = self.operators.index(operator)
        self.operators[position] = restart(operator)
        if operator is self.leader:
            self.leader = None
            successor = self.random.choice([position, 1 - position])
            self.clock.after(self.random.choice([0.5, 3.0, 15.0]), partial(self._elect_at, successor))

    def freeze_leader(self, seconds: float) -> None:
        """Freeze the leader; the other operator leads before it resumes and completes its open work."""
        leader = self.leader
        if leader:
            leader.freeze()
            successor = self.operators[1 - self.operators.index(leader)]
            self.clock.after(15.0, lambda: self._elect(successor))
            self.clock.after(seconds, leader.thaw)

    def _elect_at(self, position: int) -> None:
        self._elect(self.operators[position])

    def _elect(self, operator: Operator) -> None:
        alive = operator if operator.alive else self.operators[0]
        self.leader = alive
        alive.enqueue()

    def crash_leader(self) -> None:
        """Crash the present leader."""
        if self.leader:
            self.crash(self.leader)

    def speed_up_kubelets(self) -> None:
        """End all delays of kubelets."""
        for kubelet in self.kubelets.values():
            kubelet.delay_factor = 1.0

    def end_faults(self) -> None:
        """End all faults."""
        self.is_calm = True
        self.api.down = self.broker.failing = self.bad_watch = self.silent_watch = self.paused = False
        self.bad_policy = self.bad_spec = False
        self.broker.hidden.clear()
        self.broker.unmanaged_consumers = ()
        self._crash_in = 0
        self.replicas = max(self.replicas, 1)
        if self.weights is None:
            self.weights = {}
        self.speed_up_kubelets()
        self.change(paused=False)
