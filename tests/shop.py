"""A group's fleet computed by the operator's own classes, for examples in the docs: planned, sampled and presented.

Only the environment is simulated: pods that start and obey assignments, and the offsets of consumed messages.
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

STEP = 0.6  # seconds between two reconciles
HANDOVER_STEPS = 8  # enough for all handovers of a join to end
SAMPLES = 6
CAUGHT_UP = (0, 40)  # a queue's final lag, and its new messages per sample
SAMPLE_SECONDS = 15.0  # between two samples
LEADER = schema.OperatorInfo("rota-0", "0.1.0", leads=True)
BODY: dict[str, Any] = {"broker": {"rocketmq": {"nameServers": ["rmq:9876"]}}, "policyRef": {"name": "steady"}}


class ConsumerFleet:
    """One group; `began` is its start in seconds since 1970."""

    def __init__(self, name: str, queues: int, began: float, **subscription: str) -> None:
        self.name = name
        self.now = began
        self._version = 0
        self.group = Group("shop", name)
        self.tracker = RebalanceTracker()
        spec = {**BODY, "subscriptions": [{"topic": name, **subscription}]}
        policy = CustomResource(Metadata("steady", namespace="shop"), {"strategy": "Sticky"})
        self.group.set_spec(CustomResource(Metadata(name, uid="1", namespace="shop"), spec), policy)
        self.group.assignment.was_everything_refetched = True
        self.queues = [Queue(name, "broker-a", number) for number in range(queues)]
        retries = Queue(RETRY_TOPIC_PREFIX + name, "broker-a", 0)
        self.broker = BrokerState(
            {name: QueueView(tuple(self.queues), 1000.0), retries.topic: QueueView((retries,), 1000.0)}, ()
        )
        self.lag = GroupLag({})
        self._retries = retries
        self.clients: dict[str, OnlineConsumer] = {}
        self._problems: dict[str, dict[str, str]] = {}

    def join(self, *numbers: int) -> None:
        """Add members, and reconcile until all handovers have ended."""
        for number in numbers:
            self._create_pod(f"m-{number}", f"5b3e9f0{number}", f"10.0.0.{number + 1}")
        for _ in range(HANDOVER_STEPS):
            self._step()

    def add_unmanaged_consumer(self, client: str, address: str, language: str, version: str) -> None:
        """Add an unmanaged consumer."""
        self.broker = replace(self.broker, unmanaged_ids=(client,))
        self.clients[client] = OnlineConsumer(client, address, language, version)
        for _ in range(HANDOVER_STEPS):
            self._step()

    def _create_pod(self, name: str, uid: str, address: str) -> None:
        mount = {"name": "it", "mountPath": "/etc/rota"}
        labels = {"rota.dev/group": self.name}
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

    def _report(self, name: str) -> None:
        document = self.group.stored_assignment.document
        pod_state = self.group.pods[name]
        generation = document.generation if document else 0
        held = {holder.name: queues for holder, queues in self.group.stored_assignment.shares.items()}.get(name, ())
        uid = pod_state.pod.metadata.uid
        report = Report(
            member=name, uid=uid, generation=generation, held=to_ranges(held), troubles=self._problems.get(name, {})
        )
        pod_state.record_report(report, self.now, self.now)

    def _step(self) -> None:
        """Let all members report that they have obeyed, and reconcile once."""
        for name in self.group.pods:
            self._report(name)
        self.now += STEP
        planned = plan(self.group.snapshot(self.now, self.broker, {}), self.now)
        if planned.document:
            self._version += 1
            texts = {part: text for part, text in planned.config_map_data.items() if isinstance(text, str)}
            texts |= {SETTINGS_KEY: self.group.desired_settings}
            labels = {"rota.dev/group": self.name}
            owners = [OwnerReference("1", controller=True)]
            metadata = Metadata(assignment_name(self.name), "2", "shop", str(self._version), labels=labels)
            self.group.set_assignment(ConfigMap(msgspec.structs.replace(metadata, owner_references=owners), texts))
        if self.group.body:
            self.group.body = msgspec.structs.replace(self.group.body, status=dict(planned.status))
        obeyed_generations = {
            holder: self._generation_of(holder.name) for holder in self.group.stored_assignment.shares
        }
        self.tracker.record_plan(planned, self.group.stored_assignment.document, obeyed_generations, self.now)

    def _generation_of(self, name: str) -> int:
        pod_state = self.group.pods.get(name)
        return pod_state.decoded_report.report.generation if pod_state and pod_state.decoded_report else 0

    def report_problem(self, name: str, reason: str, sentence: str) -> None:
        """Let a member report a problem, and reconcile once."""
        self._problems[name] = {reason: sentence}
        self._step()

    def sample_offsets(self, behind: dict[int, tuple[int, int]]) -> None:
        """Fill the lag history; `behind` maps queue ids to the final lag and the new messages per sample."""
        history, retries = LagHistory(), LagHistory()
        for number in range(SAMPLES):
            samples = {queue.id: self._sample(number, *behind.get(queue.id, CAUGHT_UP)) for queue in self.queues}
            history.add_sample(SAMPLE_SECONDS * number, samples, frozenset(samples))
            retries.add_sample(SAMPLE_SECONDS * number, {0: QueueSample(0, 0, 0)}, frozenset({0}))
        start_from = self.group.resolved_spec.spec.start_from if self.group.resolved_spec.spec else START_EARLIEST
        lags = history.compute_queue_lags(start_from)
        lag_by_queue: dict[Queue, QueueLag] = {queue: lags[queue.id] for queue in self.queues}
        lag_by_queue[self._retries] = retries.compute_queue_lags(START_EARLIEST)[0]
        self.lag = GroupLag(lag_by_queue, 2, datetime.now(UTC).timestamp())

    @staticmethod
    def _sample(number: int, final_lag: int, new_messages: int) -> QueueSample:
        """Return a sample of a queue whose lag grows from 0 in the first sample to `final_lag` in the last."""
        end_offset = 500 + new_messages * number
        return QueueSample(0, end_offset, end_offset - final_lag * number // (SAMPLES - 1))

    @property
    def facts(self) -> GroupFacts:
        """The group's facts, as the operator keeps them."""
        return GroupFacts(self.group, self.tracker, self.broker, self.lag)

    def detail(self) -> schema.GroupDetail:
        """Return the group's details, as the operator's API serves them."""
        return presenters.present_detail(LEADER, self.facts, self.clients)

    def explain(self, *queues: Queue) -> schema.OwnerReasons:
        """Explain the owners of queues, as the operator's API does."""
        explanations = explain_owners(self.group.snapshot(self.now, self.broker, {}), self.now, queues)
        summary = presenters.present_summary(self.facts)
        reasons = [
            schema.QueueExplanation(*explanation.queue, explanation.owner, explanation.sentence)
            for explanation in explanations
        ]
        return schema.OwnerReasons(summary.strategy, summary.generation, reasons, summary.last_rebalance)
