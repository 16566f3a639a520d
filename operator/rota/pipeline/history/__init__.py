"""What happened, from tables: the order of assignments, owners, lag states, rollups, and an audit.

May know `common` and `ingest`.
"""
