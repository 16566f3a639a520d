"""Tests the cut of JSON that is nested too deeply for a decoder."""

import json

import pytest

from rota.nesting import without_deep_values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": [1], "b": {}}', {"a": None, "b": None}),
        ('[{"a": {"b": [1]}}, "x"]', [None, "x"]),
        (r'{"a\"{": "}]\\", "b": ["["]}', {'a"{': "}]\\", "b": None}),
        ("[]", []),
        ("7", 7),
    ],
)
def test_api_object_is_cut_below_the_first_level(text: str, expected: object) -> None:
    assert json.loads(without_deep_values(text.encode(), 1)) == expected


def test_api_object_of_thousands_of_levels_is_readable_after_the_cut() -> None:
    deep = b'{"a":' * 9000 + b"1" + b"}" * 9000
    cut = without_deep_values(b'{"deep": ' + deep + b', "name": "x"}', 50)
    assert json.loads(cut)["name"] == "x"
    assert cut.count(b"{") == 50


@pytest.mark.parametrize("text", [b"[[1", b"]]", b'["', b'[[[["'])
def test_api_object_that_is_no_json_stays_none(text: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(without_deep_values(text, 1))
