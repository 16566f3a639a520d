"""Settings of spark-submit take precedence over most of Rota's; small input has fewer partitions."""

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from rota.pipeline.common import spark_session
from rota.pipeline.common.spark_session import SETTINGS, SMALL_SOURCE_BYTES, fit_partitions

PARTITIONS = "spark.sql.shuffle.partitions"
IGNORED_FILES = ("files.ignoreMissingFiles", "files.ignoreCorruptFiles")
CORES = os.cpu_count() or 1

PROGRAM = """
from rota.pipeline.common.spark_session import create_session
spark = create_session("test")
names = "spark.sql.shuffle.partitions", "spark.sql.session.timeZone", "spark.master"
print("settings:", *map(spark.sparkContext.getConf().get, names[2:]), *map(spark.conf.get, names[:2]))
"""


@pytest.mark.slow("settings by spark-submit, in a JVM of its own")
def test_spark_submit_settings_override_the_defaults_but_not_the_time_zone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    submit = Path(pyspark.__file__).parent / "bin/spark-submit"
    options = ["--master", "local[1]", "--conf", "spark.sql.shuffle.partitions=3"]
    options += ["--conf", "spark.sql.session.timeZone=Asia/Tokyo"]
    env = {"PATH": "/usr/bin:/bin", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    process = subprocess.run(
        [submit, *options, program], env=env, capture_output=True, text=True, timeout=180, check=True
    )
    assert "settings: local[1] 3 UTC" in process.stdout


@pytest.mark.parametrize("is_submitted", [False, True])
def test_spark_session_never_moves_times_or_ignores_files(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, *, is_submitted: bool
) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    if is_submitted:
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    for name, value in {"session.timeZone": "Asia/Tokyo", **dict.fromkeys(IGNORED_FILES, "true")}.items():
        spark.conf.set(f"spark.sql.{name}", value)
    spark_session.create_session("test")
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert [spark.conf.get(f"spark.sql.{name}") for name in IGNORED_FILES] == ["false", "false"]


def test_spark_shuffle_partitions_shrink_for_small_input_unless_set_by_the_user(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, PARTITIONS, "400")
    own = spark.newSession()
    large = 200 * 16 * 2**20
    assert [fitted_partitions(own, "400", large), fitted_partitions(own, "400", 0)] == ["200", str(4 * CORES)]
    assert fitted_partitions(own, "7", large) == "7"  # set by the user


def fitted_partitions(spark: SparkSession, configured: str, size_bytes: int) -> str | None:
    spark.conf.set(PARTITIONS, configured)
    fit_partitions(spark, size_bytes)
    return spark.conf.get(PARTITIONS)


@pytest.mark.parametrize(
    ("source_bytes", "is_quick"),
    [(0, True), (SMALL_SOURCE_BYTES, True), (SMALL_SOURCE_BYTES + 1, False), (None, False)],
)
def test_spark_session_of_a_small_source_uses_the_quick_compiler(
    source_bytes: int | None, *, is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    settings = spark_session.local_settings(source_bytes)
    assert ("-XX:TieredStopAtLevel=1" in settings["spark.driver.defaultJavaOptions"].split()) is is_quick


@pytest.mark.parametrize("logger", ["executor.Executor", "scheduler.TaskSetManager"])
def test_spark_session_leaves_the_errors_of_tasks_to_the_command(spark: SparkSession, logger: str) -> None:
    log_manager = spark.sparkContext._jvm.org.apache.logging.log4j.LogManager  # type: ignore[union-attr]
    assert not log_manager.getLogger(f"org.apache.spark.{logger}").isErrorEnabled()
    assert log_manager.getLogger("org.apache.spark.SparkContext").isErrorEnabled()
