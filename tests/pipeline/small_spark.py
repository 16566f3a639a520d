"""Spark as a process of its own in tests."""

LONGEST = 300  # seconds: until Java has started, on a busy machine
SMALL = {"ROTA_SPARK_MEMORY": "1g", "ROTA_SPARK_CORES": "2"}
