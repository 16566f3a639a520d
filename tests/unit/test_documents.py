"""Tests documents that cross a process boundary: they round-trip, and invalid ones are rejected with a sentence."""

import gzip
import hashlib
import json
import sys
import tracemalloc
from dataclasses import replace
from itertools import chain, pairwise, starmap

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota import reports
from rota.documents import (
    GZIP_KEY,
    MAX_GENERATION,
    MAX_PLAIN_BYTES,
    PLAIN_KEY,
    Assignment,
    AssignmentTooLargeError,
    Release,
    Share,
    UnsupportedSchemaError,
    decode_assignment,
    encode_assignment,
)
from rota.model import Holder, Queue
from rota.queue_offsets import QueueProgress, decode_offsets, decode_progress
from rota.ranges import MAX_QUEUES_PER_DOCUMENT, from_ranges, parse_ids, to_ranges
from rota.reports import ReportTooLargeError, Uncommitted, decode_report

Q5 = Queue("orders", "broker-a", 5)
NOW = "2026-11-21T08:00:00.000Z"
EXAMPLE = Assignment(
    group="shop/orders",
    generation=42,
    issued_at=NOW,
    strategy="Sticky",
    members={
        "orders-7d9f-abc": Share("uid-1", (Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1))),
        "orders-7d9f-xyz": Share("uid-2"),
    },
    releasing={Q5: Release(Holder("orders-7d9f-abc", "uid-1"), "orders-7d9f-xyz", 42, NOW)},
    forced={Queue("orders", "broker-a", 1): 41},
    spent=((NOW, 4),),
    barrier=7,
    begun={"orders": NOW},
)


def test_document_queue_ids_that_are_adjacent_become_a_range() -> None:
    queues = [Queue("orders", "a", number) for number in (7, 0, 1, 2, 3)] + [Queue("orders", "b", 0)]
    assert to_ranges(queues) == {"orders": {"a": "0-3,7", "b": "0"}}
    assert to_ranges([]) == {}


@given(st.sets(st.tuples(st.sampled_from("xy"), st.sampled_from("ab"), st.integers(0, 40))))
def test_document_queue_ranges_round_trip_and_never_touch(queues: set[tuple[str, str, int]]) -> None:
    ranged = to_ranges(starmap(Queue, queues))
    assert from_ranges(ranged) == sorted(queues)
    for ids in chain.from_iterable(brokers.values() for brokers in ranged.values()):
        spans = [(int(span.partition("-")[0]), int(span.rpartition("-")[2])) for span in ids.split(",")]
        assert all(following[0] > last + 1 for (_, last), following in pairwise(spans))


@pytest.mark.parametrize("ranges", ["", "x", "3-1", "1,,2", "-1", "0-", "1-2-3", "9999999999", "²", "٣"])
def test_document_queue_ranges_that_are_invalid_are_rejected_with_a_sentence(ranges: str) -> None:
    with pytest.raises(ValueError, match=": write them as 0-3,7"):
        parse_ids(ranges)


def test_document_queue_ranges_of_too_many_queues_are_rejected_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="'0-99999999': more than 131072 queues are named"):
        parse_ids("0-99999999")


def test_document_queue_ranges_that_repeat_an_id_are_rejected_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="an id is named twice"):
        parse_ids("0-3,2")


def plain_text(assignment: Assignment) -> str:
    (text,) = encode_assignment(assignment).values()
    assert isinstance(text, str)
    return text


def test_assignment_document_has_the_fields_and_checksum_that_sidecars_rely_on() -> None:
    body = json.loads(plain_text(EXAMPLE))
    checksum = body.pop("sum")
    assert body == {
        "schema": 1,
        "group": "shop/orders",
        "generation": 42,
        "issuedAt": NOW,
        "strategy": "Sticky",
        "members": {
            "orders-7d9f-abc": {"uid": "uid-1", "queues": {"orders": {"broker-a": "0-1"}}},
            "orders-7d9f-xyz": {"uid": "uid-2", "queues": {}},
        },
        "releasing": {
            "orders": {
                "broker-a": {
                    "5": {"from": "orders-7d9f-abc", "uid": "uid-1", "to": "orders-7d9f-xyz", "since": 42, "at": NOW}
                }
            }
        },
        "forced": {"orders": {"broker-a": {"1": 41}}},
        "spent": [[NOW, 4]],
        "barrier": 7,
        "begun": {"orders": NOW},
    }
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert checksum == hashlib.sha256(text.encode()).hexdigest()


