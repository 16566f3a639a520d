"""Where spark-submit starts us, its settings count for more than ours."""

import subprocess
import sys
from pathlib import Path

import pyspark

ASKS = """
from rota.pipeline.session import session
spark = session("asked")
names = "spark.sql.shuffle.partitions", "spark.sql.session.timeZone", "spark.master"
print("told:", *map(spark.sparkContext.getConf().get, names[2:]), *map(spark.conf.get, names[:2]))
"""


def test_what_spark_submit_is_given_counts_for_more_than_our_settings(tmp_path: Path) -> None:
    program = tmp_path / "asks.py"
    program.write_text(ASKS)
    submit = Path(pyspark.__file__).parent / "bin/spark-submit"
    given = ["--master", "local[1]", "--conf", "spark.sql.shuffle.partitions=3"]
    env = {"PATH": "/usr/bin:/bin", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    ran = subprocess.run([submit, *given, program], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert "told: local[1] 3 UTC" in ran.stdout
