"""The journal: records of decisions and observations, in files that the pipeline reads.

May import `reconcile` and `brokers`; docs/journal.md documents the records.
"""
