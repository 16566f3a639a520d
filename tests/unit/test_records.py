"""Tests journal records: those of the planner round-trip, torn lines are rejected, and the page lists all fields."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest

from builders import LONG, NOW, a_document, a_pod, a_report, a_snapshot, a_view, obeying
from rota import records
from rota.handover import OwnershipState, Proof
from rota.lag import LagState
from rota.model import Queue
from rota.planner import plan
from rota.planner.members.member_states import MemberState
from rota.planner.status.causes import MOVING_ACTS
from rota.records import KINDS, Record, decode_record, journal_record

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
EXAMPLES = [block.encode() for block in re.findall(r"^```json\n(.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)]
Q = [Queue("orders", "a", number) for number in range(8)]


def planned_records() -> tuple[Any, ...]:
    """Return the records of a plan: one member ended, one joins, and queues are in handover."""
    document = a_document(members={"m1": Q[:2], "m2": Q[2:4]}, taken={Q[4]: ("m2", "m1"), Q[5]: ("m0", "m1")})
    pods = obeying(document, m2={"report": a_report("m2", 5, Q[2:4])})
    joiner = a_pod("m3", a_report("m3", 5, ()), stable_for=LONG)
    views = {"orders": a_view(7)}
    return plan(
        a_snapshot(document=document, pods=(*pods, joiner), deleted_uids=frozenset({"uid-m0"}), views=views), NOW
    ).journal_records


def test_journal_records_of_the_planner_round_trip() -> None:
    assert {record["kind"] for record in planned_records()} == {"membership", "plan", "handover", "verdict"}
    for record in planned_records():
        decoded = msgspec.to_builtins(decode_record(msgspec.json.encode(record)))
        assert datetime.fromisoformat(decoded.pop("at")) == datetime.fromisoformat(record["at"])
        present = {name: value for name, value in decoded.items() if name in record or value is not None}
        assert present == {name: value for name, value in record.items() if name != "at"}


@pytest.mark.parametrize("line", EXAMPLES)
def test_journal_line_that_is_truncated_anywhere_is_rejected(line: bytes) -> None:
    for cut in range(len(line)):
        with pytest.raises(ValueError, match=r"^The line is incomplete, or not a journal record: "):
            decode_record(line[:cut])


@pytest.mark.parametrize("line", EXAMPLES)
def test_journal_line_that_is_truncated_and_joined_to_another_record_is_rejected(line: bytes) -> None:
    for cut in range(1, len(line)):
        with pytest.raises(ValueError, match=r"^The line is incomplete, or not a journal record: "):
            decode_record(line[:cut] + EXAMPLES[1])


def test_journal_line_with_a_zero_byte_is_rejected() -> None:
    """A lost disk block in the middle of a file reads as zeros."""
    line = EXAMPLES[1]
    for start in range(len(line)):
        with pytest.raises(ValueError, match=r"^The line is incomplete"):
            decode_record(line[:start] + b"\0" + line[start + 1 :])


@pytest.mark.parametrize("line", [b"", b"\n", b"null", b"[]", b"{}", b"1", b'{"kind":"plan"}', b"\xff", b"[" * 9999])
def test_journal_line_that_is_no_record_is_rejected_with_a_sentence(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"^The line is incomplete, or not a journal record: "):
        decode_record(line)


def test_journal_record_fields_of_later_versions_are_ignored() -> None:
    fact = msgspec.json.decode(EXAMPLES[1]) | {"weather": {"rain": [1, 2]}}
    assert decode_record(msgspec.json.encode(fact)) == decode_record(EXAMPLES[1])


@pytest.mark.parametrize("changed", [{}, {"queues": "many"}, {"kind": "weather"}])
def test_journal_record_of_a_later_schema_is_rejected_with_a_sentence(changed: dict[str, Any]) -> None:
    fact = msgspec.json.decode(EXAMPLES[1]) | {"schema": 2} | changed
    with pytest.raises(ValueError, match=r"^The record has schema 2; this version reads 1: read it with a later one$"):
        decode_record(msgspec.json.encode(fact))


def test_journal_record_of_an_unknown_kind_is_rejected_with_a_sentence() -> None:
    fact = journal_record("weather", "shop/orders", "2026-11-21T09:00:00Z")
    with pytest.raises(ValueError, match=r"^Record kind 'weather' is unknown to this version; skip"):
        decode_record(msgspec.json.encode(fact))


@pytest.mark.parametrize(
    ("number", "changed", "sentence"),
    [
        (1, {"queues": -1}, "The plan record cannot be read: Expected `int` >= 0"),
        (1, {"at": "2026-11-21T09:00:00"}, "The plan record cannot be read: Expected `datetime` with a timezone"),
        (1, {"group": None}, "The plan record cannot be read: Expected `str`, got `null`"),
        (
            6,
            {"topics": {"orders": {"broker-a": {"ids": [0, 1], "first": [0], "last": [0, 9], "committed": [0, 9]}}}},
            "The offsets record cannot be read: ids, first, last and committed differ in length",
        ),
    ],
)
def test_journal_record_with_an_invalid_value_is_rejected_with_the_reason(
    number: int, changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        decode_record(msgspec.json.encode(msgspec.json.decode(EXAMPLES[number]) | changed))


def record_fields(kind: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a record and their types, as on the page; `*` stands for any name."""
    for field in msgspec.structs.fields(kind):
        for name, type_text in nested_fields(field.type, path + field.encode_name):
            yield name, type_text if field.required else type_text.replace(" or null", ", or not there")


