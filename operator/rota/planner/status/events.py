"""The Kubernetes Events of a group: only for changes since the published status, so a repeated plan posts none."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rota.handover import Act
from rota.model import Finding, Reason
from rota.planner.moves import Draft
from rota.planner.situation import Situation
from rota.planner.snapshot import Event
from rota.planner.status import causes, conditions
from rota.sentences import join_names, pluralize

SINGLE_EVENT_SECONDS = 2.0  # a shorter rebalance has one Event, for its start


def build_events(
    situation: Situation, draft: Draft, status: Mapping[str, Any], findings: Sequence[Finding]
) -> list[Event]:
    """Return the Events of a rebalance that begins or ends, of forced queues and of new problems."""
    return [*_rebalance_events(situation, draft, status), *_forced_events(draft), *_problem_events(situation, findings)]


def _rebalance_events(situation: Situation, draft: Draft, status: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the Events of a rebalance that begins or ends with `status`, compared with the snapshot's status.

    Returned and dropped queues also start a rebalance, but do not count as queues that change hands.
    """
    last = status.get("lastRebalance")
    previous = situation.snapshot.last_rebalance
    has_begun = last and (not previous or last["at"] != previous["at"])
    if has_begun and draft.with_acts(*causes.MOVING_ACTS):
        cause = causes.rebalance_cause(situation, draft)
        moving = len(draft.with_acts(Act.REVOKE, Act.GRANT, Act.FORCE))
        change = "changes" if moving == 1 else "change"
        yield Event(cause.reason, f"{cause.message}; {pluralize(moving, 'queue')} {change} hands")
    has_ended = last and "seconds" in last and situation.snapshot.ongoing_rebalance
    if last and has_ended and last["seconds"] >= SINGLE_EVENT_SECONDS:
        message = f"{last['reason']}: {pluralize(last['moved'], 'queue')} moved in {last['seconds']:g} s"
        yield Event(Reason.SETTLED, message)


def _forced_events(draft: Draft) -> Iterator[Event]:
    if forced := draft.with_acts(Act.FORCE):
        names = sorted({decision.holder.name for decision in forced if decision.holder}) or ["a member"]
        message = f"{pluralize(len(forced), 'queue')} taken from {join_names(names)}, which did not respond"
        yield Event(Reason.QUEUES_FORCED, message, warning=True)


def _problem_events(situation: Situation, findings: Sequence[Finding]) -> Iterator[Event]:
    for finding in conditions.first_of_each_reason(findings):
        if not conditions.has_condition(situation.snapshot.status, finding.reason):
            yield Event(*finding, warning=finding.is_harmful)
