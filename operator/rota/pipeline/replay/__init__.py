"""Replay of each group's history with the real planner. May import `common`, `ingest` and `history`."""
