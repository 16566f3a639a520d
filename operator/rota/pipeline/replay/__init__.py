"""What other policies would have done: the history of each group is replayed by the real planner.

May know `common`, `ingest` and `history`.
"""
