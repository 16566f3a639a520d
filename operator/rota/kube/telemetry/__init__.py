"""Telemetry of the operator's reconciles: metrics, traces, and the journal.

May import the result types of `reconcile`; nothing in `reconcile` waits for an export.
"""
