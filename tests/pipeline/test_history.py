"""`rota history`: hourly rollups of a group, read without Spark, without Java, and without the package pyspark."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from deltalake import write_deltalake
from pyspark.sql.pandas.types import to_arrow_schema

from rota.cli import main
from rota.cli.commands import history as command
from rota.cli.commands.history import PRINTED_COLUMNS
from rota.pipeline.lake.snapshots import EMPTY_SNAPSHOT, LakeSnapshot
from rota.pipeline.lake.storage import storage_options
from rota.pipeline.lake.tables import TABLES, Lake

ROLLUP = "marts/rollup"
NIGHT = datetime(2026, 3, 2, 23, tzinfo=UTC)
WITHOUT_SPARK = "import sys; sys.modules['pyspark'] = None"


def hour_of(group: str, hour: datetime, **values: Any) -> dict[str, Any]:
    known = {"moved_queues": 2, "forced_queues": 0, "unowned_queue_seconds": 1.5, "complete": True}
    row: dict[str, Any] = dict.fromkeys(TABLES[ROLLUP].schema.fieldNames())
    return row | known | {"group": group, "hour": hour, "date": hour.date()} | values


def write_rollup(place: Path | str, *rows: dict[str, Any]) -> LakeSnapshot:
    """Replace the mart rollup of a lake, and publish it."""
    lake = Lake(str(place))
    schema = to_arrow_schema(TABLES[ROLLUP].schema, timezone="UTC")
    table = pa.Table.from_pylist(list(rows), schema=schema)
    options = storage_options(lake.uri)
    write_deltalake(f"{lake.uri}/{ROLLUP}", table, mode="overwrite", partition_by=["date"], storage_options=options)
    return lake.snapshots.publish(lake.snapshots.latest(), {ROLLUP: lake.table(ROLLUP).version()})


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    folder = tmp_path / "lake"
    write_rollup(
        folder,
        hour_of("shop/orders", NIGHT, lag_p99=120.0, rebalances={"MemberJoined": 1}),
        hour_of("shop/orders", NIGHT + timedelta(hours=1), lag_p99=None, complete=False),
        hour_of("shop/orders", NIGHT - timedelta(days=2)),
        hour_of("shop/orders-retry", NIGHT),
        hour_of("shop/stock", NIGHT + timedelta(hours=3)),
    )
    return folder


def history(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["history", *map(str, arguments)])


def json_of(*arguments: object) -> dict[str, Any]:
    result = history(*arguments, "-o", "json")
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def error_of(*arguments: object) -> str:
    result = history(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.exception
    return result.stderr


def test_rollup_history_has_the_last_hours_of_a_group_across_midnight(lake: Path) -> None:
    value = json_of("shop/orders", "--lake", lake)
    assert [row["hour"] for row in value["rows"]] == ["2026-03-02T23:00:00Z", "2026-03-03T00:00:00Z"]
    assert value["rows"][0]["rebalances"] == {"MemberJoined": 1}
    assert value["total"] == {
        "group": "shop/orders",
        "hour": "total",
        "moved_queues": 4,
        "forced_queues": 0,
        "unowned_queue_seconds": 3.0,
        "lag_p99": 120.0,
        "delay_p99": None,
        "complete": False,
    }
    assert value["snapshot"] == 1


def test_rollup_history_prints_the_columns_of_the_rollup_command_and_a_total(lake: Path) -> None:
    result = history("shop/orders", "--lake", lake, "--days", 4)
    header, *rows, total, note = [line.split() for line in result.stdout.splitlines()]
    assert header == [name.upper() for name in PRINTED_COLUMNS]
    assert [row[0] for row in rows] == ["shop/orders"] * 3
    assert total[:3] == ["shop/orders", "total", "6"]
    assert note[:2] == ["Snapshot", "1,"]


def test_rollup_history_reads_folders_and_buckets(lake_uri: str) -> None:
    write_rollup(lake_uri, hour_of("shop/orders", NIGHT), hour_of("shop/stock", NIGHT))
    assert [row["hour"] for row in json_of("shop/orders", "--lake", lake_uri)["rows"]] == ["2026-03-02T23:00:00Z"]


def test_rollup_history_counts_hours_from_the_newest_of_the_lake(lake: Path) -> None:
    assert len(json_of("shop/orders", "--lake", lake, "--hours", 3)["rows"]) == 1
    assert len(json_of("shop/orders", "--lake", lake, "--hours", 4)["rows"]) == 2


def test_rollup_history_ignores_hours_of_a_wrong_clock(lake: Path) -> None:
    tomorrow = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(days=1)
    write_rollup(lake, hour_of("shop/orders", NIGHT), hour_of("shop/orders", tomorrow))
    assert len(json_of("shop/orders", "--lake", lake)["rows"]) == 1


def test_rollup_history_reads_an_older_snapshot(lake: Path) -> None:
    newest = write_rollup(lake, hour_of("shop/orders", NIGHT))
    assert len(json_of("shop/orders", "--lake", lake)["rows"]) == 1
    assert len(json_of("shop/orders", "--lake", lake, "--snapshot", 1)["rows"]) == 2
    assert json_of("shop/orders", "--lake", lake, "--as-of", newest.created_at.isoformat())["snapshot"] == 2


def test_rollup_history_of_an_unknown_group_names_similar_ones(lake: Path) -> None:
    assert "Group shop/order is not in the last 24 hours" in error_of("shop/order", "--lake", lake)
    assert "similar: shop/orders, shop/orders-retry" in error_of("shop/order", "--lake", lake)
    assert "there is shop/orders, shop/orders-retry, shop/stock" in error_of("x", "--lake", lake)


@pytest.mark.parametrize("output", ["table", "json"])
def test_rollup_history_of_a_lake_without_rollups_says_how_to_make_them(tmp_path: Path, output: str) -> None:
    arguments = ["a", "--lake", tmp_path / "lake", "-o", output]
    assert f"{tmp_path}/lake does not exist; `rota pipeline ingest {tmp_path}/lake` makes one" in error_of(*arguments)
    Lake(str(tmp_path / "lake")).snapshots.publish(EMPTY_SNAPSHOT, {})
    assert "has no rollups in snapshot 1; `rota pipeline rollup` makes them" in error_of(*arguments)


def test_rollup_history_rejects_hours_and_days_together(lake: Path) -> None:
    assert "--hours and --days exclude each other" in error_of("a", "--lake", lake, "--hours", 1, "--days", 1)


def test_rollup_history_names_a_missing_file(lake: Path) -> None:
    for file in (lake / ROLLUP).glob("date=*/*.parquet"):
        file.unlink()
    assert ".parquet is missing; restore it" in error_of("shop/orders", "--lake", lake)


def run_alone(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `rota history` in a process of its own, after some code."""
    program = f"{code}; from rota.cli import main; main()"
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    words = [sys.executable, "-c", program, "history", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)


def test_rollup_history_needs_neither_spark_nor_java(lake: Path) -> None:
    process = run_alone(WITHOUT_SPARK, "shop/orders", "--lake", lake)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("GROUP")


@pytest.mark.parametrize("package", ["deltalake", "pyarrow"])
def test_rollup_history_names_the_package_that_it_needs(lake: Path, package: str) -> None:
    process = run_alone(f"import sys; sys.modules['{package}'] = None", "shop/orders", "--lake", lake)
    assert process.returncode == 2
    assert process.stderr == (
        f"rota: This command needs {package}, which is not installed: pip install 'rota-operator[history]'\n"
    )


def test_rollup_history_total_ignores_unknown_hours() -> None:
    rows = [{"group": "a", "delay_p99": None, "lag_p99": 3.0}, {"group": "a", "delay_p99": None, "lag_p99": 5.0}]
    total = command.total_of(rows)
    assert (total["delay_p99"], total["lag_p99"], total["moved_queues"]) == (None, 5.0, None)
