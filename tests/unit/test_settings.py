"""`group.json`: what the sidecar is told beside the document."""

import json
from typing import Any

from builders import a_spec
from rota.kube import settings

MADE = "2026-11-21T08:00:00Z"


def told(created: str | None = MADE, drain: float = 30.0, **changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(settings.of("shop", a_spec(**changed), drain, created))
    return found


def test_settings_are_resolved() -> None:
    found = told(ordering="Orderly", group="at-the-broker")
    assert (found["group"], found["schema"], found["drainTimeout"]) == ("at-the-broker", 1, 30.0)
    assert found["delivery"]["retry"]["maxAttempts"] == -1
    assert found["delivery"]["push"]["timeout"] == 30.0
    assert found["subscriptions"] == [{"topic": "orders", "expression": "*", "type": "Tag"}]
    assert "template" not in found
    assert told()["group"] == "shop"


def test_who_begins_at_a_time_and_names_none_begins_half_an_hour_before_the_group_was_made() -> None:
    assert told(startFrom={"position": "Timestamp"})["startFrom"]["timestamp"] == "2026-11-21T07:30:00Z"
    named = {"position": "Timestamp", "timestamp": "2026-01-01T00:00:00Z"}
    assert told(startFrom=named)["startFrom"]["timestamp"] == "2026-01-01T00:00:00Z"
    assert told()["startFrom"]["timestamp"] is None


def test_the_drain_timeout_is_read_back_and_has_a_default() -> None:
    assert settings.drain(json.dumps(told(drain=7.5))) == 7.5
    assert [settings.drain(text) for text in ("", "[]", "{}", '{"drainTimeout": null}')] == [30.0] * 4
