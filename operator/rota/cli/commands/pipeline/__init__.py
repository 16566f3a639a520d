"""`rota pipeline`: commands that start Spark.

May know `console` and `rota.pipeline`. Knows no cluster.
"""
