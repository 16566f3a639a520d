"""What is concluded from the notes of apps, without a node."""

import json
from pathlib import Path

from e2e.deliveries import Notes
from sidecar.checker import Fact

MESSAGE = {"topic": "shipping", "broker": "broker-0", "queue": 0, "offset": 0, "attempt": 1}
BEGUN = {"name": "1/0", "begin": 3.0, "messages": [{**MESSAGE, "generation": 1, "number": 7, "id": "a"}]}


def died(folder: Path, **lines: list[dict[str, object]]) -> list[Fact]:
    """Return what is known of the ends of apps that noted these lines, each container in a file of its own."""
    for name, noted in lines.items():
        (folder / f"{name.replace('_', '@')}.jsonl").write_text("".join(json.dumps(note) + "\n" for note in noted))
    notes = Notes(folder, "shipping")
    notes.done()
    return [*notes.died()]


def test_crash_is_known_from_the_next_container_that_has_got_nothing_yet(tmp_path: Path) -> None:
    assert died(tmp_path, a_1=[BEGUN], a_2=[], b_1=[BEGUN]) == [Fact(3.0, "app", "a")]


def test_crash_is_known_from_the_note_of_an_app_that_is_not_started_again(tmp_path: Path) -> None:
    assert died(tmp_path, a_1=[BEGUN, {"died": 4.0}]) == [Fact(4.0, "app", "a")]


def test_drain_ends_with_the_note_of_an_app_that_is_told_to_stop(tmp_path: Path) -> None:
    assert died(tmp_path, a_1=[BEGUN, {"stopped": 5.0}], a_2=[]) == [Fact(5.0, "stopped", "a")]
