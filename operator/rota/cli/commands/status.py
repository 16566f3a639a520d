"""`rota status`, `members`, `lag` and `explain`: their requests to the operator, and their tables."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rota.cli.client.names import Scope
from rota.cli.client.watch import WatchRequest
from rota.cli.console.formatting import ago, duration, number, rate, rows, say, unknown
from rota.kube.http.schema import Detail, Groups, Member, Operator, Queue, Reasons, Summary, Topic
from rota.kube.state.rebalance import Rebalance
from rota.model import queue_of
from rota.sentences import count

GROUP = "consumergroup.rota.dev"  # the kind's name in kubectl
MOST_REBALANCES = 10  # in a table; -o json shows all that the operator remembers


def status(group: str | None, scope: Scope, *, everywhere: bool, wide: bool = False) -> WatchRequest[Any]:
    """Return the question for all groups of a namespace or, with `group`, for one group."""
    if group is not None:
        if everywhere:
            raise ValueError(f"--all-namespaces is for all groups, and {group} is one; leave one of them out")
        return WatchRequest(
            _path(group, scope),
            Detail,
            lambda reply: _print_status(reply, wide=wide),
            names=lambda reply: [f"{GROUP}/{reply.summary.name}"],
        )
    if everywhere and scope.given is not None:
        raise ValueError("--all-namespaces is for all of them, and --namespace for one; leave one of them out")
    within = None if everywhere else scope.namespace

    def there(reply: Groups) -> Groups:
        """Return only the groups in the requested namespace."""
        return msgspec.structs.replace(reply, groups=[row for row in reply.groups if within in {None, row.namespace}])

    return WatchRequest(
        "/v1/groups",
        Groups,
        lambda reply: _print_groups(reply, within, wide=wide),
        of_it=there,
        names=lambda reply: (f"{GROUP}/{summary.name}" for summary in reply.groups),
    )


def members(group: str, scope: Scope, *, wide: bool = False) -> WatchRequest[Detail]:
    """Return the question for the members of a group."""
    return WatchRequest(
        _path(group, scope),
        Detail,
        lambda detail: _print_members(detail, wide=wide),
        names=lambda detail: (f"pod/{member.name}" for member in detail.members if member.origin == "Rota"),
    )


def lag(group: str, scope: Scope, by: str, top: int | None) -> WatchRequest[Detail]:
    """Return the question for the lag of each queue of a group."""

    def first(detail: Detail) -> Detail:
        """Return the first `top` queues of each kind, in the requested order."""
        ordered = sorted(detail.queues, key=_behind) if by == "lag" else detail.queues
        kinds = [[queue for queue in ordered if queue.kind == kind][:top] for kind in ("Subscribed", "Retry")]
        return msgspec.structs.replace(detail, queues=[queue for kind in kinds for queue in kind])

    return WatchRequest(_path(group, scope), Detail, _print_lag, of_it=first)


def why(group: str, queue: str | None, scope: Scope) -> WatchRequest[Reasons]:
    """Return the question for the reason of a queue's owner or, without a queue, for an example of each member."""
    params = {} if queue is None else {"queue": str(queue_of(queue))}
    return WatchRequest(f"{_path(group, scope)}/why", Reasons, _print_reasons, params)


def _path(group: str, scope: Scope) -> str:
    namespace, name = scope.group(group)
    return f"/v1/groups/{namespace}/{name}"


def _behind(queue: Queue) -> float:
    """Return a sort key: the queues with the highest lag come first, queues with an unknown lag last."""
    return math.inf if queue.lag is None else -queue.lag


def _print_groups(reply: Groups, within: str | None, *, wide: bool) -> None:
    if not reply.groups:
        where = "the namespaces that the operator looks after" if within is None else f"namespace {within}"
        say(f"There is no group in {where}" + ("" if within is None else "; -A shows those in all namespaces"))
    rows([_line(row, f"{row.namespace}/{row.name}" if within is None else row.name, wide=wide) for row in reply.groups])
    _print_responder(reply.operator)


