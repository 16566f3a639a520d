"""Policies for each group: costs, ranking, manifests, backtest. May import `replay` and what `replay` may import."""
