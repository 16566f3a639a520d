"""`rota status`, `members`, `lag` and `explain`: their requests to the operator, and their tables."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rota.cli.client.names import Scope
from rota.cli.client.watch import PrintableRequest
from rota.cli.console.formatting import (
    format_age,
    format_duration,
    format_number,
    format_rate,
    or_unknown,
    print_line,
    print_rows,
)
from rota.kube.http import schema
from rota.kube.state.rebalance import Rebalance
from rota.model import parse_queue
from rota.sentences import pluralize

GROUP_RESOURCE = "consumergroup.rota.dev"  # the kind's name in kubectl
MAX_REBALANCES = 10  # rows of the table; -o json has all rebalances that the operator knows


def status_request(group: str | None, scope: Scope, *, everywhere: bool, wide: bool = False) -> PrintableRequest[Any]:
    """Return the request for all groups of a namespace or, with `group`, for one group."""
    if group is not None:
        if everywhere:
            raise ValueError(f"--all-namespaces is for all groups, and {group} is one; remove one of them")
        return PrintableRequest(
            _group_path(group, scope),
            schema.GroupDetail,
            lambda reply: _print_status(reply, wide=wide),
            object_names=lambda reply: [f"{GROUP_RESOURCE}/{reply.summary.name}"],
        )
    if everywhere and scope.namespace_option is not None:
        raise ValueError("--all-namespaces is for all namespaces, and --namespace for one; remove one of them")
    namespace = None if everywhere else scope.namespace

    def select_namespace(reply: schema.GroupList) -> schema.GroupList:
        groups = [row for row in reply.groups if namespace in {None, row.namespace}]
        return msgspec.structs.replace(reply, groups=groups)

    return PrintableRequest(
        "/v1/groups",
        schema.GroupList,
        lambda reply: _print_groups(reply, namespace, wide=wide),
        select=select_namespace,
        object_names=lambda reply: (f"{GROUP_RESOURCE}/{summary.name}" for summary in reply.groups),
    )


def members_request(group: str, scope: Scope, *, wide: bool = False) -> PrintableRequest[schema.GroupDetail]:
    """Return the request for the members of a group."""
    return PrintableRequest(
        _group_path(group, scope),
        schema.GroupDetail,
        lambda detail: _print_members(detail, wide=wide),
        object_names=lambda detail: (f"pod/{member.name}" for member in detail.members if member.origin == "Rota"),
    )


def lag_request(group: str, scope: Scope, by: str, top: int | None) -> PrintableRequest[schema.GroupDetail]:
    """Return the request for the lag of each queue of a group."""

    def select_queues(detail: schema.GroupDetail) -> schema.GroupDetail:
        """Return the first `top` queues of each kind, in the requested order."""
        ordered = sorted(detail.queues, key=_lag_sort_key) if by == "lag" else detail.queues
        selected: list[schema.QueueDetail] = []
        for kind in ("Subscribed", "Retry"):
            selected += [queue for queue in ordered if queue.kind == kind][:top]
        return msgspec.structs.replace(detail, queues=selected)

    return PrintableRequest(_group_path(group, scope), schema.GroupDetail, _print_lag, select=select_queues)


def explain_request(group: str, queue: str | None, scope: Scope) -> PrintableRequest[schema.OwnerReasons]:
    """Return the request for the reason of a queue's owner; without a queue, for that of each member's first queue."""
    params = {} if queue is None else {"queue": str(parse_queue(queue))}
    return PrintableRequest(f"{_group_path(group, scope)}/why", schema.OwnerReasons, _print_reasons, params)


def _group_path(group: str, scope: Scope) -> str:
    namespace, name = scope.parse_group(group)
    return f"/v1/groups/{namespace}/{name}"


def _lag_sort_key(queue: schema.QueueDetail) -> float:
    """Return a sort key: the queues with the highest lag come first, queues with an unknown lag last."""
    return math.inf if queue.lag is None else -queue.lag


def _print_groups(reply: schema.GroupList, namespace: str | None, *, wide: bool) -> None:
    if not reply.groups:
        where = "the namespaces that the operator watches" if namespace is None else f"namespace {namespace}"
        hint = "" if namespace is None else "; -A shows those in all namespaces"
        print_line(f"There is no group in {where}{hint}")
    print_rows([_summary_row(row, wide=wide, with_namespace=namespace is None) for row in reply.groups])
    _print_standby_hint(reply.operator)


def _summary_row(group: schema.GroupSummary, *, wide: bool, with_namespace: bool) -> dict[str, str]:
    columns = {
        "group": f"{group.namespace}/{group.name}" if with_namespace else group.name,
        "ready": f"{'yes' if group.ready else 'no'} ({or_unknown(group.reason)})",
        "members": format_number(group.members) + (f" ({group.idle} idle)" if group.idle > 0 else ""),
        "queues": format_number(group.queues) + (f" ({group.unowned} unowned)" if group.unowned > 0 else ""),
        "lag": format_number(group.lag, is_estimate=group.estimate),
        "delay": format_duration(group.delay),
        "strategy": or_unknown(group.strategy),
        "last rebalance": _describe_rebalance(group.last_rebalance, is_moving=group.moving),
    }
    wide_columns = {
        "generation": format_number(group.generation),
        "retrying": format_number(group.retrying),
        "dead letters": format_number(group.dead),
        "message": group.message,
    }
    return columns | wide_columns if wide else columns


def _describe_rebalance(rebalance: Rebalance | None, *, is_moving: bool) -> str:
    """Describe the last rebalance; without its numbers while it is in progress, because they still grow."""
    if rebalance is None:
        return "none"
    start = f"{rebalance.reason} {format_age(rebalance.at)}"
    if _is_in_progress(rebalance, is_moving=is_moving):
        return f"{start}, in progress"
    forced = f", {rebalance.forced} forced" if rebalance.forced else ""
    return f"{start}, {pluralize(rebalance.moved, 'queue')} moved{forced}"


def _is_in_progress(rebalance: Rebalance, *, is_moving: bool) -> bool:
    """Return whether a rebalance still moves queues; `seconds` is None also if its end was not recorded."""
    return rebalance.seconds is None and is_moving


def _print_status(detail: schema.GroupDetail, *, wide: bool) -> None:
    group = detail.summary
    print_rows([_summary_row(group, wide=wide, with_namespace=True)])
    if group.message:
        print_line(group.message)
    if detail.at_broker != group.name:
        print_line(f"Consumer group at the brokers: {detail.at_broker}")
    for settings in detail.settings:
        consumption = "on" if settings.enabled else "OFF"
        retries = "1 retry" if settings.retries == 1 else f"{settings.retries} retries"
        queues = pluralize(settings.retry_queues, "retry queue")
        print_line(f"At {settings.broker}: consumption {consumption}, {retries}, {queues}")
    if group.verdicts:
        parts = [f"{pluralize(count, 'queue')} {lag_state}" for lag_state, count in group.verdicts.items()]
        print_line(f"Lag states: {', '.join(parts)}")
    delayed = f", and about {format_number(group.delayed)} delayed by brokers" if group.delayed else ""
    print_line(f"Retrying: {format_number(group.retrying)}{delayed}; dead letters: {format_number(group.dead)}")
    print_rows(list(map(_condition_row, detail.conditions)))
    print_rows([_rebalance_row(rebalance, is_moving=group.moving) for rebalance in detail.rebalances[:MAX_REBALANCES]])
    if len(detail.rebalances) > MAX_REBALANCES:
        print_line(f"{pluralize(len(detail.rebalances) - MAX_REBALANCES, 'earlier rebalance')} in -o json")
    _print_standby_hint(detail.operator)


def _condition_row(condition: schema.ConditionInfo) -> dict[str, str]:
    return {
        "condition": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "since": format_age(condition.last_transition_time),
        "message": condition.message,
    }


def _rebalance_row(rebalance: Rebalance, *, is_moving: bool) -> dict[str, str]:
    has_ended = not _is_in_progress(rebalance, is_moving=is_moving)
    return {
        "rebalance": rebalance.reason,
        "when": format_age(rebalance.at),
        "generation": str(rebalance.generation),
        "moved": str(rebalance.moved) if has_ended else "in progress",
        "forced": str(rebalance.forced) if has_ended else "",
        "took": format_duration(rebalance.seconds) if has_ended else "",
        "longest": format_duration(rebalance.longest) if has_ended else "",
        "message": rebalance.message,
    }


def _print_members(detail: schema.GroupDetail, *, wide: bool) -> None:
    print_rows([_member_row(member, wide=wide) for member in detail.members])
    unmanaged = sum(member.origin == "Foreign" for member in detail.members)
    suffix = f", {unmanaged} of them unmanaged" if unmanaged else ""
    print_line(f"{pluralize(len(detail.members), 'member')}{suffix}; generation {detail.summary.generation}")
    for member in detail.members:
        for problem in (*member.troubles, *member.failing):  # of the member itself, then of single messages
            print_line(f"{member.name}: {problem}")
    _print_standby_hint(detail.operator)


def _member_row(member: schema.MemberInfo, *, wide: bool) -> dict[str, str]:
    language = f" ({member.language})" if member.version and member.language else ""
    columns = {
        "name": member.name,
        "client id": or_unknown(member.client_id),
        "address": or_unknown(member.address),
        "version": f"{or_unknown(member.version)}{language}",
        "origin": member.origin,
        "state": member.state,
        "queues": format_number(member.queues),
        "generation": format_number(member.generation),
        "rate": format_rate(member.rate),
    }
    # `queue_states` counts only queues that the member has and is not reading now.
    not_read = ", ".join(f"{queues} {state}" for state, queues in sorted(member.queue_states.items()))
    return columns | {"queues not read": not_read, **_subscription_columns(member)} if wide else columns


def _subscription_columns(member: schema.MemberInfo) -> dict[str, str]:
    """Return the columns that mqadmin consumerConnection prints below its list of consumers."""
    return {
        "subscriptions": or_unknown("; ".join(map(_describe_subscription, member.subscriptions))),
        "model": or_unknown(member.model),
        "start": or_unknown(member.start),
    }


def _describe_subscription(subscription: schema.SubscriptionInfo) -> str:
    language = "SQL92 " if subscription.type == "SQL92" else ""
    return f"{subscription.topic}: {language}{subscription.expression}"


def _print_lag(detail: schema.GroupDetail) -> None:
    for kind, title in (("Subscribed", ""), ("Retry", "Retry topic:")):
        topics = [topic for topic in detail.topics if topic.kind == kind]
        queues = [queue for queue in detail.queues if queue.kind == kind]
        if title and (topics or queues):
            print_line("")
            print_line(title)
        print_rows(list(map(_queue_row, queues)))
        _print_totals(topics, queues)
    if detail.summary.delayed is not None:
        print_line(f"Delayed by brokers until the next attempt: about {format_number(detail.summary.delayed)}")
    print_line(f"Dead letters: {format_number(detail.summary.dead)}")
    if not detail.topics:
        print_line("No topic of the group is known yet")
    if detail.looked_at is not None:
        print_line(f"Offsets were last read {format_age(detail.looked_at)}")
    elif detail.operator.leads:
        print_line("Offsets have not been read yet")
    _print_standby_hint(detail.operator)


def _queue_row(queue: schema.QueueDetail) -> dict[str, str]:
    return {
        "topic": queue.topic,
        "broker": queue.broker,
        "queue": str(queue.id),
        "first": format_number(queue.first),
        "last": format_number(queue.last),
        "committed": format_number(queue.committed),
        "lag": format_number(queue.lag, is_estimate=queue.estimate),
        "delay": format_duration(queue.delay),
        "lag state": or_unknown(queue.verdict),
        "member": _describe_owner(queue),
    }


def _describe_owner(queue: schema.QueueDetail) -> str:
    """Return the owner of a queue, and its next owner."""
    if queue.state == "Everyone":
        return "everyone"
    if queue.state == "Foreign":
        return "unmanaged consumer"
    # A revoked queue for which no next owner is known; its owner may still consume it.
    transition = ", being released" if queue.state == "Releasing" else ""
    if queue.to:
        transition = f", moving to {queue.to}"
    return f"{queue.owner or 'none'}{transition}{' (forced)' if queue.forced else ''}"


def _print_totals(topics: Iterable[schema.TopicInfo], queues: Sequence[schema.QueueDetail]) -> None:
    shown = Counter(queue.topic for queue in queues)
    for topic in topics:
        lag = format_number(topic.lag, is_estimate=topic.estimate)
        text = f"{topic.topic}: {pluralize(topic.queues, 'queue')}, lag {lag}, delay {format_duration(topic.delay)}"
        hidden = topic.queues - shown[topic.topic]
        print_line(text + (f"; {pluralize(hidden, 'queue')} not shown" if hidden > 0 else ""))


def _print_reasons(response: schema.OwnerReasons) -> None:
    for reason in response.queues:
        print_line(reason.why)
    if not response.queues:
        print_line(f"No queue has an owner in generation {response.generation}")
    last = response.last_rebalance
    if last is None:
        print_line("The operator knows of no rebalance")
        return
    generation = f", generation {last.generation}" if last.generation else ""  # 0: not known
    message = f": {last.message}" if last.message else ""
    print_line(f"Last rebalance: {last.reason} {format_age(last.at)}{generation}{message}")
    if last.seconds is None:  # this response does not say whether queues still move
        print_line("It is in progress, or its end was not recorded")
        return
    longest = f"; the slowest queue took {format_duration(last.longest)}" if last.longest is not None else ""
    forced = f", {last.forced} of them forced" if last.forced else ""
    print_line(f"It moved {pluralize(last.moved, 'queue')}{forced}, and took {format_duration(last.seconds)}{longest}")


def _print_standby_hint(operator: schema.OperatorInfo) -> None:
    """Print a hint if the response comes from an operator that does not lead."""
    if not operator.leads:
        hint = "query the leader for lag and members"
        print_line(f"Operator {operator.identity} is not the leader and reads no offsets: {hint}")
