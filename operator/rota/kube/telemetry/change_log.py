"""Logs the changes of groups, one line each: stored assignments, rebalances, member states and conditions.

The lines come from the journal records of a reconcile, so that log and journal never disagree.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from rota.handover import Act
from rota.kube.client.objects import ObjectKey
from rota.logs import group_fields
from rota.planner.members.member_states import MemberState
from rota.ranges import RangedQueues

WARNING_STATES = frozenset({MemberState.LOST, MemberState.CUT_OFF})  # member states that an operator should look into

_log = logging.getLogger(__name__)


class ChangeLog:
    """Writes the log of all groups, and remembers the members of each."""

    def __init__(self) -> None:
        self._members: dict[ObjectKey, Mapping[str, str]] = {}  # member states by pod name

    def forget(self, key: ObjectKey) -> None:
        """Forget a deleted group."""
        self._members.pop(key, None)

    def write(self, key: ObjectKey, records: Iterable[Mapping[str, Any]], rebalance_started_at: str) -> None:
        """Log what the records say; `rebalance_started_at` is that of the group's last rebalance; empty: none."""
        for record in records:
            match record["kind"]:
                case "plan":
                    self._log_assignment(key, record, starts_rebalance=record["at"] == rebalance_started_at)
                case "membership":
                    # "standing" is the member state; names in the journal do not change.
                    states = {name: pod["standing"] for name, pod in record["members"].items()}
                    self._log_members(key, record["generation"], states)
                case "handover":
                    self._log_forced_grant(key, record)
                case "rebalance":
                    self._log_rebalance_end(key, record)
                case "verdict":  # of a condition, not of a queue's lag
                    self._log_condition(key, record)

    @staticmethod
    def _log_assignment(key: ObjectKey, record: Mapping[str, Any], *, starts_rebalance: bool) -> None:
        text = "Assignment stored, rebalance started: %s" if starts_rebalance else "Assignment stored: %s"
        fields = group_fields(*key, generation=record["generation"], reason=record["reason"])
        _log.info(text, record["message"], extra=fields)

    def _log_members(self, key: ObjectKey, generation: int, states: Mapping[str, str]) -> None:
        previous = self._members.get(key)
        self._members[key] = states
        if previous is None:  # the first record of a leader: the states are not new
            return
        for member in sorted({*previous, *states}):
            state = states.get(member, "Deleted")
            if state != previous.get(member):
                level = logging.WARNING if state in WARNING_STATES else logging.INFO
                fields = group_fields(*key, generation=generation, member=member)
                _log.log(level, "Member is %s, was %s", state, previous.get(member, "unknown"), extra=fields)

    @staticmethod
    def _log_forced_grant(key: ObjectKey, record: Mapping[str, Any]) -> None:
        if record["act"] != Act.FORCE:
            return
        fields = group_fields(*key, generation=record["generation"], member=record.get("from"), reason=record["proof"])
        text = "%d queues were granted to %s before the member released them"
        _log.warning(text, len(RangedQueues(record["queues"])), record.get("to"), extra=fields)

    @staticmethod
    def _log_rebalance_end(key: ObjectKey, record: Mapping[str, Any]) -> None:
        fields = group_fields(*key, generation=record["generation"], reason=record["reason"], seconds=record["seconds"])
        _log.info("Rebalance ended (%s): %d queues moved", record["outcome"], record["moved"], extra=fields)

    @staticmethod
    def _log_condition(key: ObjectKey, record: Mapping[str, Any]) -> None:
        fields = group_fields(*key, reason=record["reason"])
        _log.info("Condition %s=%s: %s", record["condition"], record["status"], record["message"], extra=fields)
