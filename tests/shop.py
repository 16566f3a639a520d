"""A group's fleet as our own code makes it, for examples in the docs: planned, obeyed, looked at, and shown.

Nothing is made up but what the world outside does: pods come, they obey what is written, and messages are worked.
"""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from rota.brokers.port import OnlineConsumer
from rota.kube.brokers.lag.lag_history import LagHistory, QueueLag, QueueSample
from rota.kube.brokers.lag.lag_merge import START_EARLIEST
from rota.kube.brokers.lag.lag_poller import GroupLag
from rota.kube.client.objects import (
    SETTINGS_KEY,
    ConfigMap,
    CustomResource,
    Metadata,
    OwnerReference,
    Pod,
    assignment_name,
)
from rota.kube.http import presenters, schema
from rota.kube.state.broker_state import BrokerState
from rota.kube.state.group import Group
from rota.kube.state.pod_state import client_id
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.kube.telemetry.rebalances import RebalanceTracker
from rota.model import RETRY_TOPIC_PREFIX, Queue
from rota.planner import QueueView, explain_owners, plan
from rota.ranges import to_ranges
from rota.reports import Report

STEP = 0.6  # seconds from one round to the next
LOOKS, EVERY = 6, 15.0
LEADS = schema.Operator("rota-0", "0.1.0", leads=True)
BODY: dict[str, Any] = {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "policyRef": {"name": "steady"}}