def _line(group: Summary, name: str, *, wide: bool) -> dict[str, str]:
    last = group.last_rebalance
    columns = {
        "group": name,
        "ready": f"{'yes' if group.ready else 'no'} ({unknown(group.reason)})",
        "members": number(group.members) + (f" ({group.idle} idle)" if group.idle > 0 else ""),
        "queues": number(group.queues) + (f" ({group.unowned} unowned)" if group.unowned > 0 else ""),
        "lag": number(group.lag, estimate=group.estimate),
        "delay": duration(group.delay),
        "strategy": unknown(group.strategy),
        "last rebalance": f"{last.reason} {ago(last.at)}, {_moved(last, moving=group.moving)}" if last else "none",
    }
    more = {
        "generation": number(group.generation),
        "retrying": number(group.retrying),
        "dead letters": number(group.dead),
        "message": group.message,
    }
    return columns | more if wide else columns


def _moved(rebalance: Rebalance, *, moving: bool) -> str:
    """Describe the result of a rebalance; its numbers are known only after its end."""
    if rebalance.seconds is None and moving:
        return "under way"
    return f"{count(rebalance.moved, 'queue')} moved" + (f", {rebalance.forced} forced" if rebalance.forced else "")


def _print_status(detail: Detail, *, wide: bool) -> None:
    group = detail.summary
    rows([_line(group, f"{group.namespace}/{group.name}", wide=wide)])
    if group.message:
        say(group.message)
    if detail.at_broker != group.name:
        say(f"At brokers it is called {detail.at_broker}")
    for settings in detail.settings:
        consumption = "on" if settings.enabled else "OFF"
        retries, queues = f"{settings.retries} retries", count(settings.retry_queues, "retry queue")
        say(f"At {settings.broker}: consumption {consumption}, {retries}, {queues}")
    if group.verdicts:
        parts = (f"{count(many, 'queue')} {verdict}" for verdict, many in group.verdicts.items())
        say(f"Verdicts: {', '.join(parts)}")
    delayed = f", and about {number(group.delayed)} that brokers delay" if group.delayed else ""
    say(f"To be tried again: {number(group.retrying)}{delayed}; dead letters: {number(group.dead)}")
    rows(
        [
            {"condition": condition.type, "status": condition.status, "reason": condition.reason}
            | {"since": ago(condition.last_transition_time), "message": condition.message}
            for condition in detail.conditions
        ]
    )
    rows([_rebalance(rebalance, moving=group.moving) for rebalance in detail.rebalances[:MOST_REBALANCES]])
    if len(detail.rebalances) > MOST_REBALANCES:
        say(f"{count(len(detail.rebalances) - MOST_REBALANCES, 'earlier rebalance')} in -o json")
    _print_responder(detail.operator)


def _rebalance(rebalance: Rebalance, *, moving: bool) -> dict[str, str]:
    over = rebalance.seconds is not None or not moving
    return {
        "rebalance": rebalance.reason,
        "when": ago(rebalance.at),
        "generation": str(rebalance.generation),
        "moved": str(rebalance.moved) if over else "under way",
        "forced": str(rebalance.forced) if over else "",
        "took": duration(rebalance.seconds) if over else "",
        "longest": duration(rebalance.longest) if over else "",
        "message": rebalance.message,
    }


def _print_members(detail: Detail, *, wide: bool) -> None:
    rows([_member(member, wide=wide) for member in detail.members])
    foreign = sum(member.origin == "Foreign" for member in detail.members)
    suffix = f", {foreign} of them not Rota's" if foreign else ""
    say(f"{count(len(detail.members), 'member')}{suffix}; generation {detail.summary.generation}")
    for member in detail.members:
        for trouble in member.troubles:
            say(f"{member.name}: {trouble}")
        for message in member.failing:
            say(f"{member.name}: {message}")
    _print_responder(detail.operator)


