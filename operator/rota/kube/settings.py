"""`group.json`: the settings that a sidecar needs, resolved; equal settings have one text."""

import json
from typing import Any

import msgspec

from rota.spec import GroupSpec, Seconds

_TOLD = ("broker", "subscriptions", "message_model", "ordering", "start_from", "delivery", "paused")


def of(name: str, spec: GroupSpec, drain_timeout: float) -> str:
    """Write a group's settings; durations are numbers of seconds."""
    told = {field: getattr(spec, field) for field in _TOLD}
    body: dict[str, Any] = msgspec.to_builtins(told, enc_hook=float, order="deterministic")
    body = {_camel(field): value for field, value in body.items()}
    body["delivery"]["retry"]["maxAttempts"] = spec.max_attempts
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