class ConsumerFleet:
    """One group; `began`: when, in seconds since 1970."""

    def __init__(self, name: str, queues: int, began: float, **subscription: str) -> None:
        self.name, self.now, self._version = name, began, 0
        self.group, self.tally = Group("shop", name), RebalanceTracker()
        spec = {**BODY, "subscriptions": [{"topic": name, **subscription}]}
        policy = CustomResource(Metadata("steady", namespace="shop"), {"strategy": "Sticky"})
        self.group.set_spec(CustomResource(Metadata(name, uid="1", namespace="shop"), spec), policy)
        self.group.revalidated = True
        self.queues = [Queue(name, "broker-a", number) for number in range(queues)]
        retries = Queue(RETRY_TOPIC_PREFIX + name, "broker-a", 0)
        self.broker = BrokerState(
            {name: QueueView(tuple(self.queues), 1000.0), retries.topic: QueueView((retries,), 1000.0)}, ()
        )
        self.lag, self._retries = GroupLag({}), retries
        self.clients: dict[str, OnlineConsumer] = {}
        self._troubles: dict[str, dict[str, str]] = {}

    def join(self, *numbers: int) -> None:
        """Have members come; everybody obeys what is written from then on, until nothing moves any more."""
        for number in numbers:
            self._come(f"m-{number}", f"5b3e9f0{number}", f"10.0.0.{number + 1}")
        for _ in range(8):
            self._step()

    def meets(self, client: str, address: str, language: str, version: str) -> None:
        """Have a consumer come that is not Rota's."""
        self.broker = replace(self.broker, unmanaged_ids=(client,))
        self.clients[client] = OnlineConsumer(client, address, language, version)
        for _ in range(8):
            self._step()

    def _come(self, name: str, uid: str, address: str) -> None:
        mount, labels = {"name": "it", "mountPath": "/etc/rota"}, {"rota.dev/group": self.name}
        body = {
            "metadata": {"name": name, "namespace": "shop", "uid": uid, "labels": labels},
            "spec": {
                "initContainers": [{"name": "rota-sidecar", "volumeMounts": [mount]}],
                "volumes": [{"name": "it", "configMap": {"name": assignment_name(self.name)}}],
            },
            "status": {"podIP": address, "conditions": [{"type": "Ready", "status": "True"}]},
        }
        pod = msgspec.convert(body, Pod)
        self.group.pods.upsert(pod, self.now - 1000.0)
        self.clients[client_id(pod)] = OnlineConsumer(client_id(pod), f"{address}:41000", "PYTHON", "V5_3_3")

    def _says(self, name: str) -> None:
        document, known = self.group.stored_assignment.document, self.group.pods[name]
        generation = document.generation if document else 0
        held = {holder.name: queues for holder, queues in self.group.stored_assignment.shares.items()}.get(name, ())
        uid = known.pod.metadata.uid
        told = Report(
            member=name, uid=uid, generation=generation, held=to_ranges(held), troubles=self._troubles.get(name, {})
        )
        known.record_report(told, self.now, self.now)

    def _step(self) -> None:
        """Decide once, and have that obeyed."""
        for name in self.group.pods:
            self._says(name)
        self.now += STEP
        found = plan(self.group.snapshot(self.now, self.broker, {}), self.now)
        if found.document:
            self._version += 1
            texts = {part: text for part, text in found.config_map_data.items() if isinstance(text, str)}
            texts |= {SETTINGS_KEY: self.group.desired_settings}
            labels, owners = {"rota.dev/group": self.name}, [OwnerReference("1", controller=True)]
            metadata = Metadata(assignment_name(self.name), "2", "shop", str(self._version), labels=labels)
            self.group.set_assignment(ConfigMap(msgspec.structs.replace(metadata, owner_references=owners), texts))
        if self.group.body:
            self.group.body = msgspec.structs.replace(self.group.body, status=dict(found.status))
        heard = {it: self._obeyed(it.name) for it in self.group.stored_assignment.shares}
        self.tally.record_plan(found, self.group.stored_assignment.document, heard, self.now)

    def _obeyed(self, name: str) -> int:
        known = self.group.pods.get(name)
        return known.decoded_report.report.generation if known and known.decoded_report else 0

    def is_troubled(self, name: str, reason: str, sentence: str) -> None:
        """Have a member say what keeps it from working; that is planned for, too."""
        self._troubles[name] = {reason: sentence}
        self._step()

    def looked_at(self, behind: dict[int, tuple[int, int]]) -> None:
        """Look at offsets as often as is remembered; `behind`: by id, the lag and the messages that come in a look."""
        history, retries = LagHistory(), LagHistory()
        for look in range(LOOKS):
            seen = {it.id: self._seen(look, *behind.get(it.id, (0, 40))) for it in self.queues}
            history.add_sample(EVERY * look, seen, frozenset(seen))
            retries.add_sample(EVERY * look, {0: QueueSample(0, 0, 0)}, frozenset({0}))
        begins = self.group.resolved_spec.spec.start_from if self.group.resolved_spec.spec else START_EARLIEST
        judged: dict[Queue, QueueLag] = {queue: history.judge_queues(begins)[queue.id] for queue in self.queues}
        judged[self._retries] = retries.judge_queues(START_EARLIEST)[0]
        self.lag = GroupLag(judged, 2, datetime.now(UTC).timestamp())

    @staticmethod
    def _seen(look: int, lag: int, come: int) -> QueueSample:
        """Return a look at a queue that is so far behind at the last one, and was not at all at the first."""
        last = 500 + come * look
        return QueueSample(0, last, last - lag * look // (LOOKS - 1))

    @property
    def fact(self) -> GroupFacts:
        """What the operator knows of it."""
        return GroupFacts(self.group, self.tally, self.broker, self.lag)

    def detail(self) -> schema.Detail:
        """Return all about it, as the operator answers."""
        return presenters.present_detail(LEADS, self.fact, self.clients)

    def why(self, *queues: Queue) -> schema.Reasons:
        """Say why queues have their owners, as the operator answers."""
        found = explain_owners(self.group.snapshot(self.now, self.broker, {}), self.now, queues)
        said = presenters.present_summary(self.fact)
        reasons = [schema.QueueExplanation(*it.queue, it.owner, it.sentence) for it in found]
        return schema.Reasons(said.strategy, said.generation, reasons, said.last_rebalance)