def _member(member: Member, *, wide: bool) -> dict[str, str]:
    columns = {
        "name": member.name,
        "client id": unknown(member.client_id),
        "address": unknown(member.address),
        "version": unknown(
            f"{member.version} ({member.language})" if member.version and member.language else member.version
        ),
        "origin": member.origin,
        "state": member.state,
        "queues": number(member.queues),
        "generation": number(member.generation),
        "rate": rate(member.rate),
    }
    not_read = ", ".join(f"{queues} {state}" for state, queues in sorted(member.queue_states.items()))
    return columns | {"queues not read": not_read, **_settings(member)} if wide else columns


def _settings(member: Member) -> dict[str, str]:
    """Return the columns that mqadmin consumerConnection prints below its list of consumers."""
    texts = [f"{item.topic}: {'SQL92 ' * (item.type == 'SQL92')}{item.expression}" for item in member.subscriptions]
    return {"subscriptions": unknown("; ".join(texts)), "model": unknown(member.model), "start": unknown(member.start)}


def _print_lag(detail: Detail) -> None:
    for kind, title in (("Subscribed", ""), ("Retry", "To be tried again:")):
        topics = [topic for topic in detail.topics if topic.kind == kind]
        queues = [queue for queue in detail.queues if queue.kind == kind]
        if title and (topics or queues):
            say("")
            say(title)
        rows([_behind_line(queue) for queue in queues])
        _print_totals(topics, queues)
    if detail.summary.delayed is not None:
        say(f"Delayed by brokers until the next attempt: about {number(detail.summary.delayed)}")
    say(f"Dead letters: {number(detail.summary.dead)}")
    if not detail.topics:
        say("No topic of the group is known yet")
    if detail.looked_at is not None:
        say(f"Brokers were last asked {ago(detail.looked_at)}")
    elif detail.operator.leads:
        say("Brokers have not been asked yet how far the group is")
    _print_responder(detail.operator)


def _behind_line(queue: Queue) -> dict[str, str]:
    return {
        "topic": queue.topic,
        "broker": queue.broker,
        "queue": str(queue.id),
        "first": number(queue.first),
        "last": number(queue.last),
        "committed": number(queue.committed),
        "lag": number(queue.lag, estimate=queue.estimate),
        "delay": duration(queue.delay),
        "verdict": unknown(queue.verdict),
        "member": _owner(queue),
    }


def _owner(queue: Queue) -> str:
    """Return the owner of a queue, and its next owner."""
    if queue.state == "Everyone":
        return "everyone"
    if queue.state == "Foreign":
        return "a foreigner"
    goes = f", goes to {queue.to}" if queue.to else ", released" if queue.state == "Releasing" else ""
    return f"{queue.owner or 'nobody'}{goes}{' (forced)' if queue.forced else ''}"


def _print_totals(topics: Iterable[Topic], queues: Sequence[Queue]) -> None:
    shown = Counter(queue.topic for queue in queues)
    for topic in topics:
        text = f"{topic.topic}: {count(topic.queues, 'queue')}, lag {number(topic.lag, estimate=topic.estimate)}"
        hidden = topic.queues - shown[topic.topic]
        say(f"{text}, delay {duration(topic.delay)}" + (f"; {count(hidden, 'queue')} not shown" if hidden > 0 else ""))


def _print_reasons(response: Reasons) -> None:
    for reason in response.queues:
        say(reason.why)
    if not response.queues:
        say(f"No queue has an owner in generation {response.generation}")
    last = response.last_rebalance
    if last is None:
        say("The operator remembers no rebalance")
        return
    generation = f", generation {last.generation}" if last.generation else ""  # none before the operator's start
    say(f"Last rebalance: {last.reason} {ago(last.at)}{generation}" + (f": {last.message}" if last.message else ""))
    if last.seconds is None:
        say("It is under way, or nobody saw its end")
        return
    least = f"; the longest that one queue took is {duration(last.longest)}" if last.longest is not None else ""
    forced = f", {last.forced} of them forced" if last.forced else ""
    say(f"It moved {count(last.moved, 'queue')}{forced}, and took {duration(last.seconds)}{least}")


def _print_responder(operator: Operator) -> None:
    """Print a hint if the response comes from an operator that does not lead."""
    if not operator.leads:
        say(f"Operator {operator.identity} stands by and asks no broker: ask the one that leads for lag and members")
