"""The journal: records of what was decided and observed, in files that the pipeline reads.

May know `reconcile` and `brokers`; docs/journal.md publishes the records.
"""
