"""From the journal's lines to tables: which files are taken, which lines are valid, once each.

May know `common`.
"""
