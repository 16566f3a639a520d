"""State of each group that the operator keeps between reconciles: its spec, pods, stored assignment and limits.

Values and pure functions over them; sends no requests. May import the object types of `client`.
"""
