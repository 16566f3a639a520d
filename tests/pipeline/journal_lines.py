"""Journal records of one group with a single topic, written by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

from rota.records import journal_record

Line = dict[str, Any]


EIGHT = datetime(2026, 11, 21, 8, tzinfo=UTC)


def time_at(seconds: float) -> datetime:
    return EIGHT + timedelta(seconds=seconds)


def iso_time(seconds: float) -> str:
    return time_at(seconds).isoformat()


def plan_line(group: str, generation: int, seconds: float, **changes: Any) -> Line:
    fields: Line = {
        "strategy": "Sticky",
        "reason": "MemberJoined",
        "message": "",
        "members": 2,
        "queues": 1,
        "held": None,
    }
    return journal_record("plan", group, iso_time(seconds), generation=generation, **(fields | changes))


def handover_line(group: str, generation: int, seconds: float, act: str, **changes: Any) -> Line:
    """Return a handover record of queue 0 of the only topic; a `from` or `to` in `changes` gets its uid."""
    fields: Line = {"act": act, "proof": "Released", "state": "Releasing", "queues": {"t": {"a": "0"}}}
    for party in ("from", "to"):
        if party in changes:
            fields[f"{party}Uid"] = f"uid-{changes[party]}"
    return journal_record("handover", group, iso_time(seconds), generation=generation, **(fields | changes))


def owners_line(group: str, generation: int, seconds: float, unowned: str = "", **owned: str) -> Line:
    """Return an owners record; `owned` has each member's queues, as ids such as 0-3,7; `unowned` the other queues."""
    members = {
        name: {"uid": f"uid-{name}", "standing": "Ready", "queues": {"t": {"a": queues}} if queues else {}}
        for name, queues in owned.items()
    }
    fields: Line = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None, "rules": {}}
    free = {"t": {"a": unowned}} if unowned else {}
    return journal_record(
        "owners", group, iso_time(seconds), generation=generation, members=members, releasing=[], unowned=free, **fields
    )


def local_time(seconds: float) -> datetime:
    """Return a time as Spark passes it to Python: without a zone, in the machine's own."""
    return time_at(seconds).astimezone().replace(tzinfo=None)
