"""History of groups, computed from the tables: order of assignments, owners, lag states, hourly metrics, audit.

Imports only `common` and `ingest`.
"""
