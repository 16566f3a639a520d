"""Lag of groups: offsets are polled, merged, kept as samples, turned into lag and summed.

May import `state`. `rota.lag` and `rota.lag_columns` compute lag, delay and lag state from the samples.
"""
