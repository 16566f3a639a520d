"""Converts the state of groups to the values that the page and the command line show."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rota.brokers.port import BrokerGroupSettings, OnlineConsumer
from rota.deliveries import describe_message
from rota.documents import Assignment
from rota.kube.brokers.lag import lag_totals
from rota.kube.brokers.lag.lag_history import NOTHING
from rota.kube.http import schema
from rota.kube.state import rebalance
from rota.kube.state.pod_state import client_id
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.model import RETRY, Holder, Queue
from rota.spec.consumer_settings import ConsumerSettings, settings_of
from rota.spec.resolved import read_settings, settings_digest
from rota.timestamps import format_time


def summary(fact: GroupFacts) -> schema.Summary:
    """Return the summary of a group: its row in the list."""
    return _summary(fact, lag_totals.of_group(fact.group, fact.broker, fact.lag))


def _summary(fact: GroupFacts, topics: Mapping[str, lag_totals.TopicLag]) -> schema.Summary:
    status = fact.status or fact.group.written
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    document = fact.group.record.document
    return schema.Summary(
        namespace=fact.group.namespace,
        name=fact.group.name,
        ready=ready.get("status") == "True",
        reason=ready.get("reason", ""),
        message=ready.get("message", ""),
        moving=bool(document and document.releasing) or conditions.get("Progressing", {}).get("status") == "True",
        members=status.get("members", 0),
        queues=status.get("queues", 0),
        idle=status.get("idleMembers", 0),
        unowned=status.get("unownedQueues", 0),
        generation=document.generation if document else 0,
        strategy=_strategy(document),
        lag=lag_totals.total(topics, "Subscribed"),
        retrying=lag_totals.total(topics, "Retry"),
        dead=fact.lag.dead,
        delay=lag_totals.delay(topics),
        estimate=any(topic.estimate for topic in topics.values()),
        verdicts=dict(lag_totals.verdicts(topics, fact.lag)),
        delayed=fact.group.deliveries.delayed,
        last_rebalance=next(iter(fact.tally.rebalances), None) or _rebalance_from_status(status.get("lastRebalance")),
    )


def _strategy(document: Assignment | None) -> str:
    """Return the strategy of an assignment; `-` for a Broadcasting group, where every member has all queues."""
    if document is None:
        return ""
    return "-" if document.everyone is not None else document.strategy


def detail(
    operator: schema.Operator,
    fact: GroupFacts,
    clients: Mapping[str, OnlineConsumer],
    settings: Mapping[str, BrokerGroupSettings] | None = None,
) -> schema.Detail:
    """Return all details of a group."""
    topics = lag_totals.of_group(fact.group, fact.broker, fact.lag)
    conditions = (fact.status or fact.group.written).get("conditions") or ()
    return schema.Detail(
        operator=operator,
        summary=_summary(fact, topics),
        at_broker=fact.group.at_broker,
        conditions=[_condition(condition) for condition in conditions],
        members=[*_members(fact, clients), *_unmanaged_consumers(fact, clients)],
        topics=[
            schema.Topic(name, topic.kind, len(topic.queues), topic.lag, topic.delay, topic.estimate)
            for name, topic in topics.items()
        ],
        queues=_queues(fact, topics),
        rebalances=list(fact.tally.rebalances),
        looked_at=None if fact.lag.at is None else format_time(fact.lag.at),
        settings=[
            schema.Settings(broker, at_broker.enabled, at_broker.attempts, at_broker.retry_queues)
            for broker, at_broker in sorted((settings or {}).items())
        ],
    )


def _rebalance_from_status(last: Mapping[str, Any] | None) -> rebalance.Rebalance | None:
    """Return the last rebalance as the group's status has it, for a process without its history."""
    if not last:
        return None
    return rebalance.Rebalance(last["reason"], "", last["at"], 0, last.get("moved", 0), seconds=last.get("seconds"))


def _condition(raw: Mapping[str, Any]) -> schema.Condition:
    since = raw.get("lastTransitionTime", "")
    return schema.Condition(raw["type"], raw["status"], raw["reason"], raw.get("message", ""), since)


