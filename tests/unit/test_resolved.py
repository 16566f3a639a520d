"""`group.json`: what the sidecar is told beside the document."""

import json
from typing import Any

import pytest

from builders import a_spec
from rota.spec import Buffer, Seconds
from rota.spec.resolved import Settings, drain, read_settings, write_settings

MADE = "2026-11-21T08:00:00Z"


def told(created: str | None = MADE, timeout: float = 30.0, **changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(write_settings("shop", a_spec(**changed), timeout, created))
    return found


def read(changed: Any) -> Settings:
    return read_settings(json.dumps(changed))


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
    assert drain(json.dumps(told(timeout=7.5))) == 7.5
    assert [drain(text) for text in ("", "[]", "{}", '{"drainTimeout": null}')] == [30.0] * 4


def test_what_is_written_is_read_back() -> None:
    push = {"port": 9000, "path": "/in", "timeout": "1500ms", "concurrency": 4, "maxBatch": 32}
    delivery = {"push": push, "buffer": {"messagesPerTopic": 50, "mebibytesPerMessage": 9}}
    changed: dict[str, Any] = {"delivery": delivery, "startFrom": {"position": "Timestamp"}}
    spec, found = a_spec(**changed), read(told(timeout=12.5, **changed))
    assert (found.group, found.drain_timeout, found.broker) == ("shop", 12.5, spec.broker)
    assert (found.subscriptions, found.delivery.push, found.delivery.buffer) == (
        spec.subscriptions,
        spec.delivery.push,
        spec.delivery.buffer,
    )
    assert found.delivery.push.timeout == Seconds(1.5)
    assert (found.max_attempts, found.orderly, found.broadcasting) == (16, False, False)
    assert found.start_from.timestamp
    assert found.start_from.timestamp.isoformat() == "2026-11-21T07:30:00+00:00"


def test_an_orderly_group_tries_for_ever_and_a_broadcasting_one_takes_no_lock() -> None:
    assert read(told(ordering="Orderly")).max_attempts == -1
    assert read(told(ordering="Orderly")).orderly
    everyone = read(told() | {"ordering": "Orderly", "messageModel": "Broadcasting"})
    assert (everyone.broadcasting, everyone.orderly) == (True, False)


def test_fields_of_a_later_operator_are_passed_over() -> None:
    later = told()
    later["new"] = later["delivery"]["push"]["new"] = later["subscriptions"][0]["new"] = {"of": "later"}
    later["broker"]["rocketmq"]["new"] = 1
    assert read(later) == read(told())


def test_settings_of_an_operator_without_the_size_of_a_message_have_the_default() -> None:
    earlier = told(delivery={"buffer": {"mebibytesPerMessage": 9}})
    del earlier["delivery"]["buffer"]["mebibytesPerMessage"]
    assert read(earlier).delivery.buffer.mebibytes_per_message == 4


def test_settings_with_the_size_of_a_message_are_read_by_a_sidecar_that_does_not_know_the_field() -> None:
    # That sidecar passes over what its blocks do not have, as this one does with a field of the same block.
    later = told(delivery={"buffer": {"mebibytesPerMessage": 9}})
    later["delivery"]["buffer"]["mebibytesPerBatch"] = 1
    assert read(later).delivery.buffer == Buffer(mebibytes_per_message=9)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ([], "its schema is None, and 1 is read"),
        ({}, "its schema is None, and 1 is read"),
        (told() | {"schema": 2}, "its schema is 2, and 1 is read"),
        ({"schema": 1}, "missing required field"),
        (told() | {"subscriptions": []}, r"\$.subscriptions"),
        (told() | {"drainTimeout": "30s"}, r"\$.drainTimeout"),
        (told() | {"delivery": {"push": {"timeout": "30s"}}}, "'30s' is no number of seconds"),
        (told() | {"delivery": {"push": {"timeout": 0}}}, "0 is no number of seconds"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(changed: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"The settings in group.json cannot be read: .*{why}"):
        read(changed)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000])
def test_so_is_a_torn_text(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^The settings in group\.json cannot be read: "):
        read_settings(text)


@pytest.mark.parametrize("mebibytes", [0, 1025])
def test_the_size_of_one_message_has_a_maximum(mebibytes: int) -> None:
    assert read(told(delivery={"buffer": {"mebibytesPerMessage": 1024}})).delivery.buffer.mebibytes_per_message == 1024
    with pytest.raises(ValueError, match=r"expected `?int`? [<>]= "):
        read(told(delivery={"buffer": {"mebibytesPerMessage": mebibytes}}))
