"""History of groups: order of assignments, owners, audit, lag states, rollups. May import `common` and `ingest`."""
