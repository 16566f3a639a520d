"""Tests `group.json`: the settings that the sidecar gets along with the assignment."""

import json
from typing import Any

import pytest

from builders import a_spec
from rota.spec import Buffer, Seconds
from rota.spec.resolved import GroupSettings, decode_drain_timeout, decode_group_name, decode_settings, encode_settings

CREATED = "2026-11-21T08:00:00Z"


def settings_document(created: str | None = CREATED, timeout: float = 30.0, **changed: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(encode_settings("shop", a_spec(**changed), timeout, created))
    return document


def decode(changed: Any) -> GroupSettings:
    return decode_settings(json.dumps(changed))


def test_settings_are_resolved() -> None:
    settings = settings_document(ordering="Orderly", group="at-the-broker")
    assert (settings["group"], settings["schema"], settings["drainTimeout"]) == ("at-the-broker", 1, 30.0)
    assert settings["delivery"]["retry"]["maxAttempts"] == -1
    assert settings["delivery"]["push"]["timeout"] == 30.0
    assert settings["subscriptions"] == [{"topic": "orders", "expression": "*", "type": "Tag"}]
    assert "template" not in settings
    assert settings_document()["group"] == "shop"


def test_start_from_timestamp_defaults_to_half_an_hour_before_the_group_was_created() -> None:
    assert settings_document(startFrom={"position": "Timestamp"})["startFrom"]["timestamp"] == "2026-11-21T07:30:00Z"
    named = {"position": "Timestamp", "timestamp": "2026-01-01T00:00:00Z"}
    assert settings_document(startFrom=named)["startFrom"]["timestamp"] == "2026-01-01T00:00:00Z"
    assert settings_document()["startFrom"]["timestamp"] is None


@pytest.mark.parametrize(
    "value", ["null", '"30s"', "0", "-5", "NaN", "Infinity", "1e999", "9" * 400, "3.7e9", "[" * 100_000]
)
def test_settings_with_an_invalid_drain_timeout_yield_the_default(value: str) -> None:
    assert decode_drain_timeout(f'{{"drainTimeout": {value}}}') == 30.0


def test_settings_that_are_stored_are_read_field_by_field() -> None:
    text = json.dumps(settings_document(timeout=7.5))
    assert (decode_drain_timeout(text), decode_group_name(text)) == (7.5, "shop")
    for invalid in ("", "[]", "{}", "[" * 100_000):
        assert (decode_drain_timeout(invalid), decode_group_name(invalid)) == (30.0, "")


def test_settings_name_the_receiver_of_traces_which_earlier_sidecars_ignore() -> None:
    delivery = {"traces": {"endpoint": "http://collector:4318"}}
    assert decode(settings_document(delivery=delivery)).traces_endpoint == "http://collector:4318"
    assert decode(settings_document()).traces_endpoint == ""
    document = settings_document()
    document["delivery"]["colours"] = {
        "endpoint": "http://collector:4318"
    }  # an unknown block, as `traces` is for earlier versions
    assert decode(document) == decode(settings_document())


def test_settings_round_trip() -> None:
    push = {"port": 9000, "path": "/in", "timeout": "1500ms", "concurrency": 4, "maxBatch": 32}
    delivery = {"push": push, "buffer": {"messagesPerTopic": 50, "mebibytesPerMessage": 9}}
    changed: dict[str, Any] = {"delivery": delivery, "startFrom": {"position": "Timestamp"}}
    spec = a_spec(**changed)
    settings = decode(settings_document(timeout=12.5, **changed))
    assert (settings.group, settings.drain_timeout, settings.broker) == ("shop", 12.5, spec.broker)
    assert (settings.subscriptions, settings.delivery.push, settings.delivery.buffer) == (
        spec.subscriptions,
        spec.delivery.push,
        spec.delivery.buffer,
    )
    assert settings.delivery.push.timeout == Seconds(1.5)
    assert (settings.max_attempts, settings.is_orderly, settings.is_broadcasting) == (16, False, False)
    assert settings.start_from.timestamp
    assert settings.start_from.timestamp.isoformat() == "2026-11-21T07:30:00+00:00"


def test_settings_let_orderly_groups_retry_forever_and_make_no_broadcasting_group_orderly() -> None:
    assert decode(settings_document(ordering="Orderly")).max_attempts == -1
    assert decode(settings_document(ordering="Orderly")).is_orderly
    broadcasting = decode(settings_document() | {"ordering": "Orderly", "messageModel": "Broadcasting"})
    assert (broadcasting.is_broadcasting, broadcasting.is_orderly) == (True, False)


def test_settings_fields_of_a_later_operator_are_ignored() -> None:
    document = settings_document()
    document["new"] = document["delivery"]["push"]["new"] = document["subscriptions"][0]["new"] = {"of": "later"}
    document["broker"]["rocketmq"]["new"] = 1
    assert decode(document) == decode(settings_document())


def test_settings_of_an_operator_without_the_size_of_a_message_have_the_default() -> None:
    document = settings_document(delivery={"buffer": {"mebibytesPerMessage": 9}})
    del document["delivery"]["buffer"]["mebibytesPerMessage"]
    assert decode(document).delivery.buffer.mebibytes_per_message == 4


def test_settings_with_an_unknown_buffer_field_are_read() -> None:
    # Earlier sidecars ignore unknown fields of a block in the same way.
    document = settings_document(delivery={"buffer": {"mebibytesPerMessage": 9}})
    document["delivery"]["buffer"]["mebibytesPerBatch"] = 1
    assert decode(document).delivery.buffer == Buffer(mebibytes_per_message=9)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ([], "its schema is None; this version reads schema 1"),
        ({}, "its schema is None; this version reads schema 1"),
        (settings_document() | {"schema": 2}, "its schema is 2; this version reads schema 1"),
        ({"schema": 1}, "missing required field"),
        (settings_document() | {"subscriptions": []}, r"\$.subscriptions"),
        (settings_document() | {"drainTimeout": "30s"}, r"\$.drainTimeout"),
        (settings_document() | {"delivery": {"push": {"timeout": "30s"}}}, "'30s' is not a number of seconds"),
        (settings_document() | {"delivery": {"push": {"timeout": 0}}}, "0 is not a number of seconds"),
    ],
)
def test_settings_that_are_invalid_are_rejected_with_a_sentence(changed: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"The settings in group.json cannot be read: .*{reason}"):
        decode(changed)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000])
def test_settings_that_are_torn_are_rejected_with_a_sentence(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^The settings in group\.json cannot be read: "):
        decode_settings(text)


@pytest.mark.parametrize("mebibytes", [0, 1025])
def test_settings_limit_the_message_size_to_1_to_1024_mebibytes(mebibytes: int) -> None:
    assert (
        decode(
            settings_document(delivery={"buffer": {"mebibytesPerMessage": 1024}})
        ).delivery.buffer.mebibytes_per_message
        == 1024
    )
    with pytest.raises(ValueError, match=r"expected `?int`? [<>]= "):
        decode(settings_document(delivery={"buffer": {"mebibytesPerMessage": mebibytes}}))
