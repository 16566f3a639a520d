"""Queues as ranges: what is written is read back, what cannot be read is a sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.documents import from_ranges, ids_of, to_ranges
from rota.model import Queue


def test_neighbouring_ids_become_a_range() -> None:
    queues = [Queue("orders", "a", number) for number in (7, 0, 1, 2, 3)] + [Queue("orders", "b", 0)]
    assert to_ranges(queues) == {"orders": {"a": "0-3,7", "b": "0"}}
    assert to_ranges([]) == {}


@given(st.sets(st.tuples(st.sampled_from("xy"), st.sampled_from("ab"), st.integers(0, 40))))
def test_what_is_written_is_read_back(queues: set[tuple[str, str, int]]) -> None:
    assert from_ranges(to_ranges(Queue(*queue) for queue in queues)) == sorted(queues)


@pytest.mark.parametrize("ranges", ["", "x", "3-1", "1,,2", "-1", "0-", "1-2-3", "0-99999999", "9999999999"])
def test_what_cannot_be_read_is_a_sentence(ranges: str) -> None:
    with pytest.raises(ValueError, match="cannot be read: write them as 0-3,7"):
        ids_of(ranges)


def test_an_id_named_twice_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="name one id twice"):
        ids_of("0-3,2")
