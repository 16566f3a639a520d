"""Reading the journal into tables: selects files, validates lines, removes duplicates.

Imports only `common`.
"""
