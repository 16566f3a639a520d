"""Upkeep of a lake without Spark: compaction, retention, and removal of unneeded files and snapshots."""
