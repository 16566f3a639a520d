"""The ends of apps, as read from their logs, without a node."""

import json
from pathlib import Path

from e2e.deliveries import AppLogs
from sidecar.checker import Fact

MESSAGE = {"topic": "shipping", "broker": "broker-0", "queue": 0, "offset": 0, "attempt": 1}
REQUEST = {"name": "1/0", "begin": 3.0, "messages": [{**MESSAGE, "generation": 1, "number": 7, "id": "a"}]}


def app_ends(folder: Path, **lines: list[dict[str, object]]) -> list[Fact]:
    """Return the ends of apps with these logs, each container in a file of its own."""
    for name, entries in lines.items():
        (folder / f"{name.replace('_', '@')}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    app_logs = AppLogs(folder, "shipping")
    app_logs.done()
    return [*app_logs.app_ends()]


def test_crash_is_detected_by_a_later_container_without_deliveries(tmp_path: Path) -> None:
    assert app_ends(tmp_path, a_1=[REQUEST], a_2=[], b_1=[REQUEST]) == [Fact(3.0, "app", "a")]


def test_crash_is_detected_by_the_log_of_an_app_without_a_restart(tmp_path: Path) -> None:
    assert app_ends(tmp_path, a_1=[REQUEST, {"died": 4.0}]) == [Fact(4.0, "app", "a")]


def test_drain_ends_with_the_log_entry_of_a_stopped_app(tmp_path: Path) -> None:
    assert app_ends(tmp_path, a_1=[REQUEST, {"stopped": 5.0}], a_2=[]) == [Fact(5.0, "stopped", "a")]
