"""What `rota status`, `members`, `lag` and `explain` ask of the operator, and how they tell it to people."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rota.cli.client.names import Scope
from rota.cli.client.watch import Question
from rota.cli.console.formatting import ago, duration, number, rate, rows, say, unknown
from rota.kube.http.schema import Detail, Groups, Member, Operator, Queue, Reasons, Summary, Topic
from rota.kube.state.rebalance import Rebalance
from rota.model import queue_of
from rota.sentences import count

GROUP = "consumergroup.rota.dev"  # as kubectl names the kind
MOST_REBALANCES = 10  # in a table; all that the operator remembers are in -o json


def status(group: str | None, scope: Scope, *, everywhere: bool, wide: bool = False) -> Question[Any]:
    """Ask how groups fare, or all about one."""
    if group is not None:
        if everywhere:
            raise ValueError(f"--all-namespaces is for all groups, and {group} is one; leave one of them out")
        return Question(
            _path(group, scope),
            Detail,
            lambda told: _tell_status(told, wide=wide),
            names=lambda told: [f"{GROUP}/{told.summary.name}"],
        )
    if everywhere and scope.given is not None:
        raise ValueError("--all-namespaces is for all of them, and --namespace for one; leave one of them out")
    within = None if everywhere else scope.namespace

    def there(told: Groups) -> Groups:
        """Return those in the namespace that is meant."""
        return msgspec.structs.replace(told, groups=[it for it in told.groups if within in {None, it.namespace}])

    return Question(
        "/v1/groups",
        Groups,
        lambda told: _tell_groups(told, within, wide=wide),
        of_it=there,
        names=lambda told: (f"{GROUP}/{it.name}" for it in told.groups),
    )


def members(group: str, scope: Scope, *, wide: bool = False) -> Question[Detail]:
    """Ask who works for a group."""
    return Question(
        _path(group, scope),
        Detail,
        lambda told: _tell_members(told, wide=wide),
        names=lambda told: (f"pod/{it.name}" for it in told.members if it.origin == "Rota"),
    )


def lag(group: str, scope: Scope, by: str, top: int | None) -> Question[Detail]:
    """Ask how far a group is behind, queue by queue."""

    def first(told: Detail) -> Detail:
        """Return the first queues in the order that was asked for; of each kind by itself."""
        ordered = sorted(told.queues, key=_behind) if by == "lag" else told.queues
        kinds = [[it for it in ordered if it.kind == kind][:top] for kind in ("Subscribed", "Retry")]
        return msgspec.structs.replace(told, queues=[it for kind in kinds for it in kind])

    return Question(_path(group, scope), Detail, _tell_lag, of_it=first)


def why(group: str, queue: str | None, scope: Scope) -> Question[Reasons]:
    """Ask why a queue has its owner, or an example for each member."""
    params = {} if queue is None else {"queue": str(queue_of(queue))}
    return Question(f"{_path(group, scope)}/why", Reasons, _tell_why, params)


def _path(group: str, scope: Scope) -> str:
    within, name = scope.group(group)
    return f"/v1/groups/{within}/{name}"


def _behind(queue: Queue) -> float:
    """Return the key under which the queues that are most behind come first, and unknown ones last."""
    return math.inf if queue.lag is None else -queue.lag


def _tell_groups(told: Groups, within: str | None, *, wide: bool) -> None:
    if not told.groups:
        where = "the namespaces that the operator looks after" if within is None else f"namespace {within}"
        say(f"There is no group in {where}" + ("" if within is None else "; -A shows those in all namespaces"))
    rows([_line(it, f"{it.namespace}/{it.name}" if within is None else it.name, wide=wide) for it in told.groups])
    _tell_who_answers(told.operator)


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


def _moved(it: Rebalance, *, moving: bool) -> str:
    """Say what a rebalance did; what only its end tells is not told before."""
    if it.seconds is None and moving:
        return "under way"
    return f"{count(it.moved, 'queue')} moved" + (f", {it.forced} forced" if it.forced else "")


def _tell_status(told: Detail, *, wide: bool) -> None:
    group = told.summary
    rows([_line(group, f"{group.namespace}/{group.name}", wide=wide)])
    if group.message:
        say(group.message)
    if told.at_broker != group.name:
        say(f"At brokers it is called {told.at_broker}")
    for it in told.settings:
        consumption = "on" if it.enabled else "OFF"
        retries, queues = f"{it.retries} retries", count(it.retry_queues, "retry queue")
        say(f"At {it.broker}: consumption {consumption}, {retries}, {queues}")
    if group.verdicts:
        told_of = (f"{count(many, 'queue')} {verdict}" for verdict, many in group.verdicts.items())
        say(f"Verdicts: {', '.join(told_of)}")
    delayed = f", and about {number(group.delayed)} that brokers delay" if group.delayed else ""
    say(f"To be tried again: {number(group.retrying)}{delayed}; dead letters: {number(group.dead)}")
    rows(
        [
            {"condition": it.type, "status": it.status, "reason": it.reason}
            | {"since": ago(it.last_transition_time), "message": it.message}
            for it in told.conditions
        ]
    )
    rows([_rebalance(it, moving=group.moving) for it in told.rebalances[:MOST_REBALANCES]])
    if len(told.rebalances) > MOST_REBALANCES:
        say(f"{count(len(told.rebalances) - MOST_REBALANCES, 'earlier rebalance')} in -o json")
    _tell_who_answers(told.operator)


def _rebalance(it: Rebalance, *, moving: bool) -> dict[str, str]:
    over = it.seconds is not None or not moving
    return {
        "rebalance": it.reason,
        "when": ago(it.at),
        "generation": str(it.generation),
        "moved": str(it.moved) if over else "under way",
        "forced": str(it.forced) if over else "",
        "took": duration(it.seconds) if over else "",
        "longest": duration(it.longest) if over else "",
        "message": it.message,
    }


def _tell_members(told: Detail, *, wide: bool) -> None:
    rows([_member(it, wide=wide) for it in told.members])
    foreign = sum(it.origin == "Foreign" for it in told.members)
    others = f", {foreign} of them not Rota's" if foreign else ""
    say(f"{count(len(told.members), 'member')}{others}; generation {told.summary.generation}")
    for member in told.members:
        for trouble in member.troubles:
            say(f"{member.name}: {trouble}")
        for message in member.failing:
            say(f"{member.name}: {message}")
    _tell_who_answers(told.operator)


def _member(it: Member, *, wide: bool) -> dict[str, str]:
    columns = {
        "name": it.name,
        "client id": unknown(it.client_id),
        "address": unknown(it.address),
        "version": unknown(f"{it.version} ({it.language})" if it.version and it.language else it.version),
        "origin": it.origin,
        "state": it.state,
        "queues": number(it.queues),
        "generation": number(it.generation),
        "rate": rate(it.rate),
    }
    not_read = ", ".join(f"{queues} {state}" for state, queues in sorted(it.queue_states.items()))
    return columns | {"queues not read": not_read, **_settings(it)} if wide else columns


def _settings(it: Member) -> dict[str, str]:
    """Return the columns of what mqadmin consumerConnection shows below its list of consumers."""
    filters = [f"{one.topic}: {'SQL92 ' * (one.type == 'SQL92')}{one.expression}" for one in it.subscriptions]
    return {"subscriptions": unknown("; ".join(filters)), "model": unknown(it.model), "start": unknown(it.start)}


def _tell_lag(told: Detail) -> None:
    for kind, title in (("Subscribed", ""), ("Retry", "To be tried again:")):
        topics = [it for it in told.topics if it.kind == kind]
        queues = [it for it in told.queues if it.kind == kind]
        if title and (topics or queues):
            say("")
            say(title)
        rows([_behind_line(it) for it in queues])
        _tell_totals(topics, queues)
    if told.summary.delayed is not None:
        say(f"Delayed by brokers until the next attempt: about {number(told.summary.delayed)}")
    say(f"Dead letters: {number(told.summary.dead)}")
    if not told.topics:
        say("No topic of the group is known yet")
    if told.looked_at is not None:
        say(f"Brokers were last asked {ago(told.looked_at)}")
    elif told.operator.leads:
        say("Brokers have not been asked yet how far the group is")
    _tell_who_answers(told.operator)


def _behind_line(it: Queue) -> dict[str, str]:
    return {
        "topic": it.topic,
        "broker": it.broker,
        "queue": str(it.id),
        "first": number(it.first),
        "last": number(it.last),
        "committed": number(it.committed),
        "lag": number(it.lag, estimate=it.estimate),
        "delay": duration(it.delay),
        "verdict": unknown(it.verdict),
        "member": _worker(it),
    }


def _worker(it: Queue) -> str:
    """Say who works a queue, and who will."""
    if it.state == "Everyone":
        return "everyone"
    if it.state == "Foreign":
        return "a foreigner"
    goes = f", goes to {it.to}" if it.to else ", released" if it.state == "Releasing" else ""
    return f"{it.owner or 'nobody'}{goes}{' (forced)' if it.forced else ''}"


def _tell_totals(topics: Iterable[Topic], queues: Sequence[Queue]) -> None:
    shown = Counter(it.topic for it in queues)
    for it in topics:
        told = f"{it.topic}: {count(it.queues, 'queue')}, lag {number(it.lag, estimate=it.estimate)}"
        hidden = it.queues - shown[it.topic]
        say(f"{told}, delay {duration(it.delay)}" + (f"; {count(hidden, 'queue')} not shown" if hidden > 0 else ""))


def _tell_why(told: Reasons) -> None:
    for it in told.queues:
        say(it.why)
    if not told.queues:
        say(f"No queue has an owner in generation {told.generation}")
    last = told.last_rebalance
    if last is None:
        say("The operator remembers no rebalance")
        return
    generation = f", generation {last.generation}" if last.generation else ""  # of one before the operator began: none
    say(f"Last rebalance: {last.reason} {ago(last.at)}{generation}" + (f": {last.message}" if last.message else ""))
    if last.seconds is None:
        say("It is under way, or nobody saw its end")
        return
    least = f"; the longest that one queue took is {duration(last.longest)}" if last.longest is not None else ""
    forced = f", {last.forced} of them forced" if last.forced else ""
    say(f"It moved {count(last.moved, 'queue')}{forced}, and took {duration(last.seconds)}{least}")


def _tell_who_answers(operator: Operator) -> None:
    """Say what follows where it is none that leads."""
    if not operator.leads:
        say(f"Operator {operator.identity} stands by and asks no broker: ask the one that leads for lag and members")
