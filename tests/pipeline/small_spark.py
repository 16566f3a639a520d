"""Spark as a process of its own in tests."""

LONGEST = 900  # seconds: an ingest, or until Java has started, on a busy machine
SMALL = {"ROTA_SPARK_MEMORY": "1g", "ROTA_SPARK_CORES": "2"}