def test_assignment_document_round_trips() -> None:
    assert decode_assignment(plain_text(EXAMPLE)) == EXAMPLE
    assert EXAMPLE.topic_start_seconds == {"orders": 1_795_248_000.0}
    without_start_times = replace(EXAMPLE, begun={})
    assert decode_assignment(plain_text(without_start_times)) == without_start_times
    assert "begun" not in plain_text(without_start_times)
    everyone = replace(EXAMPLE, everyone=(Q5,), members={}, releasing={}, forced={})
    assert decode_assignment(plain_text(everyone)) == everyone
    with_release = replace(EXAMPLE, releasing={Q5: Release(Holder("gone", "uid-9"), None, 40, NOW)})
    assert decode_assignment(plain_text(with_release)) == with_release


def test_assignment_fields_of_later_versions_are_kept() -> None:
    body = json.loads(plain_text(EXAMPLE)) | {"weather": {"sun": 1}}
    del body["sum"]
    body["sum"] = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    assert json.loads(plain_text(decode_assignment(json.dumps(body)))) == body


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)  # also quotes, controls and beyond U+FFFF
UNKNOWN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
)


@given(
    shares=st.dictionaries(TEXTS, st.tuples(TEXTS, st.sets(st.tuples(TEXTS, TEXTS, st.integers(0, 9)))), max_size=4),
    extra=st.dictionaries(TEXTS.map("later".__add__), UNKNOWN_VALUES, max_size=3),
)
def test_assignment_text_is_canonical_json_whatever_its_names_and_later_fields(
    shares: dict[str, tuple[str, set[tuple[str, str, int]]]], extra: dict[str, object]
) -> None:
    members = {name: Share(uid, tuple(sorted(starmap(Queue, queues)))) for name, (uid, queues) in shares.items()}
    text = plain_text(replace(EXAMPLE, members=members, releasing={}, forced={}, extra=extra))
    body = json.loads(text)
    assert text == json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert body["members"] == {
        name: {"uid": uid, "queues": to_ranges(starmap(Queue, queues))} for name, (uid, queues) in shares.items()
    }
    assert {name: body[name] for name in extra} == extra
    del body["sum"]
    text_to_sum = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert json.loads(text)["sum"] == hashlib.sha256(text_to_sum.encode()).hexdigest()


def test_assignment_text_does_not_depend_on_the_order_of_members() -> None:
    reordered = replace(EXAMPLE, members=dict(reversed(list(EXAMPLE.members.items()))))
    assert encode_assignment(reordered) == encode_assignment(EXAMPLE)


def long_assignment(members: int) -> Assignment:
    shares = {
        f"orders-{number:06d}": Share(hashlib.sha256(b"%d" % number).hexdigest(), (Queue("orders", "b", 2 * number),))
        for number in range(members)
    }
    return replace(EXAMPLE, members=shares, releasing={}, forced={})


def test_assignment_that_is_long_is_compressed_and_one_too_long_is_rejected() -> None:
    ((name, packed),) = encode_assignment(long_assignment(3000)).items()
    assert name == GZIP_KEY
    assert isinstance(packed, bytes)
    assert len(gzip.decompress(packed)) > MAX_PLAIN_BYTES
    assert decode_assignment(packed) == long_assignment(3000)
    assert encode_assignment(long_assignment(3000)) == {GZIP_KEY: packed}
    assert list(encode_assignment(long_assignment(1000))) == [PLAIN_KEY]
    with pytest.raises(
        ValueError, match=r"^The assignment of shop/orders takes \d+ bytes compressed, but .*; split the group"
    ):
        encode_assignment(long_assignment(3000), max_compressed_bytes=100_000)


def test_assignment_that_is_truncated_or_corrupted_is_rejected() -> None:
    text = plain_text(EXAMPLE)
    for length in range(len(text)):
        with pytest.raises(ValueError, match=r"^The assignment "):
            decode_assignment(text[:length])
    packed = encode_assignment(long_assignment(2500))[GZIP_KEY]
    assert isinstance(packed, bytes)
    for position in range(0, len(packed), 997):
        flipped = packed[:position] + bytes([packed[position] ^ 0x55]) + packed[position + 1 :]
        for damaged in (packed[:position], flipped):
            with pytest.raises(ValueError, match=r"^The assignment "):
                decode_assignment(damaged)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"', "{}", b"\x1f\x8b", b"\xff\xfe"])
