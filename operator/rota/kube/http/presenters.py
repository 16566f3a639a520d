"""Converts the state of groups to the values of `schema`, whose names the v1 API has frozen (Foreign, verdict …)."""

from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any

from rota.brokers.port import BrokerGroupSettings, OnlineConsumer
from rota.deliveries import describe_message
from rota.documents import Assignment
from rota.kube.brokers.lag import lag_totals
from rota.kube.http import schema
from rota.kube.state import rebalance
from rota.kube.state.pod_state import client_id
from rota.kube.telemetry.group_gauges import GroupFacts
from rota.model import RETRY_TOPIC_PREFIX, Holder, Queue
from rota.spec.consumer_settings import ConsumerSettings, settings_of
from rota.spec.resolved import decode_settings, settings_digest
from rota.timestamps import format_time


def present_summary(facts: GroupFacts) -> schema.GroupSummary:
    """Return the summary of a group: its row in the list."""
    return _summary(facts, lag_totals.group_lag_by_topic(facts.group, facts.broker, facts.lag))


def _summary(facts: GroupFacts, topics: Mapping[str, lag_totals.TopicLag]) -> schema.GroupSummary:
    status = _status_of(facts)
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    document = facts.group.stored_assignment.document
    return schema.GroupSummary(
        namespace=facts.group.namespace,
        name=facts.group.name,
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
        lag=lag_totals.total_lag(topics, "Subscribed"),
        retrying=lag_totals.total_lag(topics, "Retry"),
        dead=facts.lag.dead_letters,
        delay=lag_totals.max_delay(topics),
        estimate=any(topic.estimate for topic in topics.values()),
        verdicts=dict(lag_totals.count_lag_states(topics, facts.lag)),
        delayed=facts.group.deliveries.delayed_messages,
        last_rebalance=next(iter(facts.tracker.rebalances), None)
        or _rebalance_from_status(status.get("lastRebalance")),
    )


def _status_of(facts: GroupFacts) -> Mapping[str, Any]:
    """Return the status as of the last plan; before this operator's first plan, the published one."""
    return facts.status or facts.group.published_status


def _strategy(document: Assignment | None) -> str:
    """Return the strategy of an assignment; `-` for a Broadcasting group, where every member has all queues."""
    if document is None:
        return ""
    return "-" if document.is_broadcasting else document.strategy


def present_detail(
    operator: schema.OperatorInfo,
    facts: GroupFacts,
    consumers: Mapping[str, OnlineConsumer],
    settings_by_broker: Mapping[str, BrokerGroupSettings] | None = None,
) -> schema.GroupDetail:
    """Return all details of a group."""
    topics = lag_totals.group_lag_by_topic(facts.group, facts.broker, facts.lag)
    conditions = _status_of(facts).get("conditions") or ()
    return schema.GroupDetail(
        operator=operator,
        summary=_summary(facts, topics),
        at_broker=facts.group.consumer_group,
        conditions=[*map(_condition, conditions)],
        members=[*_members(facts, consumers), *_unmanaged_consumers(facts, consumers)],
        topics=[*starmap(_topic, topics.items())],
        queues=_queues(facts, topics),
        rebalances=list(facts.tracker.rebalances),
        looked_at=None if facts.lag.sampled_at is None else format_time(facts.lag.sampled_at),
        settings=[*starmap(_broker_settings, sorted((settings_by_broker or {}).items()))],
    )


def _rebalance_from_status(last: Mapping[str, Any] | None) -> rebalance.Rebalance | None:
    """Return the last rebalance from the group's status (without message and generation), as after a restart."""
    if not last:
        return None
    return rebalance.Rebalance(
        reason=last["reason"],
        message="",
        at=last["at"],
        generation=0,
        moved=last.get("moved", 0),
        seconds=last.get("seconds"),
    )


def _condition(raw: Mapping[str, Any]) -> schema.ConditionInfo:
    since = raw.get("lastTransitionTime", "")
    return schema.ConditionInfo(raw["type"], raw["status"], raw["reason"], raw.get("message", ""), since)


def _topic(name: str, topic: lag_totals.TopicLag) -> schema.TopicInfo:
    return schema.TopicInfo(name, topic.kind, len(topic.queues), topic.lag, topic.delay, topic.estimate)


def _broker_settings(broker: str, settings: BrokerGroupSettings) -> schema.BrokerSettings:
    return schema.BrokerSettings(broker, settings.consume_enabled, settings.max_attempts, settings.retry_queues)


