"""Recommended policy of each group: costs, ranking, manifests. May import `replay` and what `replay` may import."""
