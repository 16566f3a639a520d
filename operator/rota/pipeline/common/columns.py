"""Spark expressions that several stages share."""

from pyspark.sql import Column
from pyspark.sql import functions as F


def false_if_null(condition: Column) -> Column:
    """Return a condition, false where it is null, so that `~` of it is never null."""
    return F.coalesce(condition, F.expr("false"))
