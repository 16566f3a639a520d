"""The Kubernetes Events of a group: only for changes that the previous status does not show."""

from collections.abc import Mapping, Sequence
from typing import Any

from rota.handover import Act
from rota.model import Reason, Use, Verdict
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.snapshot import Event
from rota.planner.status import causes, conditions
from rota.sentences import count, listed

SWIFT_SECONDS = 2.0  # a rebalance that is over so soon is one Event, not two


def events(situation: Situation, draft: Draft, status: Mapping[str, Any], verdicts: Sequence[Verdict]) -> list[Event]:
    """Return the Events of a rebalance that begins or ends, of forced queues and of new problems."""
    return [*_of_rebalance(situation, draft, status), *_of_forced(draft), *_of_problems(situation, verdicts)]


def _of_rebalance(situation: Situation, draft: Draft, status: Mapping[str, Any]) -> list[Event]:
    last, previous = status.get("lastRebalance"), situation.snapshot.status.get("lastRebalance")
    events = []
    if draft.of(*causes.MOVING) and last and (not previous or last["at"] != previous["at"]):
        cause = causes.cause(situation, draft)
        moving = len(draft.of(Act.REVOKE, Act.GRANT, Act.FORCE))
        change = "changes" if moving == 1 else "change"
        events.append(Event(cause.reason, f"{cause.message}; {count(moving, 'queue')} {change} hands"))
    is_over = last and previous and "seconds" in last and "seconds" not in previous
    if last and is_over and last["seconds"] >= SWIFT_SECONDS:
        message = f"{last['reason']}: {count(last['moved'], 'queue')} moved in {last['seconds']:g} s"
        events.append(Event(Reason.SETTLED, message))
    return events


def _of_forced(draft: Draft) -> list[Event]:
    forced = draft.of(Act.FORCE)
    if not forced:
        return []
    names = listed(sorted({decision.holder.name for decision in forced if decision.holder}) or ["a member"])
    message = f"{count(len(forced), 'queue')} taken from {names} unheard"
    return [Event(Reason.QUEUES_FORCED, message, warning=True)]


def _of_problems(situation: Situation, verdicts: Sequence[Verdict]) -> list[Event]:
    first_of_each = {verdict.reason: verdict for verdict in reversed(verdicts)}
    return [
        Event(*verdict, warning=Use.HARMLESS not in verdict.reason.use)
        for verdict in first_of_each.values()
        if not conditions.holds(situation.snapshot.status, verdict.reason)
    ]
