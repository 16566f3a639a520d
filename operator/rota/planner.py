"""The decision: `plan(snapshot, now)` says everything that is to be written, without I/O or clock."""