def _members(fact: GroupFacts, clients: Mapping[str, OnlineConsumer]) -> list[schema.Member]:
    shares = fact.group.record.shares
    document = fact.group.record.document
    everyone = document.everyone if document else None
    stored = fact.group.record.settings
    in_force, digest = _stored_settings(stored), settings_digest(stored)
    members = []
    for name, pod_state in sorted(fact.group.pods.items()):
        pod = pod_state.pod
        holder = Holder(name, pod.metadata.uid)
        queues = everyone if everyone is not None and holder in shares else shares.get(holder, ())
        client = clients.get(client_id(pod))
        rates = [fact.lag.queues.get(queue, NOTHING).worked for queue in queues]  # none if Broadcasting
        members.append(
            schema.Member(
                name=name,
                client_id=client_id(pod),
                origin="Rota",
                state=str(fact.tally.plan.standings.get(name, "Ready" if pod.ready else "Joining")),
                address=pod.status.pod_ip or "",
                version=client.version if client else "",
                language=client.language if client else "",
                queues=len(queues),
                generation=pod_state.heard.report.generation if pod_state.heard else None,
                rate=None if None in rates else sum(rate for rate in rates if rate is not None),
                troubles=[*pod_state.heard.report.troubles.values()] if pod_state.heard else [],
                queue_states=pod_state.heard.report.states if pod_state.heard else {},
                failing=[describe_message(message) for message in fact.group.deliveries.failing_of(pod.metadata.uid)],
                **_settings(in_force if pod_state.heard and pod_state.heard.report.settings == digest else None),
            )
        )
    return members


def _stored_settings(text: str) -> ConsumerSettings | None:
    try:
        return settings_of(read_settings(text))
    except ValueError:  # not written yet, or written by a later version of the operator
        return None


def _settings(settings: ConsumerSettings | None) -> dict[str, Any]:
    """Return the fields of a member for its settings; none if the settings are not known."""
    if settings is None:
        return {}
    shown = [entry for entry in settings.subscriptions if not entry.topic.startswith(RETRY)]
    subscriptions = [schema.Subscription(entry.topic, entry.expression, entry.type) for entry in shown]
    return {"subscriptions": subscriptions, "model": settings.model, "start": settings.start}


def _unmanaged_consumers(fact: GroupFacts, clients: Mapping[str, OnlineConsumer]) -> list[schema.Member]:
    members = []
    for name in dict.fromkeys(fact.broker.foreigners or ()):  # once each: a verdict reports duplicate ids
        client = clients.get(name) or OnlineConsumer(name, "")
        member = schema.Member(name, name, "Foreign", "Foreign", client.address, client.version, client.language)
        members.append(msgspec.structs.replace(member, **_settings(fact.broker.unmanaged.get(name))))
    return members


def _queues(fact: GroupFacts, topics: Mapping[str, lag_totals.TopicLag]) -> list[schema.Queue]:
    document = fact.group.record.document
    owners = fact.group.record.owners
    releasing = document.releasing if document else {}
    forced = document.forced if document else {}
    everyone = frozenset(document.everyone or ()) if document else frozenset()
    states: dict[Queue, schema.State] = dict.fromkeys(fact.tally.plan.foreign, "Foreign")
    states |= dict.fromkeys(everyone, "Everyone")
    states |= dict.fromkeys(owners, "Owned")
    states |= dict.fromkeys(releasing, "Releasing")
    retries = RETRY + fact.group.at_broker
    routed = {queue for topic in topics.values() for queue in topic.queues}
    queues = []
    for queue in sorted(routed | states.keys()):
        release, judged = releasing.get(queue), fact.lag.queues.get(queue, NOTHING)
        topic = topics.get(queue.topic)
        queues.append(
            schema.Queue(
                topic=queue.topic,
                broker=queue.broker,
                id=queue.id,
                kind="Retry" if queue.topic == retries else "Subscribed",
                state=states.get(queue, "Free"),
                owner=release.holder.name if release else owners.get(queue),
                to=release.to if release else None,
                forced=queue in forced,
                first=judged.first,
                last=judged.last,
                committed=judged.committed,
                lag=judged.lag,
                delay=judged.delay,
                verdict=str(judged.verdict) if judged.verdict else None,
                estimate=bool(topic and topic.estimate),
            )
        )
    return queues
