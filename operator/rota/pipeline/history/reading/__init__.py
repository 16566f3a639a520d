"""Rows of the history as its fold takes them: records from Spark, samples from the lake's files by pyarrow."""
