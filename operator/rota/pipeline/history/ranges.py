"""Spark expressions for ranges of queues (`0-3,7`, by topic and broker), and for durations."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


def parse_ids(ranges: Column) -> Column:
    """Return the ids of a text such as `0-3,7`; null if any part of it cannot be parsed."""

    def ids_of_part(part: Column) -> Column:
        bounds = F.split(part, "-")
        first = F.element_at(bounds, 1).try_cast("int")
        last = F.element_at(bounds, -1).try_cast("int")  # of a single id, such as 7, this is the same element
        return F.sequence(first, last)

    return F.flatten(F.transform(F.split(ranges, ","), ids_of_part))


def count_queues(queues: Column) -> Column:
    """Return the number of queues in a map of ranges by topic and broker; null if a text cannot be parsed."""
    texts = F.flatten(F.transform(F.map_values(queues), F.map_values))
    return F.aggregate(texts, F.lit(0).cast("bigint"), lambda so_far, text: so_far + F.size(parse_ids(text)))


def expand_by_queue(df: DataFrame, ranges: str = "queues") -> DataFrame:
    """Expand ranges to one row per queue: columns `topic`, `broker` and `queue` replace the ranges.

    A text that cannot be parsed gives no row; the reader has rejected such records (`rota.pipeline.ingest.lines`).
    """
    remaining = [name for name in df.columns if name != ranges]
    by_topic = df.select(*remaining, F.explode(ranges).alias("topic", "_brokers"))
    by_broker = by_topic.select(*remaining, "topic", F.explode("_brokers").alias("broker", "_ids"))
    return by_broker.select(*remaining, "topic", "broker", F.explode(parse_ids(F.col("_ids"))).alias("queue"))


def seconds_between(since: str, until: str) -> Column:
    """Return the seconds between two time columns."""
    return (F.unix_micros(F.col(until)) - F.unix_micros(F.col(since))) / 1e6