def test_assignment_text_that_is_no_document_is_rejected(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"^The assignment "):
        decode_assignment(text)


@given(st.data())
def test_assignment_with_an_edited_character_is_rejected_or_reads_the_same(data: st.DataObject) -> None:
    text = plain_text(EXAMPLE)
    position = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.characters(codec="ascii"))
    changed = text[:position] + character + text[position + 1 :]
    try:
        assert decode_assignment(changed) == EXAMPLE  # for example, other white space
    except ValueError as error:
        assert str(error).startswith("The assignment ")  # noqa: PT017 - both outcomes are valid


RELEASE = {"from": "m1", "uid": "u", "since": 4, "at": NOW}
ORDERS = {"uid": "u", "queues": {"orders": {"broker-a": "0-3"}}}


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 0


def signed_text(change: dict[str, object]) -> str:
    """Return the example with a change and a matching checksum."""
    body = json.loads(plain_text(EXAMPLE)) | change
    del body["sum"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return json.dumps(body | {"sum": hashlib.sha256(text).hexdigest()})


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"members": []},
        {"members": {"m1": {"uid": 5, "queues": {}}}},
        {"members": {"m1": {"uid": "u", "queues": {"orders": {"broker-a": "3-1"}}}}},
        {"members": {"m1": {"uid": "u", "queues": {"t": {str(broker): "0-999998" for broker in range(3)}}}}},
        {"generation": "x"},
        {"generation": float("inf")},
        {"generation": -1},
        {"generation": 2**64},
        {"generation": 1.5},
        {"schema": True},
        {"barrier": float("inf")},
        {"group": None},
        {"strategy": ["Sticky"]},
        {"issuedAt": 5},
        {"issuedAt": "yesterday"},
        {"spent": 3},
        {"spent": [[5, 1]]},
        {"spent": [[NOW, float("inf")]]},
        {"releasing": {"orders": {"broker-a": {"5": RELEASE | {"at": 5}}}}},
        {"releasing": {"orders": {"broker-a": {"5": RELEASE | {"to": 5}}}}},
        {"releasing": {"orders": {"broker-a": {"-5": RELEASE}}}},
        {"forced": {"orders": {"broker-a": {"x": 1}}}},
        {"extra": "\ud800"},
        {"extra": float("nan")},
        {"extra": nested(100)},
        {"extra": nested(900)},
    ],
)
def test_assignment_that_this_version_cannot_read_is_rejected_as_a_whole(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^The assignment "):
        decode_assignment(signed_text(change))


@pytest.mark.parametrize(
    "change",
    [
        {"members": {"m1": ORDERS, "m2": ORDERS}},
        {"members": {"m1": ORDERS}, "releasing": {"orders": {"broker-a": {"3": RELEASE}}}},
    ],
)
def test_assignment_with_two_owners_of_a_queue_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^The assignment cannot be read: queue orders/broker-a/\d is assigned to m"):
        decode_assignment(signed_text(change))


def test_report_with_a_generation_above_the_maximum_is_rejected() -> None:
    template = '{"member": "m1", "uid": "u", "generation": %d}'
    assert decode_report(template % MAX_GENERATION).generation == MAX_GENERATION
    with pytest.raises(ValueError, match=r"^The report cannot be read: "):
        decode_report(template % (MAX_GENERATION + 1))


def test_assignment_that_decompresses_beyond_the_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(b" " * 1000 + plain_text(Assignment(group="g", generation=1, issued_at=NOW)).encode())
    assert decode_assignment(packed).group == "g"
    monkeypatch.setattr(sys.modules[decode_assignment.__module__], "MAX_DECOMPRESSED_BYTES", 1000)
    with pytest.raises(ValueError, match=r"^The assignment is not a complete JSON object"):
        decode_assignment(packed)


def test_assignment_that_decompresses_beyond_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[decode_assignment.__module__], "MAX_DECOMPRESSED_BYTES", MAX_PLAIN_BYTES)
    with pytest.raises(
        AssignmentTooLargeError,
        match=r"^The assignment of shop/orders takes \d+ bytes uncompressed, but .*; split the group",
    ):
        encode_assignment(long_assignment(3000))


