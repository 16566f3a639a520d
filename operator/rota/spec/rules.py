"""Validation rules of specs beyond field types: each mistake is a sentence that names the field.

`rota.spec` runs these rules after it has parsed a spec, and raises the first mistake.
"""

import re
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rota.spec import GroupSpec, PolicySpec, StrategyOptions, Subscription

MAX_QUEUES_PER_BROKER = 1_000_000  # queues of a topic on one broker; a higher id is taken for a mistyped one
# The broker's lock of an Orderly queue expires after 60 s. The sidecar starts deliveries only while the lock is at most
# 30 s old, so a delivery that takes at most 30 s ends before another member can lock the queue.
MAX_ORDERLY_TIMEOUT_SECONDS = 30.0
_NO_PODS = (0, "0%")  # limits of a rollout that allow no pod

# The base URL of an OTLP receiver: no credentials, query or fragment.
_RECEIVER_PATTERN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?(/[A-Za-z0-9._~%/-]*)?")


def group_mistakes(spec: "GroupSpec", name: str | None) -> Iterator[str]:
    """Yield the mistakes in a group's spec.

    `name` is the group's name at the broker, for the check of its retry and dead-letter topics; None: not checked.
    """
    yield from _consumption_mistakes(spec)
    yield from _workload_mistakes(spec)
    for index, subscription in enumerate(spec.subscriptions):
        if name and subscription.topic in {f"%RETRY%{name}", f"%DLQ%{name}"}:
            reason = "members read its retries anyway, and its dead letters are for another group"
            yield f"spec.subscriptions[{index}].topic {subscription.topic} is the group's own: {reason}; remove it"


def policy_mistakes(spec: "PolicySpec") -> Iterator[str]:
    """Yield the mistakes in a policy."""
    yield from _duration_mistakes(spec)
    yield from _by_config_mistakes(spec.options)
    yield from _room_mistakes(spec.options)


def _consumption_mistakes(spec: "GroupSpec") -> Iterator[str]:
    """Yield the mistakes about brokers, subscriptions and order."""
    tls = spec.broker.rocketmq.tls
    if not tls.enabled and (tls.ca_secret or tls.client_secret):
        yield "spec.broker.rocketmq.tls names a Secret although enabled is false; set it to true, or remove the Secret"
    topics = set(spec.topics)
    if len(topics) < len(spec.subscriptions):
        yield "spec.subscriptions names a topic twice; join the two expressions with ||"
    if not all(map(_selects_messages, spec.subscriptions)):
        yield "spec.subscriptions has an expression without a tag; write * for all messages"
    if spec.is_orderly and spec.delivery.mode == "Pull":
        yield "spec.delivery.mode Pull works with ordering Concurrent only; use Push or change spec.ordering"
    if spec.is_orderly and spec.delivery.push.timeout > MAX_ORDERLY_TIMEOUT_SECONDS:
        yield "spec.delivery.push.timeout may be at most 30s in an Orderly group, whose queue locks live 60s"
    start_from = spec.start_from
    if start_from.timestamp and start_from.position != "Timestamp":
        yield f"spec.startFrom.timestamp requires position Timestamp, not {start_from.position}"
    if start_from.timestamp and start_from.timestamp.tzinfo is None:
        yield "spec.startFrom.timestamp has no time zone; write it as 2026-11-21T08:00:00Z"


def _selects_messages(subscription: "Subscription") -> bool:
    return subscription.type != "Tag" or bool(subscription.expression.replace("|", " ").strip())


def _workload_mistakes(spec: "GroupSpec") -> Iterator[str]:
    """Yield the mistakes about traces, attempts and pods."""
    traces = spec.delivery.traces
    if traces and not _RECEIVER_PATTERN.fullmatch(traces.endpoint):
        yield "spec.delivery.traces.endpoint is not the URL of a receiver; write one such as http://collector:4318"
    if spec.max_attempts == 0:
        yield "spec.delivery.retry.maxAttempts must be at least 1, or -1 for ever"
    if spec.rollout.max_surge in _NO_PODS and spec.rollout.max_unavailable in _NO_PODS:
        yield "spec.rollout.maxSurge and maxUnavailable are both 0, so no pod could be replaced; allow one of them"
    if spec.replicas is not None and spec.template is None:
        yield "spec.replicas requires spec.template; without a template Rota neither runs nor scales the pods"


