"""Readers of Delta tables that need no Spark: logs, and rows as pyarrow's tables."""
