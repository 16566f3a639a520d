"""Invented fleets: histories of groups, and the journal that operators would have written of them.

May know `replay` and what is below it.
"""
