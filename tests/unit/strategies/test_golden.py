"""Compares strategies with the reference client: rows of golden/strategies.jsonl that describe a whole fleet."""

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rota.model import Roster
from rota.strategies import allocate
from rota.strategies.consistent_hash import ring_position

Row = dict[str, Any]
ROWS: list[Row] = [
    json.loads(line) for line in (Path(__file__).parents[2] / "golden" / "strategies.jsonl").read_text().splitlines()
]
VALID_ROWS: list[Row] = []
INVALID_ROWS: list[Row] = []


def rows_of_kind(kind: str) -> list[Row]:
    return [row for row in ROWS if row["kind"] == kind]


def java_string_hash(text: str) -> int:
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = value * 31 + (high << 8 | low)
    return ctypes.c_int32(value).value


HASHES: dict[str, Callable[[str], int]] = {"md5": ring_position, "javaStringHashCode": java_string_hash}


def options(strategy: str, config: dict[str, Any]) -> dict[str, Any]:
    """Translate the config of a row to options of the strategy."""
    if strategy == "CONSISTENT_HASH":
        return {"virtualNodes": config["virtualNodeCnt"], "hash": HASHES[config.get("hashFunction", "md5")]}
    if strategy == "MACHINE_ROOM":
        return {"rooms": config["consumeridcs"] or ()}
    if strategy == "CONFIG":
        return {"queues": config["messageQueueList"] or ()}
    if strategy == "MACHINE_ROOM_NEARBY":
        inner = config["inner"]
        return {
            "inner": inner["strategy"],
            "innerOptions": options(inner["strategy"], inner["config"]),
            "queueRooms": config["brokerRoom"],
            "memberRooms": config["consumerRoom"],
        }
    return {}


def is_about_one_caller(row: Row) -> bool:
    """Whether a row is left out: it describes the view of one caller, or a setting that Rota does not have."""
    config = row["config"]
    never_set = row["strategy"] == "MACHINE_ROOM" and config["consumeridcs"] is None
    inner_by_config = row["strategy"] == "MACHINE_ROOM_NEARBY" and (config["inner"] or {}).get("strategy") == "CONFIG"
    absent_caller = "currentCid" in row and (not row["currentCid"] or row["currentCid"] not in (row["cidAll"] or []))
    return never_set or inner_by_config or (absent_caller and not has_invalid_lists(row))


def has_invalid_lists(row: Row) -> bool:
    queues, members = row["mqAll"], row["cidAll"]
    if not queues or not members:
        return True
    return len(set(members)) < len(members) or len({tuple(queue) for queue in queues}) < len(queues)


def has_sorted_lists(row: Row) -> bool:
    roster = Roster.of(map(tuple, row["mqAll"]), row["cidAll"])
    return ([list(queue) for queue in roster.queues], list(roster.members)) == (row["mqAll"], row["cidAll"])


def allocate_row(row: Row) -> dict[str, list[list[Any]]]:
    translated_options = options(row["strategy"], row["config"])
    shares = allocate(
        row["strategy"], [tuple(queue) for queue in row["mqAll"] or ()], row["cidAll"] or (), options=translated_options
    )
    return {member: [list(queue) for queue in share] for member, share in shares.items()}


def row_errors(row: Row) -> list[Any]:
    return (
        [row["error"]]
        if "error" in row
        else [result["error"] for result in row.get("results", {}).values() if "error" in result]
    )


for candidate in ROWS:
    if "strategy" not in candidate or is_about_one_caller(candidate):
        continue
    if has_invalid_lists(candidate) or row_errors(candidate):
        INVALID_ROWS.append(candidate)
    elif has_sorted_lists(candidate):
        VALID_ROWS.append(candidate)


@pytest.mark.parametrize("row", VALID_ROWS, ids=lambda row: f"{row['id']}-{row['strategy']}")
def test_strategy_results_match_the_reference_client(row: Row) -> None:
    expected = row["results"] if "results" in row else {row["currentCid"]: row["result"]}
    shares = allocate_row(row)
    assert {member: shares[member] for member in expected} == {
        member: share or [] for member, share in expected.items()
    }


@pytest.mark.parametrize("row", INVALID_ROWS, ids=lambda row: f"{row['id']}-{row['strategy']}")
def test_strategy_rejects_input_that_the_reference_rejects_or_assigns_twice(row: Row) -> None:
    with pytest.raises(ValueError, match=r"^[A-Z].* .*"):
        allocate_row(row)


@pytest.mark.parametrize("row", rows_of_kind("sort"), ids=lambda row: row["id"])
def test_roster_sorts_names_and_queues_as_java_does(row: Row) -> None:
    queues, members = row["mqAll"], row["cidAll"]
    if queues:
        assert [list(queue) for queue in Roster.of(map(tuple, queues), ["m"]).queues] == row["mqSorted"]
    if members:
        assert list(Roster.of([("t", "b", 0)], members).members) == row["cidSorted"]


@pytest.mark.parametrize("row", rows_of_kind("hash"), ids=lambda row: row["id"])
def test_consistent_hash_ring_positions_match_the_reference(row: Row) -> None:
    assert ring_position(row["key"]) == row["md5Ring"]
    assert java_string_hash(row["key"]) == row["javaStringHashCode"]


def test_strategy_golden_file_has_the_expected_row_counts() -> None:
    counted = (len(ROWS), len(VALID_ROWS), len(INVALID_ROWS), len(rows_of_kind("sort")), len(rows_of_kind("hash")))
    assert counted == (208, 106, 36, 6, 10)  # the other rows are unsorted, or describe the view of one caller