def _duration_mistakes(spec: "PolicySpec") -> Iterator[str]:
    """Yield a mistake for each duration that would have no effect: it ends before the next report or sample is read."""
    handover = spec.handover
    triggers = spec.triggers
    durations = [
        ("handover.drainTimeout", handover.drain_timeout, 0.1),
        ("handover.lostAfter", handover.lost_after, 1.0),
        ("triggers.debounce", triggers.debounce, 0.01),
        ("triggers.resync", triggers.resync, 1.0),
        ("triggers.unreadyGrace", triggers.unready_grace, 0.1),
    ]
    if spec.budget:
        durations.append(("budget.per", spec.budget.per, 1.0))
    for path, seconds, least in durations:
        if seconds < least:
            yield f"spec.{path} must be at least {f'{least:g}s' if least >= 1 else f'{least * 1000:g}ms'}"


def _by_config_mistakes(options: "StrategyOptions") -> Iterator[str]:
    """Yield the mistakes in ByConfig's queues, whether or not a member exists for each index."""
    members = options.by_config.members if options.by_config else []
    if len({entry.index for entry in members}) < len(members):
        yield "spec.options.byConfig.members names an index twice; list its queues together"
    spans: list[_IdSpan] = []
    for member_index, entry in enumerate(members):
        for range_index, queue_range in enumerate(entry.queues):
            for first, last in parse_spans(queue_range.ids):
                span = _IdSpan(queue_range.topic, queue_range.broker, first, last, member_index, range_index)
                if not first <= last < MAX_QUEUES_PER_BROKER:
                    form = f"write ids as 0-3,7, each below {MAX_QUEUES_PER_BROKER}"
                    yield f"{span.path} {queue_range.ids!r} is not valid: {form}"
                    continue
                spans.append(span)
    yield from _overlap_mistakes(sorted(spans))


class _IdSpan(NamedTuple):
    """Queue ids from `first` to `last`, and where `spec.options.byConfig` names them."""

    topic: str
    broker: str
    first: int
    last: int
    member_index: int
    range_index: int

    @property
    def path(self) -> str:
        return f"spec.options.byConfig.members[{self.member_index}].queues[{self.range_index}].ids"


def _overlap_mistakes(spans: Sequence[_IdSpan]) -> Iterator[str]:
    """Yield a mistake for each span whose first queue an earlier span names, too.

    The spans are sorted, so it is enough to compare each span with the one before it that reaches farthest.
    """
    farthest: _IdSpan | None = None
    for span in spans:
        is_same_broker = farthest is not None and (span.topic, span.broker) == (farthest.topic, farthest.broker)
        if farthest is None or not is_same_broker or span.first > farthest.last:
            farthest = span
            continue
        earlier, later = sorted((span, farthest), key=attrgetter("member_index", "range_index"))  # in the spec's order
        queue = f"{span.topic}/{span.broker}/{span.first}"
        if later.path == earlier.path:
            yield f"{later.path} names queue {queue} twice; name it once"
        else:
            yield f"{later.path} names queue {queue}, which {earlier.path} names too; name it once"
        if span.last > farthest.last:
            farthest = span


def parse_spans(ranges: str) -> Iterator[tuple[int, int]]:
    """Yield the first and the last id of each part: "0-3,7" gives (0, 3) and (7, 7)."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield int(first), int(last or first)


def _room_mistakes(options: "StrategyOptions") -> Iterator[str]:
    """Yield a mistake for each broker that is in two rooms."""
    for block, chosen in (("machineRoomNearby", options.machine_room_nearby), ("balanced", options.balanced)):
        rooms: dict[str, str] = {}
        for index, entry in enumerate(chosen.brokers if chosen else ()):
            if rooms.setdefault(entry.broker, entry.room) != entry.room:
                problem = f"broker {entry.broker} is in room {rooms[entry.broker]} already; name it once"
                yield f"spec.options.{block}.brokers[{index}]: {problem}"
