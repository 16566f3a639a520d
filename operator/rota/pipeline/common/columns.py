"""Spark expressions that several stages share."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType


def false_if_null(condition: Column) -> Column:
    """Return a condition, false where it is null, so that `~` of it is never null."""
    return F.coalesce(condition, F.expr("false"))


def select_columns(table: DataFrame, schema: StructType) -> DataFrame:
    """Return the columns of a schema, with its types."""
    return table.select(*(F.col(field.name).cast(field.dataType) for field in schema))
