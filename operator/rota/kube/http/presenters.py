"""What is known of groups, put into the values that page and command line show."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rota.brokers.port import Client, Settings
from rota.deliveries import describe_message
from rota.documents import Assignment
from rota.kube.brokers.lag import lag_totals
from rota.kube.brokers.lag.lag_history import NOTHING
from rota.kube.http import schema
from rota.kube.state import rebalance
from rota.kube.state.pod_state import client_id
from rota.kube.telemetry.group_gauges import Fact
from rota.model import RETRY, Holder, Queue
from rota.spec.consumer_settings import ConsumerSettings, settings_of
from rota.spec.resolved import read_settings, settings_digest
from rota.timestamps import format_time


def summary(it: Fact) -> schema.Summary:
    """Return a group in a line."""
    return _summary(it, lag_totals.of_group(it.group, it.broker, it.lag))


def _summary(it: Fact, topics: Mapping[str, lag_totals.TopicLag]) -> schema.Summary:
    status = it.status or it.group.written
    conditions = {found["type"]: found for found in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    document = it.group.record.document
    return schema.Summary(
        namespace=it.group.namespace,
        name=it.group.name,
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
        dead=it.lag.dead,
        delay=lag_totals.delay(topics),
        estimate=any(topic.estimate for topic in topics.values()),
        verdicts=dict(lag_totals.verdicts(topics, it.lag)),
        delayed=it.group.deliveries.delayed,
        last_rebalance=next(iter(it.tally.rebalances), None) or _told(status.get("lastRebalance")),
    )


def _strategy(document: Assignment | None) -> str:
    """Return what queues are shared by; where every member has all of them, there is nothing to share."""
    if document is None:
        return ""
    return "-" if document.everyone is not None else document.strategy


def detail(
    operator: schema.Operator, it: Fact, clients: Mapping[str, Client], settings: Mapping[str, Settings] | None = None
) -> schema.Detail:
    """Return all that is known of a group."""
    topics = lag_totals.of_group(it.group, it.broker, it.lag)
    conditions = (it.status or it.group.written).get("conditions") or ()
    return schema.Detail(
        operator=operator,
        summary=_summary(it, topics),
        at_broker=it.group.at_broker,
        conditions=[_condition(found) for found in conditions],
        members=[*_members(it, clients), *_foreigners(it, clients)],
        topics=[
            schema.Topic(name, found.kind, len(found.queues), found.lag, found.delay, found.estimate)
            for name, found in topics.items()
        ],
        queues=_queues(it, topics),
        rebalances=list(it.tally.rebalances),
        looked_at=None if it.lag.at is None else format_time(it.lag.at),
        settings=[
            schema.Settings(broker, found.enabled, found.attempts, found.retry_queues)
            for broker, found in sorted((settings or {}).items())
        ],
    )


def _told(last: Mapping[str, Any] | None) -> rebalance.Rebalance | None:
    """Return a rebalance of which only the status tells."""
    if not last:
        return None
    return rebalance.Rebalance(last["reason"], "", last["at"], 0, last.get("moved", 0), seconds=last.get("seconds"))


def _condition(it: Mapping[str, Any]) -> schema.Condition:
    since = it.get("lastTransitionTime", "")
    return schema.Condition(it["type"], it["status"], it["reason"], it.get("message", ""), since)


def _members(it: Fact, clients: Mapping[str, Client]) -> list[schema.Member]:
    shares = it.group.record.shares
    document = it.group.record.document
    everyone = document.everyone if document else None
    stored = it.group.record.settings
    in_force, digest = _stored_settings(stored), settings_digest(stored)
    found = []
    for name, known in sorted(it.group.pods.items()):
        pod = known.pod
        holder = Holder(name, pod.metadata.uid)
        mine = everyone if everyone is not None and holder in shares else shares.get(holder, ())
        client = clients.get(client_id(pod))
        rates = [it.lag.queues.get(queue, NOTHING).worked for queue in mine]  # brokers do not know everyone's
        found.append(
            schema.Member(
                name=name,
                client_id=client_id(pod),
                origin="Rota",
                state=str(it.tally.plan.standings.get(name, "Ready" if pod.ready else "Joining")),
                address=pod.status.pod_ip or "",
                version=client.version if client else "",
                language=client.language if client else "",
                queues=len(mine),
                generation=known.heard.report.generation if known.heard else None,
                rate=None if None in rates else sum(rate for rate in rates if rate is not None),
                troubles=[*known.heard.report.troubles.values()] if known.heard else [],
                queue_states=known.heard.report.states if known.heard else {},
                failing=[describe_message(message) for message in it.group.deliveries.failing_of(pod.metadata.uid)],
                **_settings(in_force if known.heard and known.heard.report.settings == digest else None),
            )
        )
    return found


def _stored_settings(text: str) -> ConsumerSettings | None:
    try:
        return settings_of(read_settings(text))
    except ValueError:  # there are none yet, or a later operator wrote them
        return None


def _settings(settings: ConsumerSettings | None) -> dict[str, Any]:
    """Return the fields of a member that show its settings."""
    if settings is None:
        return {}
    shown = [it for it in settings.subscriptions if not it.topic.startswith(RETRY)]
    subscriptions = [schema.Subscription(it.topic, it.expression, it.type) for it in shown]
    return {"subscriptions": subscriptions, "model": settings.model, "start": settings.start}


def _foreigners(it: Fact, clients: Mapping[str, Client]) -> list[schema.Member]:
    found = []
    for name in dict.fromkeys(it.broker.foreigners or ()):  # ids that several wear are told of by a verdict
        client = clients.get(name) or Client(name, "")
        member = schema.Member(name, name, "Foreign", "Foreign", client.address, client.version, client.language)
        found.append(msgspec.structs.replace(member, **_settings(it.broker.unmanaged.get(name))))
    return found


def _queues(it: Fact, topics: Mapping[str, lag_totals.TopicLag]) -> list[schema.Queue]:
    document = it.group.record.document
    owners = it.group.record.owners
    releasing = document.releasing if document else {}
    forced = document.forced if document else {}
    everyone = frozenset(document.everyone or ()) if document else frozenset()
    states: dict[Queue, schema.State] = dict.fromkeys(it.tally.plan.foreign, "Foreign")
    states |= dict.fromkeys(everyone, "Everyone")
    states |= dict.fromkeys(owners, "Owned")
    states |= dict.fromkeys(releasing, "Releasing")
    retries = RETRY + it.group.at_broker
    seen = {queue for topic in topics.values() for queue in topic.queues}
    found = []
    for queue in sorted(seen | states.keys()):
        release, judged = releasing.get(queue), it.lag.queues.get(queue, NOTHING)
        topic = topics.get(queue.topic)
        found.append(
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
    return found
