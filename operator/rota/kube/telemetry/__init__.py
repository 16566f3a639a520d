"""What the operator exports of its reconciles: metrics, traces, and the journal.

May know what `reconcile` returns; nothing in `reconcile` waits for an export.
"""
