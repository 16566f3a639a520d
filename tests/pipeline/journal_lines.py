"""Journal records of one group with a single topic, written by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

from rota.records import journal_record

Line = dict[str, Any]


EIGHT = datetime(2026, 11, 21, 8, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return EIGHT + timedelta(seconds=seconds)


def told(seconds: float) -> str:
    return at(seconds).isoformat()


def a_plan(group: str, generation: int, seconds: float, **changed: Any) -> Line:
    given: Line = {
        "strategy": "Sticky",
        "reason": "MemberJoined",
        "message": "",
        "members": 2,
        "queues": 1,
        "held": None,
    }
    return journal_record("plan", group, told(seconds), generation=generation, **(given | changed))


def an_act(group: str, generation: int, seconds: float, act: str, **changed: Any) -> Line:
    """Return what was done to queue 0 of the only topic."""
    given: Line = {"act": act, "proof": "Released", "state": "Releasing", "queues": {"t": {"a": "0"}}}
    for party in ("from", "to"):
        if party in changed:
            given[f"{party}Uid"] = f"uid-{changed[party]}"
    return journal_record("handover", group, told(seconds), generation=generation, **(given | changed))


def a_whole(group: str, generation: int, seconds: float, unowned: str = "", **owned: str) -> Line:
    """Return an owners record: whose each queue is."""
    members = {
        name: {"uid": f"uid-{name}", "standing": "Ready", "queues": {"t": {"a": queues}} if queues else {}}
        for name, queues in owned.items()
    }
    given: Line = {"model": "Clustering", "ordering": "Concurrent", "startFrom": "Latest", "policy": None, "rules": {}}
    free = {"t": {"a": unowned}} if unowned else {}
    return journal_record(
        "owners", group, told(seconds), generation=generation, members=members, releasing=[], unowned=free, **given
    )


def local(seconds: float) -> datetime:
    """Return a time as Spark hands it to Python: without a zone, in the machine's own."""
    return at(seconds).astimezone().replace(tzinfo=None)
