"""Synthetic fleets: generated histories, and their journals. May import `replay` and what `replay` may import."""