def test_assignment_with_too_many_queues_is_not_written_however_short_its_text() -> None:
    queues = tuple(Queue("t", "b", number) for number in range(2**17 + 1))
    too_large = Assignment(group="shop/orders", generation=1, issued_at=NOW, members={"m1": Share("u", queues)})
    with pytest.raises(
        AssignmentTooLargeError, match=r"^The assignment of shop/orders names 131073 queues, but the limit is"
    ):
        encode_assignment(too_large)
    with pytest.raises(AssignmentTooLargeError, match="names 131073 queues"):
        encode_assignment(replace(too_large, members={}, everyone=queues))
    largest = replace(too_large, members={"m1": Share("u", queues[:-1])})
    assert decode_assignment(plain_text(largest)) == largest


def test_assignment_checksum_of_a_long_document_is_verified_over_its_exact_text() -> None:
    packed = encode_assignment(long_assignment(2500))[GZIP_KEY]
    assert isinstance(packed, bytes)
    text = gzip.decompress(packed)
    assert len(text) > MAX_PLAIN_BYTES
    assert decode_assignment(text) == long_assignment(2500)
    with_extra_fields = json.loads(text) | {"zeta": 1, "Alpha": 2}
    del with_extra_fields["sum"]
    text_to_sum = json.dumps(with_extra_fields, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(text_to_sum.encode()).hexdigest()
    signed_text = json.dumps(with_extra_fields | {"sum": checksum}, sort_keys=True, separators=(",", ":"))
    assert decode_assignment(signed_text) == replace(long_assignment(2500), extra={"zeta": 1, "Alpha": 2})
    for changed in (text.replace(b'"barrier":', b'"barrier":1'), text.replace(b'"sum"', b'"mus"'), b" " + text):
        with pytest.raises(ValueError, match=r"its checksum does not match$"):
            decode_assignment(changed)


@pytest.mark.parametrize("field", ["members", "x"])
def test_assignment_that_decompresses_to_millions_of_lists_is_rejected_in_bounded_memory(field: str) -> None:
    """Each decoded empty list would take at least 56 bytes."""
    body = json.loads(plain_text(replace(EXAMPLE, begun={}))) | {field: [[]]}
    text = json.dumps(body).replace("[[]]", f"[{','.join(['[]'] * 3_000_000)}]")
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^The assignment "):
        decode_assignment(gzip.compress(text.encode()))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * len(text)


def test_assignment_with_the_maximum_of_queues_in_handover_and_longest_names_round_trips() -> None:
    holder = Holder("m" * 63, "01234567-89ab-cdef-0123-456789abcdef")
    release = Release(holder, "n" * 63, MAX_GENERATION, NOW)
    queues = [Queue(f"t{number // 1000}", "b", number % 1000) for number in range(MAX_QUEUES_PER_DOCUMENT)]
    largest = Assignment(group="g", generation=MAX_GENERATION, issued_at=NOW, releasing=dict.fromkeys(queues, release))
    assert decode_assignment(encode_assignment(largest)[GZIP_KEY]) == largest


def test_assignment_that_decompresses_to_too_many_elements_is_rejected() -> None:
    brokers = ",".join(f'"{number}":{{}}' for number in range(1_100_000))
    text = plain_text(EXAMPLE).replace('"releasing":{', f'"releasing":{{"t":{{{brokers}}},', 1)
    with pytest.raises(ValueError, match=r"^The assignment is not a complete JSON object"):
        decode_assignment(gzip.compress(text.encode()))


def test_assignment_fields_of_later_versions_are_kept_up_to_a_size() -> None:
    assert decode_assignment(signed_text({"later": "x" * 60_000})).extra == {"later": "x" * 60_000}
    with pytest.raises(
        UnsupportedSchemaError, match=r"^The assignment has 70002 bytes of fields that this version does not know$"
    ):
        decode_assignment(signed_text({"later": "x" * 70_000}))


def test_report_that_names_too_many_queues_is_rejected() -> None:
    template = '{"member":"m1","uid":"u","generation":1,"held":{"t":{"b":"0-%d"}},"releasing":{"t":{"c":"0-%d"}}}'
    assert len(decode_report(template % (99_999, 9)).active_queues) == 100_010
    with pytest.raises(ValueError, match=r"^The report cannot be read: more than 131072 queues are named$"):
        decode_report(template % (131_071, 0))
    with pytest.raises(ValueError, match=r"^The report cannot be read: Invalid queue ids '0-131072'"):
        decode_report(template % (131_072, 0))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("held", {f"t{number}": {"b": "0"} for number in range(150_000)}),
        ("releasing", {"t": {f"b{number}": "0" for number in range(200_000)}}),
        ("brokers", {f"b{number}": True for number in range(20_000)}),
        ("troubles", {f"Reason{number}": "x" * 1000 for number in range(300)}),
        ("uncommitted", [{"topic": "t", "broker": "b", "id": number, "given": 1} for number in range(10_000)]),
    ],
)
def test_report_with_too_large_a_part_is_rejected_before_it_is_decoded(
    part: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"member": "m1", "uid": "u", "generation": 1, part: value})
    monkeypatch.setattr(reports, "Report", None)  # fails if the report is decoded
    with pytest.raises(ValueError, match=rf"^The report cannot be read: {part} takes [0-9,]+ bytes; the limit is"):
        decode_report(text)


