"""`group.json`: what the sidecar is told beside the document."""

import json
from typing import Any

import pytest

from builders import a_spec
from rota.spec import Buffer, Seconds
from rota.spec.resolved import GroupSettings, decode_drain_timeout, decode_group_name, decode_settings, encode_settings

MADE = "2026-11-21T08:00:00Z"


def told(created: str | None = MADE, timeout: float = 30.0, **changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_settings("shop", a_spec(**changed), timeout, created))
    return found


def read(changed: Any) -> GroupSettings:
    return decode_settings(json.dumps(changed))


def test_settings_are_resolved() -> None:
    found = told(ordering="Orderly", group="at-the-broker")
    assert (found["group"], found["schema"], found["drainTimeout"]) == ("at-the-broker", 1, 30.0)
    assert found["delivery"]["retry"]["maxAttempts"] == -1
    assert found["delivery"]["push"]["timeout"] == 30.0
    assert found["subscriptions"] == [{"topic": "orders", "expression": "*", "type": "Tag"}]
    assert "template" not in found
    assert told()["group"] == "shop"


def test_start_from_timestamp_defaults_to_half_an_hour_before_the_group_was_created() -> None:
    assert told(startFrom={"position": "Timestamp"})["startFrom"]["timestamp"] == "2026-11-21T07:30:00Z"
    named = {"position": "Timestamp", "timestamp": "2026-01-01T00:00:00Z"}
    assert told(startFrom=named)["startFrom"]["timestamp"] == "2026-01-01T00:00:00Z"
    assert told()["startFrom"]["timestamp"] is None


@pytest.mark.parametrize(
    "value", ["null", '"30s"', "0", "-5", "NaN", "Infinity", "1e999", "9" * 400, "3.7e9", "[" * 100_000]
)
def test_settings_with_an_invalid_drain_timeout_yield_the_default(value: str) -> None:
    assert decode_drain_timeout(f'{{"drainTimeout": {value}}}') == 30.0


def test_settings_that_are_stored_are_read_field_by_field() -> None:
    settings = json.dumps(told(timeout=7.5))
    assert (decode_drain_timeout(settings), decode_group_name(settings)) == (7.5, "shop")
    for text in ("", "[]", "{}", "[" * 100_000):
        assert (decode_drain_timeout(text), decode_group_name(text)) == (30.0, "")


def test_settings_name_the_receiver_of_traces_which_earlier_sidecars_pass_over() -> None:
    traced = {"traces": {"endpoint": "http://collector:4318"}}
    assert read(told(delivery=traced)).traces_endpoint == "http://collector:4318"
    assert read(told()).traces_endpoint == ""
    later = told()
    later["delivery"]["colours"] = {"endpoint": "http://collector:4318"}  # as `traces` is unknown to earlier versions
    assert read(later) == read(told())


def test_settings_round_trip() -> None:
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
    assert (found.max_attempts, found.is_orderly, found.is_broadcasting) == (16, False, False)
    assert found.start_from.timestamp
    assert found.start_from.timestamp.isoformat() == "2026-11-21T07:30:00+00:00"


def test_settings_let_orderly_groups_retry_forever_and_make_no_broadcasting_group_orderly() -> None:
    assert read(told(ordering="Orderly")).max_attempts == -1
    assert read(told(ordering="Orderly")).is_orderly
    everyone = read(told() | {"ordering": "Orderly", "messageModel": "Broadcasting"})
    assert (everyone.is_broadcasting, everyone.is_orderly) == (True, False)


def test_settings_fields_of_a_later_operator_are_ignored() -> None:
    later = told()
    later["new"] = later["delivery"]["push"]["new"] = later["subscriptions"][0]["new"] = {"of": "later"}
    later["broker"]["rocketmq"]["new"] = 1
    assert read(later) == read(told())


def test_settings_of_an_operator_without_the_size_of_a_message_have_the_default() -> None:
    earlier = told(delivery={"buffer": {"mebibytesPerMessage": 9}})
    del earlier["delivery"]["buffer"]["mebibytesPerMessage"]
    assert read(earlier).delivery.buffer.mebibytes_per_message == 4


def test_settings_with_an_unknown_buffer_field_are_read() -> None:
    # That sidecar passes over what its blocks do not have, as this one does with a field of the same block.
    later = told(delivery={"buffer": {"mebibytesPerMessage": 9}})
    later["delivery"]["buffer"]["mebibytesPerBatch"] = 1
    assert read(later).delivery.buffer == Buffer(mebibytes_per_message=9)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ([], "its schema is None; this version reads schema 1"),
        ({}, "its schema is None; this version reads schema 1"),
        (told() | {"schema": 2}, "its schema is 2; this version reads schema 1"),
        ({"schema": 1}, "missing required field"),
        (told() | {"subscriptions": []}, r"\$.subscriptions"),
        (told() | {"drainTimeout": "30s"}, r"\$.drainTimeout"),
        (told() | {"delivery": {"push": {"timeout": "30s"}}}, "'30s' is not a number of seconds"),
        (told() | {"delivery": {"push": {"timeout": 0}}}, "0 is not a number of seconds"),
    ],
)
def test_settings_that_are_invalid_are_rejected_with_a_sentence(changed: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"The settings in group.json cannot be read: .*{why}"):
        read(changed)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000])
def test_settings_that_are_torn_are_rejected_with_a_sentence(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^The settings in group\.json cannot be read: "):
        decode_settings(text)


@pytest.mark.parametrize("mebibytes", [0, 1025])
def test_settings_limit_the_message_size_to_1_to_1024_mebibytes(mebibytes: int) -> None:
    assert read(told(delivery={"buffer": {"mebibytesPerMessage": 1024}})).delivery.buffer.mebibytes_per_message == 1024
    with pytest.raises(ValueError, match=r"expected `?int`? [<>]= "):
        read(told(delivery={"buffer": {"mebibytesPerMessage": mebibytes}}))
