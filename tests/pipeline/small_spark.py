"""Spark as a process of its own in tests: how much it may take, and how long it may take to start."""

LONGEST = 300  # seconds: until Java has begun, on a machine that has much else to do


SMALL = {"ROTA_SPARK_MEMORY": "1g", "ROTA_SPARK_CORES": "2"}