@pytest.mark.parametrize(
    "held",
    [{f"t{number}": {} for number in range(20_001)}, {"t": {f"b{number}": "0" for number in range(20_001)}}],
    ids=["topics without queues", "brokers with a queue each"],
)
def test_report_of_too_many_pairs_of_topic_and_broker_is_rejected(held: dict[str, dict[str, str]]) -> None:
    sentence = r"^The report names 20,001 pairs of topic and broker; the limit is 20,000$"
    with pytest.raises(ReportTooLargeError, match=sentence):
        decode_report(json.dumps({"member": "m1", "uid": "u", "generation": 1, "held": held}))


def test_offset_page_of_too_many_queues_is_not_read() -> None:
    entry = {"topic": "t", "broker": "b", "id": 1, "committed": 2}
    assert decode_offsets(json.dumps({"queues": [entry] * (MAX_QUEUES_PER_DOCUMENT + 1)})).offsets == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spent", [[NOW, 1]] * 50_001),
        ("members", {f"m{number}": {"uid": "", "queues": {}} for number in range(20_001)}),
    ],
)
def test_assignment_with_too_many_entries_is_rejected(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"^The assignment cannot be read: .* length <= "):
        decode_assignment(compressed_with_field(field, json.dumps(value, separators=(",", ":"))))


@pytest.mark.parametrize("levels", range(900, 1010))
def test_assignment_with_a_nested_field_is_rejected_at_each_level(levels: int) -> None:
    """Near the limit of the decoder, one of its two passes fails."""
    with pytest.raises(ValueError, match=r"^The assignment "):
        decode_assignment(compressed_with_field("later", "[" * levels + "]" * levels, strategy="x" * MAX_PLAIN_BYTES))


def compressed_with_field(field: str, value: str, **changed: str) -> bytes:
    """Return the compressed example with the text `value` as a field."""
    body = {**json.loads(plain_text(EXAMPLE)), **changed, field: "?"}
    del body["sum"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).replace('"?"', value).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return gzip.compress(b'{"sum":"' + digest + b'",' + text[1:])


def test_report_with_the_maximum_of_queues_is_read() -> None:
    queues = {f"topic-{number}": {"broker-a": ",".join(map(str, range(0, 16_384, 2)))} for number in range(16)}
    report = {"member": "m1", "uid": "u", "generation": 1, "held": queues, "queues": [{"topic": "x" * 100}] * 20_000}
    assert len(decode_report(json.dumps(report)).active_queues) == MAX_QUEUES_PER_DOCUMENT


@pytest.mark.parametrize("ranges", ["", "x", "3-1", "0-3,2", "3,0-5"])
def test_report_with_invalid_queue_ranges_is_rejected(ranges: str) -> None:
    with pytest.raises(ValueError, match=r"^The report cannot be read: Invalid queue ids "):
        decode_report(json.dumps({"member": "m1", "uid": "u", "generation": 1, "held": {"t": {"b": ranges}}}))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"group": 1e999, "sum": ""}'])
def test_document_with_endless_nesting_or_an_infinite_number_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"^The assignment "):
        decode_assignment(text)
    with pytest.raises(ValueError, match=r"^The report cannot be read: "):
        decode_report(text)
    with pytest.raises(ValueError, match=r"^The report cannot be read: "):
        decode_report('{"member":"m","uid":"u","generation":1,"held":' + text)


PROGRESS_ENTRY = {
    "topic": "orders",
    "broker": "broker-a",
    "id": 5,
    "committed": 7,
    "pulled": 9,
    "buffered": 2,
    "locked": False,
}


