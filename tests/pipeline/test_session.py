"""Where spark-submit starts us, its settings count for more than ours; and what is small takes fewer parts."""

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from rota.pipeline.common.spark_session import SETTINGS, fit_partitions

PARTITIONS, MANY = "spark.sql.shuffle.partitions", os.cpu_count() or 1

ASKS = """
from rota.pipeline.common.spark_session import create_session
spark = create_session("asked")
names = "spark.sql.shuffle.partitions", "spark.sql.session.timeZone", "spark.master"
print("told:", *map(spark.sparkContext.getConf().get, names[2:]), *map(spark.conf.get, names[:2]))
"""


@pytest.mark.slow("settings by spark-submit, in a JVM of its own")
def test_spark_submit_settings_override_our_defaults(tmp_path: Path) -> None:
    program = tmp_path / "asks.py"
    program.write_text(ASKS)
    submit = Path(pyspark.__file__).parent / "bin/spark-submit"
    given = ["--master", "local[1]", "--conf", "spark.sql.shuffle.partitions=3"]
    env = {"PATH": "/usr/bin:/bin", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    ran = subprocess.run([submit, *given, program], env=env, capture_output=True, text=True, timeout=180, check=True)
    assert "told: local[1] 3 UTC" in ran.stdout


def test_spark_shuffle_partitions_shrink_for_small_input_unless_set_by_the_user(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, PARTITIONS, "400")
    own = spark.newSession()
    with (tmp_path / "large.parquet").open("wb") as file:
        file.truncate(200 * 16 * 2**20)  # takes no room on the disk
    assert [fitted(own, "400", tmp_path), fitted(own, "400", tmp_path / "nothing")] == ["200", str(4 * MANY)]
    assert fitted(own, "7", tmp_path) == "7"  # somebody has set it


def fitted(spark: SparkSession, before: str, folder: Path) -> str | None:
    spark.conf.set(PARTITIONS, before)
    fit_partitions(spark, folder)
    return spark.conf.get(PARTITIONS)
