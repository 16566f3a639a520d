"""How far groups are behind: offsets are polled, merged, kept as samples, judged and summed.

May know `state`; the judgement itself is `rota.lag` and `rota.lag_columns`.
"""