def test_offset_of_each_queue_is_read_from_the_members_report() -> None:
    entries = [PROGRESS_ENTRY, PROGRESS_ENTRY | {"id": 6, "committed": None}]
    assert decode_offsets(json.dumps({"member": "m1", "queues": entries}))[0] == {Q5: 7, Q5._replace(id=6): None}
    assert decode_offsets("{}")[0] == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"queues": 5}',
        '{"queues": [{}]}',
        *(json.dumps({"queues": [PROGRESS_ENTRY | {"committed": offset}]}) for offset in (-1, 2**63, "7", 1.5)),
    ],
)
def test_offset_that_is_invalid_is_not_read_from_a_report(text: str) -> None:
    assert decode_offsets(text)[0] == {}


def test_report_page_has_the_progress_of_each_queue() -> None:
    entries = [PROGRESS_ENTRY | {"start": 3, "given": 9}, PROGRESS_ENTRY | {"id": 6, "committed": None}]
    page = decode_progress(json.dumps({"queues": entries, "next": 400, "incarnation": "b8"}))
    assert page is not None
    assert page.queues == {Q5: QueueProgress(3, 9, 7), Q5._replace(id=6): QueueProgress(None, None, None)}
    assert (page.incarnation, page.next_start) == ("b8", 400)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"queues": [{}]}',
        json.dumps({"queues": [PROGRESS_ENTRY | {"given": -1}]}),
        '{"incarnation": "%s"}' % ("x" * 65),
    ],
)
def test_report_page_that_is_invalid_is_none(text: str) -> None:
    assert decode_progress(text) is None


def test_upgrade_reads_reports_of_the_previous_version_without_uncommitted_offsets() -> None:
    """The pages of sidecars of the previous version have no start offsets either."""
    report = decode_report('{"member": "m1", "uid": "u", "generation": 1}')
    assert (report.uncommitted, report.incarnation) == ([], "")
    page = decode_progress(json.dumps({"queues": [PROGRESS_ENTRY], "next": None}))
    assert page is not None
    assert (page.incarnation, page.queues) == ("", {Q5: QueueProgress(None, None, 7)})


def test_report_names_uncommitted_offsets() -> None:
    entry = {"topic": "orders", "broker": "broker-a", "id": 5, "given": 9, "start": 3, "later": True}
    text = json.dumps({"member": "m1", "uid": "u", "generation": 1, "uncommitted": [entry]})
    assert decode_report(text).uncommitted == [Uncommitted(*Q5, 9, 3)]


def test_report_keeps_only_known_queue_states() -> None:
    states = {f"state-{number}": number for number in range(2000)} | {"full": 2, "stuck": 1}
    text = msgspec.json.encode({"member": "m1", "uid": "u", "generation": 1, "states": states})
    assert decode_report(text).states == {"full": 2, "stuck": 1}


def test_restart_document_names_incarnations_in_schema_2_only() -> None:
    holder = Holder("m1", "u1")
    assignment = Assignment(
        group="g",
        generation=7,
        issued_at=NOW,
        members={"m1": Share("u1", (Queue("t", "b", 1),), 3), "m2": Share("u2")},
        releasing={Queue("t", "b", 0): Release(holder, "m2", 6, NOW, 3)},
        incarnations_since=5,
    )
    body = json.loads(plain_text(assignment))
    assert (body["schema"], body["incarnationsSince"]) == (2, 5)
    assert (body["members"]["m1"]["incarnation"], "incarnation" in body["members"]["m2"]) == (3, False)
    assert body["releasing"]["t"]["b"]["0"]["incarnation"] == 3
    assert decode_assignment(plain_text(assignment)) == assignment
    assert "incarnation" not in plain_text(EXAMPLE)
    cases: list[dict[str, object]] = [{"schema": 2}, {"schema": 1, "incarnationsSince": 5}]
    for change in cases:
        with pytest.raises(
            ValueError, match=r"^The assignment cannot be read: its schema is \d, but incarnationsSince"
        ):
            decode_assignment(signed_text(change))


def test_report_of_an_earlier_version_has_a_random_text_as_its_incarnation() -> None:
    text = '{"member":"m1","uid":"u","generation":1,"incarnation":"%s","reads":%d}'
    reports = [
        decode_report(text % fields) for fields in (("104423", 1), ("d1f0aa", 2), ("", 2), ("1" * 13, 2), ("12", 2))
    ]
    assert [report.incarnation_number for report in reports] == [0, 0, 0, 0, 12]