def nested_fields(kind: Any, path: str) -> Iterator[tuple[str, str]]:
    if get_origin(kind) is dict:
        yield from nested_fields(get_args(kind)[1], f"{path}.*")
    elif get_origin(kind) is list and is_a_struct(get_args(kind)[0]):
        yield from record_fields(get_args(kind)[0], f"{path}[].")
    elif is_a_struct(kind):
        yield from record_fields(kind, f"{path}.")
    else:
        yield path, type_name(kind)


def is_a_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def type_name(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return type_name(get_args(kind)[0])
    if get_origin(kind) is list:
        return f"list: {type_name(get_args(kind)[0])}"
    if get_origin(kind) in {Union, UnionType}:
        return f"{type_name(get_args(kind)[0])} or null"
    words: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
    return (words | {datetime: "time", Any: "any"})[kind]


def tables() -> dict[str, list[tuple[str, str]]]:
    """Return the rows of the tables of fields on the page, by heading."""
    sections = re.findall(r"^##+ (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return {name.strip("`"): re.findall(r"^\| `(.*?)` \| (.*?) \|", text, re.MULTILINE) for name, text in sections}


def test_journal_page_has_every_field_of_every_kind_with_its_type() -> None:
    shared = [name for name, _ in record_fields(Record)]
    page = tables()
    assert sorted(page["What every record has"]) == sorted([*record_fields(Record), ("kind", "string")])
    for kind in KINDS:
        own = [field for field in record_fields(kind) if field[0] not in shared]
        assert sorted(page[str(kind.__struct_config__.tag)]) == sorted(own)


def test_journal_page_has_an_example_of_every_kind_with_known_fields() -> None:
    assert tuple(type(decode_record(line)) for line in EXAMPLES) == KINDS
    for line, kind in zip(EXAMPLES, KINDS, strict=True):
        assert msgspec.json.decode(line).keys() <= {
            "kind",
            *(field.encode_name for field in msgspec.structs.fields(kind)),
        }


def test_journal_page_names_the_schema_that_is_written() -> None:
    assert f"The schema is {records.RECORD_SCHEMA}." in PAGE


def test_journal_page_lists_every_enum_value_of_records() -> None:
    assert [
        word for word in [*MOVING_ACTS, *Proof, *OwnershipState, *MemberState, *LagState] if f"`{word}`" not in PAGE
    ] == []
