"""Lag of groups: offsets are polled, merged, kept as samples, judged and summed.

May import `state`; the judgement itself is in `rota.lag` and `rota.lag_columns`.
"""
