"""`rota pipeline`: commands that start Spark.

May use `console` and `rota.pipeline`. Knows no cluster.
"""
