"""Readers of a group's history in Python workers: records from Spark, samples from the lake's files by pyarrow."""
