"""The journal: whole lines in hourly files, and nobody who waits for a disk."""

import json
from pathlib import Path

import pytest

from rota.documents import journal_record
from rota.kube.journal import STDOUT, Journal

EARLY = journal_record("plan", "shop/orders", "2026-11-21T08:59:59.999Z", generation=1)
LATE = journal_record("plan", "shop/orders", "2026-11-21T09:00:00.000Z", generation=2)


def written(where: str, writer: str, *records: dict[str, object]) -> None:
    journal = Journal(where, writer)
    journal.write(records)
    journal.close()


def test_facts_go_to_the_file_of_their_hour_and_their_writer(tmp_path: Path) -> None:
    for _ in range(2):
        written(str(tmp_path), "operator-a", EARLY, LATE)
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.glob("*/*")}
    assert found.keys() == {f"date=2026-11-21/{hour}-operator-a.jsonl" for hour in ("08", "09")}
    lines = found["date=2026-11-21/08-operator-a.jsonl"].splitlines()
    assert [json.loads(line) for line in lines] == [EARLY, EARLY]


def test_facts_go_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    written(STDOUT, "a", EARLY)
    assert json.loads(capfdbinary.readouterr().out) == EARLY


def test_who_wants_no_journal_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written("", "a", EARLY)
    assert not list(tmp_path.iterdir())


def test_a_place_where_nothing_can_be_written_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--journal .*file/a: nothing can be written there: Not a directory; give "):
        Journal(str(tmp_path / "file" / "a"), "a")


def test_a_disk_that_cannot_be_written_is_said_once_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "journal"
    journal = Journal(str(where), "a")
    where.rmdir()
    where.touch()
    journal.write([EARLY])
    journal.write([LATE])
    journal.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