def _members(facts: GroupFacts, consumers: Mapping[str, OnlineConsumer]) -> list[schema.MemberInfo]:
    shares = facts.group.stored_assignment.shares
    document = facts.group.stored_assignment.document
    broadcast_queues = document.everyone if document else None
    stored_settings = facts.group.stored_assignment.settings
    current_settings = _decode_settings(stored_settings)
    current_digest = settings_digest(stored_settings)  # a member that reports this digest has read these settings
    members = []
    for name, pod_state in sorted(facts.group.pods.items()):
        pod = pod_state.pod
        report = pod_state.decoded_report.report if pod_state.decoded_report else None
        holder = Holder(name, pod.metadata.uid)
        queues = shares.get(holder, ())
        if broadcast_queues is not None and holder in shares:
            queues = broadcast_queues
        has_current_settings = report is not None and report.settings == current_digest
        client = consumers.get(client_id(pod))
        state_before_plan = "Ready" if pod.ready else "Joining"  # shown until a plan has classified the pod
        rates = [facts.lag.queue_lag(queue).consumed_rate for queue in queues]
        members.append(
            schema.MemberInfo(
                name=name,
                client_id=client_id(pod),
                origin="Rota",
                state=str(facts.tracker.last_plan.member_states.get(name, state_before_plan)),
                address=pod.status.pod_ip or "",
                version=client.version if client else "",
                language=client.language if client else "",
                queues=len(queues),
                generation=report.generation if report else None,
                rate=_sum_rates(rates),
                troubles=[*report.troubles.values()] if report else [],
                queue_states=report.states if report else {},
                failing=[*map(describe_message, facts.group.deliveries.failing_messages_of(pod.metadata.uid))],
                **_settings_fields(current_settings if has_current_settings else None),
            )
        )
    return members


def _sum_rates(rates: Sequence[float | None]) -> float | None:
    """Return the sum of rates; None if any of them is not known."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None


def _decode_settings(text: str) -> ConsumerSettings | None:
    try:
        return settings_of(decode_settings(text))
    except ValueError:  # not written yet, or written by a later version of the operator
        return None


def _settings_fields(settings: ConsumerSettings | None) -> dict[str, Any]:
    """Return the fields of a `MemberInfo` that show its settings; none if the settings are not known."""
    if settings is None:
        return {}
    subscribed = [entry for entry in settings.subscriptions if not entry.topic.startswith(RETRY_TOPIC_PREFIX)]
    subscriptions = [schema.SubscriptionInfo(entry.topic, entry.expression, entry.type) for entry in subscribed]
    return {"subscriptions": subscriptions, "model": settings.message_model, "start": settings.start_position}


def _unmanaged_consumers(facts: GroupFacts, consumers: Mapping[str, OnlineConsumer]) -> list[schema.MemberInfo]:
    members = []
    for name in dict.fromkeys(facts.broker.unmanaged_ids or ()):  # once each: a condition reports duplicate ids
        client = consumers.get(name) or OnlineConsumer(name, "")
        members.append(
            schema.MemberInfo(
                name=name,
                client_id=name,
                origin="Foreign",
                state="Foreign",
                address=client.address,
                version=client.version,
                language=client.language,
                **_settings_fields(facts.broker.unmanaged_settings.get(name)),
            )
        )
    return members


def _queues(facts: GroupFacts, topics: Mapping[str, lag_totals.TopicLag]) -> list[schema.QueueDetail]:
    document = facts.group.stored_assignment.document
    owners = facts.group.stored_assignment.owners
    releasing = document.releasing if document else {}
    forced = document.forced if document else {}
    broadcast_queues = (document.everyone or ()) if document else ()
    # A queue may be in several of these collections; the last one counts, so one that is being released is Releasing.
    states: dict[Queue, schema.QueueOwnership] = dict.fromkeys(facts.tracker.last_plan.unmanaged_queues, "Foreign")
    states |= dict.fromkeys(broadcast_queues, "Everyone")
    states |= dict.fromkeys(owners, "Owned")
    states |= dict.fromkeys(releasing, "Releasing")
    retry_topic = RETRY_TOPIC_PREFIX + facts.group.consumer_group
    queues_by_topic = [topic.queues for topic in topics.values()]
    queues = []
    for queue in sorted(states.keys() | set().union(*queues_by_topic)):
        release = releasing.get(queue)
        queue_lag = facts.lag.queue_lag(queue)
        topic = topics.get(queue.topic)
        queues.append(
            schema.QueueDetail(
                topic=queue.topic,
                broker=queue.broker,
                id=queue.id,
                kind="Retry" if queue.topic == retry_topic else "Subscribed",
                state=states.get(queue, "Free"),
                owner=release.holder.name if release else owners.get(queue),
                to=release.to if release else None,
                forced=queue in forced,
                first=queue_lag.min_offset,
                last=queue_lag.max_offset,
                committed=queue_lag.committed,
                lag=queue_lag.lag,
                delay=queue_lag.delay,
                verdict=str(queue_lag.lag_state) if queue_lag.lag_state else None,
                estimate=bool(topic and topic.estimate),
            )
        )
    return queues
