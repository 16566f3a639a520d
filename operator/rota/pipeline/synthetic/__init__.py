"""Synthetic fleets: generated histories of groups, and the journal that operators would have written for them.

Imports `replay` and the packages that `replay` may import.
"""
