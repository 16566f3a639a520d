"""`group.json`: the settings that a sidecar needs, resolved; equal settings have one text."""

import json
from datetime import datetime, timedelta
from typing import Any

import msgspec

from rota.spec import GroupSpec, Seconds

BEFORE_IT_WAS_MADE = timedelta(minutes=30)  # is where a group begins that names no time

_TOLD = ("broker", "subscriptions", "message_model", "ordering", "start_from", "delivery", "paused")


def of(name: str, spec: GroupSpec, drain_timeout: float, created: str | None) -> str:
    """Write a group's settings; durations are numbers of seconds, and what has a default is what it is."""
    told = {field: getattr(spec, field) for field in _TOLD}
    body: dict[str, Any] = msgspec.to_builtins(told, enc_hook=float, order="deterministic")
    body = {_camel(field): value for field, value in body.items()}
    body["delivery"]["retry"]["maxAttempts"] = spec.max_attempts
    start = body["startFrom"]
    if created and start["position"] == "Timestamp" and start["timestamp"] is None:
        start["timestamp"] = (datetime.fromisoformat(created) - BEFORE_IT_WAS_MADE).isoformat().replace("+00:00", "Z")
    return json.dumps(
        {"schema": 1, "group": spec.group or name, "drainTimeout": float(drain_timeout), **body},
        sort_keys=True,
        separators=(",", ":"),
    )


def drain(text: str) -> float:
    """Return the drain timeout that settings tell: it stays while the policy cannot be read."""
    try:
        return float(json.loads(text)["drainTimeout"])
    except (ValueError, KeyError, TypeError):
        return float(Seconds(30))


def _camel(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(map(str.capitalize, others))
