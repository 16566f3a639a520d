"""Spark expressions and steps that several stages share."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

_ROWS_PER_BATCH = 1000  # rows that a Python worker returns at once


def false_if_null(condition: Column) -> Column:
    """Return a condition, false where it is null, so that `~` of it is never null."""
    return F.coalesce(condition, F.expr("false"))


def select_columns(table: DataFrame, schema: StructType) -> DataFrame:
    """Return the columns of a schema, with its types."""
    return table.select(*(F.col(field.name).cast(field.dataType) for field in schema))


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a Spark schema, for the tables that Python workers return."""
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - slow to load, and only workers need it

    converted: pa.Schema = to_arrow_schema(schema, timezone="UTC")
    return converted


def map_groups(
    rows: DataFrame, map_group: Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]], schema: StructType
) -> DataFrame:
    """Return the rows that `map_group` makes of all rows of each group; it runs in Python workers.

    A batch has many groups, because a batch for each small group, as in `applyInArrow`, takes several times as long.
    """

    def map_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        result_schema = arrow_schema(schema)
        sorted_rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        by_group = groupby(sorted_rows, key=itemgetter("group"))
        mapped = chain.from_iterable(map_group(list(group_rows)) for _, group_rows in by_group)
        while batch := list(islice(mapped, _ROWS_PER_BATCH)):
            yield pa.RecordBatch.from_pylist(batch, schema=result_schema)

    return rows.repartition("group").sortWithinPartitions("group").mapInArrow(map_batches, schema)
