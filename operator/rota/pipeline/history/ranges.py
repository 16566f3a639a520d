"""Queues that are written as ranges, `0-3,7` by topic and broker, taken apart by Spark; and how long things last."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


def ids(ranges: Column) -> Column:
    """Return the numbers of a text such as `0-3,7`; of one that cannot be read null."""

    def run(part: Column) -> Column:
        ends = F.split(part, "-")
        return F.sequence(F.element_at(ends, 1).try_cast("int"), F.element_at(ends, -1).try_cast("int"))

    return F.flatten(F.transform(F.split(ranges, ","), run))


def count(queues: Column) -> Column:
    """Return how many queues there are."""
    texts = F.flatten(F.transform(F.map_values(queues), F.map_values))
    return F.aggregate(texts, F.lit(0).cast("bigint"), lambda so_far, text: so_far + F.size(ids(text)))


def by_queue(df: DataFrame, ranges: str = "queues") -> DataFrame:
    """Give each queue a row: `topic`, `broker` and `queue` in place of the ranges."""
    others = [name for name in df.columns if name != ranges]
    by_topic = df.select(*others, F.explode(ranges).alias("topic", "_brokers"))
    by_broker = by_topic.select(*others, "topic", F.explode("_brokers").alias("broker", "_ids"))
    return by_broker.select(*others, "topic", "broker", F.explode(ids(F.col("_ids"))).alias("queue"))


def seconds(since: str, until: str) -> Column:
    """Return how long it is from one time to another."""
    return (F.unix_micros(F.col(until)) - F.unix_micros(F.col(since))) / 1e6
