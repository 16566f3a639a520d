"""The lake: Delta tables below one root, written by Spark, committed by deltalake, and joined by snapshots."""
