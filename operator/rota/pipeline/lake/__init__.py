"""The lake: Delta tables below one root, written by pyarrow, committed by deltalake, and joined by snapshots."""
