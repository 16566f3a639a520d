"""A whole simulated world: API server, broker, operators, pods; and the controller that keeps pods running."""

from functools import partial
from random import Random
from typing import Any

from rota.model import Holder, Queue
from rota.spec import GroupSpec, PolicySpec, parse_group, parse_policy
from simulation.clock import Clock, Process, Work
from simulation.fleet import Kubelet
from simulation.judge import Judge
from simulation.replica import Operator, restarted
from simulation.server import Api, Broker

EPOCH = 1_763_712_000.0  # the time of day at which every run begins
STRATEGIES = ("Sticky", "Sticky", "Averagely", "AveragelyByCircle", "ConsistentHash", "Balanced")


class Simulation:
    """Everything there is in a run; what it is made of follows from the seed."""

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
        self.chance = Random(f"{seed}/world")
        self.clock = Clock()
        self.api = Api(self.clock)
        routes = routes or self._some_routes()
        self.subscribed = list(routes)
        self.broker = Broker(self.clock, {**routes, "%RETRY%orders": {"a": 1}})
        self.model = "Broadcasting" if policy is None and self.chance.random() < 0.05 else "Clustering"
        self.ordering = "Orderly" if policy is None and self.chance.random() < 0.25 else "Concurrent"
        self.paused = False
        self.settings = "{}"
        self.policy = policy or self._some_policy()
        self.spec = self._spec()
        self.policy_changed = self.permissive = self.grown = self.loose_until = 0.0
        self.weights: dict[Queue, float] | None = {}
        self.calm = self.by_hand = self.leapt = False
        self.bad_watch = self.silent_watch = False
        self.bad_policy = self.bad_spec = False
        self.judge = Judge(self)
        self.stable_names = self.chance.random() < 0.4
        self.replicas = replicas or self.chance.choice([1, 2, 2, 3, 3, 4, 5])
        self.surge = 0  # pods beyond `replicas`, while others are replaced
        self._made = 0
        self.kubelets: dict[str, Kubelet] = {}
        self._crash_in = 0
        self.both_lead_until = 0.0
        self.operators: list[Operator] = []
        self.leader: Operator | None = None
        self._scale()
        self.operators = [Operator(self, "operator-a"), Operator(self, "operator-b")]
        self.leader = self.operators[0]

    @property
    def orderly(self) -> bool:
        """Whether queues are worked under the broker's lock."""
        return self.spec.is_orderly and self.spec.message_model != "Broadcasting"

    @property
    def loose(self) -> bool:
        """Whether two may meet by the user's own wish."""
        return self.policy.handover.mode == "Immediate" or bool(self.clock.now < self.loose_until)

    @property
    def topics(self) -> list[str]:
        """Every topic of the group, that for retries included."""
        retry = ["%RETRY%orders"] if self.spec.message_model == "Clustering" else []
        return [subscription.topic for subscription in self.spec.subscriptions] + retry

    def _some_routes(self) -> dict[str, dict[str, int]]:
        topics = ["orders", "payments"][: self.chance.choice([1, 1, 2])]
        brokers = ["a", "b"][: self.chance.choice([1, 2])]
        return {topic: {broker: self.chance.randint(1, 6) for broker in brokers} for topic in topics}

    def _some_policy(self) -> PolicySpec:
        chance = self.chance
        spec: dict[str, Any] = {
            "strategy": chance.choice(STRATEGIES),
            "handover": {
                "mode": "Immediate" if chance.random() < 0.07 else "Cooperative",
                "drainTimeout": chance.choice(["2s", "10s", "30s"]),
            },
            "triggers": {"debounce": chance.choice(["100ms", "500ms", "2s"])},
        }
        if chance.random() < 0.3:
            spec["budget"] = {"maxMoves": chance.randint(1, 4), "per": "10s"}
        return parse_policy({"spec": spec})

    def _spec(self) -> GroupSpec:
        spec: dict[str, Any] = {
            "broker": {"rocketmq": {"nameServers": ["rmq:9876"]}},
            "subscriptions": [{"topic": topic} for topic in self.subscribed],
            "messageModel": self.model,
            "ordering": self.ordering,
            "paused": self.paused,
        }
        return parse_group({"spec": spec})

    def change(self, **changed: object) -> None:
        """Change the group as its user does."""
        for name, value in changed.items():
            setattr(self, name, value)
        self.permissive = self.clock.now
        self.spec = self._spec()
        self.wake()

    def change_policy(self) -> None:
        """Choose another policy; who may meet under the old one may meet for a while yet."""
        if self.policy.handover.mode == "Immediate":
            self.loose_until = self.clock.now + 120
        drain = self.policy.handover.drain_timeout
        self.policy = self._some_policy()
        self.policy = type(self.policy)(  # the members' drain timeout is read at their start
            **{name: getattr(self.policy, name) for name in self.policy.__struct_fields__ if name != "handover"},
            handover=type(self.policy.handover)(mode=self.policy.handover.mode, drain_timeout=drain),
        )
        self.policy_changed = self.clock.now
        self.wake()

    def wake(self) -> None:
        """Tell the operators that something changed."""
        for operator in self.operators:
            operator.wake()

    # Pods.

    def scale(self, replicas: int) -> None:
        """Want so many pods."""
        self.replicas = replicas

    def _scale(self) -> None:
        there = [kubelet for kubelet in self.kubelets.values() if self._stands(kubelet)]
        target = self.replicas + self.surge
        for kubelet in there[target:]:
            kubelet.delete()
        for _ in range(target - len(there)):
            self._make()
        self.clock.after(0.5, self._scale)

    def _stands(self, kubelet: Kubelet) -> bool:
        pod = kubelet.object
        return pod is not None and not pod.terminating and not pod.ended

    def _make(self) -> None:
        self._made += 1
        taken = self.api.pods
        names = (f"orders-{n}" if self.stable_names else f"orders-{self._made:03d}" for n in range(1000))
        name = next((name for name in names if name not in taken), None)
        if name:
            self.kubelets[name] = Kubelet(self, name, f"uid-{self._made}")

    def is_new(self, name: str) -> bool:
        """Whether a pod is so young that a cache may not know it."""
        return name in self.kubelets and self.clock.now - self.kubelets[name].born < 20

    def roll(self) -> None:
        """Replace every pod, one after another, each after its successor is ready."""
        self.background(self._roll(list(self.kubelets.values())))

    def _roll(self, old: list[Kubelet]) -> Work:
        for kubelet in old:
            if not self._stands(kubelet):
                continue
            self.surge += 1
            yield 1.0
            for _ in range(30):
                ready = [it for it in self.kubelets.values() if self._stands(it) and it.object and it.object.ready]
                if len(ready) >= self.replicas + self.surge:
                    break
                yield 0.5
            self.surge -= 1
            kubelet.delete()
            yield 0.2

    def background(self, work: Work) -> None:
        """Let work go on that nobody can stop."""
        Process(self.clock).spawn(work)

    def reported(self, kubelet: Kubelet) -> None:
        """Answer the long polls that wait for this pod's report."""
        for operator in self.operators:
            operator.after(0.0, partial(operator.reported, kubelet.name))

    def asked_to_drain(self, holder: Holder) -> None:
        """Carry the operator's request to a terminating member."""
        kubelet = self.kubelets.get(holder.name)
        if kubelet and kubelet.uid == holder.uid and kubelet.sidecar and not kubelet.cut_off:
            kubelet.sidecar.drain(final=True)

    # Operators.

    def leads(self, operator: Operator) -> bool:
        """Whether an operator believes that it leads."""
        return operator is self.leader or self.clock.now < self.both_lead_until

    def arm_crash(self, points: int) -> None:
        """Let the leader crash at one of its next writes, before or after it."""
        self._crash_in = points

    def crash_point(self, operator: Operator) -> None:
        """Be where an operator may crash."""
        if self._crash_in and operator is self.leader:
            self._crash_in -= 1
            if not self._crash_in:
                self.crash(operator)

    def crash(self, operator: Operator) -> None:
        """Lose an operator; it comes back, and it or the other one leads."""
        place = self.operators.index(operator)
        self.operators[place] = restarted(operator)
        if operator is self.leader:
            self.leader = None
            successor = self.chance.choice([place, 1 - place])
            self.clock.after(self.chance.choice([0.5, 3.0, 15.0]), partial(self._elect_at, successor))

    def freeze_leader(self, seconds: float) -> None:
        """Stop the leader; another one leads before it goes on, and it finishes what it had begun."""
        leader = self.leader
        if leader:
            leader.freeze()
            other = self.operators[1 - self.operators.index(leader)]
            self.clock.after(15.0, lambda: self._elect(other))
            self.clock.after(seconds, leader.thaw)

    def _elect_at(self, place: int) -> None:
        self._elect(self.operators[place])

    def _elect(self, operator: Operator) -> None:
        alive = operator if operator.alive else self.operators[0]
        self.leader = alive
        alive.wake()

    def crash_leader(self) -> None:
        """Lose whoever leads."""
        if self.leader:
            self.crash(self.leader)

    def hurry(self) -> None:
        """Let every kubelet be as quick as it is."""
        for kubelet in self.kubelets.values():
            kubelet.slow = 1.0

    def settle(self) -> None:
        """End every trouble."""
        self.calm = True
        self.api.down = self.broker.failing = self.bad_watch = self.silent_watch = self.paused = False
        self.bad_policy = self.bad_spec = False
        self.broker.hidden.clear()
        self.broker.foreigners = ()
        self._crash_in = 0
        self.replicas = max(self.replicas, 1)
        if self.weights is None:
            self.weights = {}
        self.hurry()
        self.change(paused=False)
