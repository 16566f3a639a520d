"""Upkeep of a lake without Spark: compaction, retention, and removal of files and snapshots that nobody reads."""
